// The panel and the box beside the pointer that say what is known of one cell.

import { reasonMark } from "./marks.js";
import { reason } from "./reasons.js";
import { fmt, plain } from "./text.js";
import { attr, h, put, rows, tip } from "./ui.js";

const NOT_HERE = "Its experts are not in this file.";
const COMPUTED = ["a forward pass of its own", "an earlier request (prefix cache)"];

/** [name, text or undefined] of each fact of a cell. */
const KNOWN = [
  ["Weights", (cell) => (cell.version === null ? "unknown" : cell.version)],
  ["Engine", (cell) => cell.agent?.engine],
  ["Shard", (cell) => cell.agent?.shard || undefined],
  ["Computed by", (cell) => COMPUTED[cell.cached]],
  ["Attempt", (cell) => cell.agent && cell.attempt + 1],
  ["Part", (cell, trace) => (cell.position < trace.prompt_len ? "prompt" : "answer")],
];

const titleOf = (cell) => `Position ${fmt.int(cell.position)}, layer ${cell.layer}`;

/** Words for a reader of screens. */
export function wordsOf(cell) {
  if (cell.reason) return `${titleOf(cell)}: ${reason(cell.reason).title}`;
  if (!cell.row?.valid) return titleOf(cell);
  return `${titleOf(cell)}: experts ${[...cell.row.ids].join(", ")}`;
}

/** The panel; `set(cell | null, trace, trouble, who)` fills it, `who` being the other side. */
export function cellPanel() {
  const hint = h("p", { class: "muted" },
    h("span", { class: "for-fingers" }, "Tap a cell to see its experts. Dragging sideways moves."),
    h("span", { class: "for-keys" }, "Point at a cell, or enter the grid with ",
      h("kbd", null, "Tab"), " and move with the arrow keys. Once the grid is entered, the wheel ",
      "zooms; dragging moves."));
  const title = h("h2", null, "Cell");
  const mark = reasonMark();
  const words = h("p");
  const remedy = h("p", { class: "muted" });
  const lost = h("div", { class: "lost" }, mark.element, words, remedy);
  const heading = h("p", { class: "muted" });
  const ids = h("ol", { class: "ids" });
  const chooser = h("p", { class: "muted" });
  const others = h("ol", { class: "ids" });
  const theirs = h("div", { class: "theirs" }, chooser, others);
  const known = h("dl", { class: "kv" });
  const element = h("aside", { "aria-label": "Cell" },
    title, hint, lost, heading, ids, theirs, known);
  return {
    element,
    set(cell, trace, trouble, who) {
      put(title, cell ? titleOf(cell) : "Cell");
      hint.hidden = Boolean(cell);
      lost.hidden = !cell?.reason;
      known.hidden = !cell?.present;
      heading.hidden = !cell?.present;
      const row = cell?.present && cell.row?.valid ? [...cell.row.ids] : [];
      ids.hidden = row.length === 0;
      const chosen = row.length > 0 && cell.other?.valid ? [...cell.other.ids] : [];
      showIds(ids, row, chosen.length > 0 ? chosen : row);
      theirs.hidden = chosen.length === 0;
      showIds(others, chosen, row);
      if (who) put(chooser, `${who[0].toUpperCase()}${who.slice(1)} chose`);
      if (!cell) return;
      if (cell.reason) {
        const about = reason(cell.reason);
        mark.set(cell.reason);
        put(words, about.words);
        put(remedy, about.remedy);
      }
      if (!cell.present) return;
      put(heading, row.length ? "Experts, in the router's order"
        : cell.row?.absent ? NOT_HERE : trouble ? trouble.message : "Asking for its rows …");
      const facts = KNOWN.map(([name, of]) => [name, of(cell, trace)])
        .filter(([, text]) => text !== undefined && text !== false);
      rows(known, facts, ([name]) => name, ([name]) => h("div", null, h("dt", null, name),
        h("dd", null, h("bdi"))), (pair, [, text]) => put(pair.lastChild.firstChild, plain(text)));
    },
  };
}

/** Show ids; those that the other side does not have are marked. */
function showIds(list, ids, others) {
  rows(list, ids, (_, i) => i, () => h("li"), (item, id) => {
    const odd = !others.includes(id);
    attr(item, "class", odd ? "odd" : null);
    attr(item, "title", odd ? "Not among the other side's" : null);
    put(item, id);
  });
}

/** The box beside the pointer, which follows the cell under it. */
export function cellTip() {
  const title = h("div");
  const mark = reasonMark();
  const ids = h("div", { class: "mono" });
  const weights = h("div", { class: "muted" });
  let at = null;
  return {
    set(cell, event) {
      if (event) at = { x: event.clientX, y: event.clientY };
      if (!cell || !at) {
        at = null;
        tip.hide();
        return;
      }
      put(title, titleOf(cell));
      if (cell.reason) {
        mark.set(cell.reason);
        tip.show(at.x, at.y, title, mark.element);
        return;
      }
      put(ids, cell.row?.valid ? wrapped(cell.row.ids) : cell.row?.absent ? NOT_HERE : "…");
      put(weights, `weights ${cell.version ?? "unknown"}`);
      tip.show(at.x, at.y, title, ids, cell.version !== undefined && weights);
    },
    hide() {
      at = null;
      tip.hide();
    },
  };
}

const wrapped = (ids) => (ids.length > 16 ? `${ids.slice(0, 16).join(" ")} …` : ids.join(" "));
