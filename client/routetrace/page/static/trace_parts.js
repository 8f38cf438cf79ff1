// The parts of the view of a trace, and what moves them: colourings, holes, positions.

import { onTheme } from "./colours.js";
import { Grid } from "./grid.js";
import { holeWalk } from "./holes.js";
import { optionsOf } from "./incarnations.js";
import { legend } from "./legend.js";
import { stateMark } from "./marks.js";
import { serverSource } from "./source.js";
import { fmt, plain } from "./text.js";
import { cellPanel, cellTip, wordsOf } from "./trace_cell.js";
import { alarm, factsCard } from "./trace_facts.js";
import { mismatchCard } from "./trace_mismatch.js";
import { missingCard } from "./trace_missing.js";
import { traceTools } from "./trace_tools.js";
import { copyButton, h, put, say, segmented } from "./ui.js";

const LABEL = "Cells of the trace, positions along and layers down. Arrow keys move, plus and " +
  "minus zoom, n goes to the next hole.";
const MODES = { state: "State", weights: "Weights", source: "Source", changed: "Change",
  differing: "Mismatch" };
const PAN = 160; // px

/**
 * Build the parts for the trace `id` of the run at `path`. pickIncarnation(number), pickSide(side)
 * and moved(position) are called for what people do; link(id) is the address of another trace,
 * expertsAt(filters) that of experts, where there is one.
 */
export function traceParts({ id, path, pickIncarnation, pickSide, moved, link, expertsAt }) {
  let trace = null;
  let trouble = null;
  let cell = null;
  let speaking = false;
  let segments = null;
  let against = null; // the side that rows are compared with
  let sameUntil = Infinity; // position from which on its tokens differ
  let wanted = "state"; // colouring

  const mark = stateMark();
  const incarnations = segmented("Incarnation", pickIncarnation);
  const copy = copyButton("Copy as Python", "Read this trace in Python", () => trace.python);
  const head = h("div", { class: "title" },
    h("h1", { class: "mono" }, h("bdi", { class: "id" }, plain(id))), mark.element,
    h("span", { class: "push bar" }, incarnations.element, copy));
  const facts = factsCard(expertsAt);
  const warning = alarm();
  const panel = cellPanel();
  panel.set(null); // its empty parts are not seen until the first cell is drawn
  const box = cellTip();
  const note = h("p", { class: "note", role: "status", hidden: true });
  const grid = new Grid({ label: LABEL, onCell, onTrouble, onMove, onDraw });
  const { viewport } = grid;
  const walk = holeWalk(grid, moved);
  const colours = legend((reason) => walk.jump(1, reason));
  const tools = traceTools({
    colour,
    jump: walk.jump,
    zoom: (factor) => viewport.zoom(factor),
    fit: () => viewport.fit(),
    position(at) {
      goTo(at);
      grid.canvas.focus();
    },
  });
  const missing = missingCard((i) => {
    walk.goTo(i);
    grid.canvas.scrollIntoView({ block: "nearest" });
    grid.canvas.focus({ preventScroll: true });
  });
  const mismatch = mismatchCard(pickSide, (at) => {
    colour("differing");
    goTo(at);
    grid.canvas.scrollIntoView({ block: "nearest" });
    grid.canvas.focus({ preventScroll: true });
  });
  const card = h("section", { class: "card cells", "aria-label": "Cells" },
    h("header", null, tools.colours.element, note, tools.bar, colours.element),
    h("div", { class: "viewer" }, h("div", { class: "stage" }, grid.element), panel.element));
  const unthemed = onTheme(() => grid.data && explain());

  function onCell(about, event) {
    cell = about;
    // Beyond, the other side has other tokens.
    if (cell?.position >= sameUntil) delete cell.other;
    if (speaking && !grid.over && cell) {
      say(wordsOf(cell));
      speaking = cell.present && !cell.row;
    }
    panel.set(cell, trace, trouble, against?.who);
    box.set(grid.over ? cell : null, event);
  }

  function onTrouble(error) {
    trouble = error;
    sayBusy();
  }

  function onMove() {
    speak();
    moved(viewport.cursor.position);
  }

  function onDraw() {
    tools.drawn(viewport);
    sayBusy();
  }

  function sayBusy() {
    const reads = grid.waiting && grid.source.values.includes(grid.colouring);
    const words = trouble ? plain(trouble.message)
      : reads ? `Reading ${fmt.int(grid.source.numRows)} tokens …` : "";
    put(note, words);
    note.hidden = !words;
  }

  /** Say the cell of the cursor, its ids as soon as they are here. */
  function speak() {
    speaking = true;
    say(wordsOf(cell));
  }

  function colour(name) {
    wanted = name;
    grid.setColouring(name);
    tools.colours.set(modes(), name);
    explain();
  }

  const explain = () => colours.set(grid.colouring, grid.data, trace, against?.who);

  /** [name, words] of each colouring for which the answer has data. */
  function modes() {
    const there = ["state", "weights", "source"].filter((name) => grid.data[name]);
    return [...there, ...grid.source.values].map((name) => [name, MODES[name]]);
  }

  function draw() {
    grid.setSource(serverSource(path, trace, segments, against?.name));
    const before = wanted; // also while the answer for another side is awaited
    colour(modes().some(([name]) => name === before) ? before : "state");
    wanted = before;
  }

  function nextColour() {
    const all = modes().map(([name]) => name);
    const next = all[(all.indexOf(grid.colouring) + 1) % all.length];
    colour(next);
    say(`Coloured by ${MODES[next]}`);
  }

  function goTo(position) {
    const last = grid.source.numRows - 1;
    if (last < 0) return;
    const at = Math.max(0, Math.min(last, position));
    const column = viewport.cursor?.column ?? 0;
    viewport.show(at - 12, at + 13, column, column + 1);
    grid.choose(at, column);
    onMove();
  }

  return {
    elements: [head, warning.element, facts.element, card, mismatch.element, missing.element],
    keys: [
      { keys: ["n"], words: "Next hole", run: () => walk.jump(1) },
      { keys: ["p"], words: "Previous hole", run: () => walk.jump(-1) },
      { keys: ["ArrowLeft"], run: () => viewport.pan(-PAN, 0) },
      { keys: ["ArrowRight"], run: () => viewport.pan(PAN, 0), shown: "← → ↑ ↓",
        words: "Move along; in the grid: to the next cell, with Shift far" },
      { keys: ["+", "="], words: "Zoom in", run: () => viewport.zoom(1.6) },
      { keys: ["-"], words: "Zoom out", shown: "−", run: () => viewport.zoom(1 / 1.6) },
      { keys: ["0"], words: "The whole trace", run: () => viewport.fit() },
      { keys: [":"], words: "Go to a position", run: tools.focusPosition },
      { keys: ["c"], words: "Colour by the next", run: nextColour },
    ],
    goTo,
    stop() {
      grid.stop();
      unthemed();
      box.hide();
    },
    /** Say why what is shown is not as it is now; null: it is. */
    warn(error) {
      if (!error) return warning.set(null);
      const lead = error.status === 404 ? "No longer there. " : "Not up to date. ";
      return warning.set(h("b", null, lead), plain(error.message));
    },
    /** Show facts, and their rectangles unless they are as before. */
    set(now, found) {
      const before = trace;
      trace = now;
      mark.set(now.state);
      incarnations.set(optionsOf(now), String(now.incarnation));
      facts.set(now);
      if (!found) return;
      segments = found;
      if (before?.incarnation !== now.incarnation) {
        walk.reset();
        against = null;
      }
      draw();
      tools.setHoles(grid.data.holes.t0.length);
      missing.set(grid.data, now.layer_ids);
      if (!before) say(`${plain(id)}: ${now.state}, coverage ${fmt.pct(now.coverage, 2)}`);
    },
    /** Show sides of the trace, the chosen one, and where it differs as far as is known. */
    compare(sides, side, found) {
      mismatch.set(sides, side, found);
      sameUntil = found?.other_tokens_from ?? Infinity;
      const next = found && !(found instanceof Error) && found.cells > 0 ? side : null;
      if (next?.name === against?.name) return;
      against = next;
      draw();
    },
  };
}
