// What the colours of a grid mean.

import { presentColour, reasonColour, sourceColour, weightColour } from "./colours.js";
import { rampBar, swatch } from "./marks.js";
import { harmless, reason, worstFirst } from "./reasons.js";
import { cells, UNKNOWN } from "./runs.js";
import { fmt, plain } from "./text.js";
import { h, put, rows } from "./ui.js";

const MOST = 24; // weights or sources that are listed one by one
const SHARES = {
  changed: "Share of a token's experts that the token before did not choose",
  differing: "Share of a cell's experts not chosen by ",
};

/**
 * The legend; `set(colouring, data, trace, who)` fills it, `who` being the other side.
 * pickReason(reason) goes to its next hole: reasons are buttons, with the number of their cells.
 */
export function legend(pickReason) {
  const bars = Object.keys(SHARES).map(rampBar);
  const words = h("span");
  const scale = h("span", { class: "scale" },
    "0 %", bars.map((bar) => bar.element), "100 %", words);
  const list = h("ul", { class: "swatches" });
  const holes = h("ul", { class: "swatches", "aria-label": "Missing, by reason" });
  const note = h("span");
  const element = h("div", { class: "legend" }, scale, list, holes, note);
  return {
    element,
    set(colouring, data, trace, who) {
      scale.hidden = !(colouring in SHARES);
      put(words, `${SHARES[colouring] ?? ""}${colouring === "differing" ? who : ""}`);
      Object.keys(SHARES).forEach((name, i) => {
        bars[i].element.hidden = name !== colouring;
        bars[i].set();
      });
      const items = itemsOf(colouring, data, trace);
      if (trace.prompt_len > 0 && trace.prompt_len < trace.num_rows) {
        items.push(["prompt", "var(--muted)", "dashed", "End of the prompt"]);
      }
      list.hidden = items.length === 0;
      rows(list, items, ([name]) => name, makeItem, setItem);
      note.hidden = data.joined === 0;
      put(note, `Shown together over ${2 ** data.joined} tokens; no hole is hidden.`);
      const counts = countsOf(data);
      holes.hidden = counts.length === 0;
      rows(holes, counts, ([name]) => name, ([name]) => makeReason(name, pickReason), setReason);
    },
  };
}

/** [name, colour, class of the swatch, words] of what a colouring shows. */
function itemsOf(colouring, data, trace) {
  if (colouring === "state") {
    const items = [["present", presentColour(false), "", "Present"]];
    if (data.state.key.includes(1)) {
      items.push(["cached", presentColour(true), "", "From a prefix cache"]);
    }
    return items;
  }
  if (colouring === "weights") {
    const count = data.versions.length;
    const all = data.versions.map((version, i) =>
      [`${version}`, weightColour(i, count), "", `${version}`]);
    if (data.weights.key.includes(UNKNOWN)) {
      all.push(["unknown", weightColour(UNKNOWN, count), "", "Unknown"]);
    }
    if (count <= MOST) return all;
    return [all[0], all[Math.floor(count / 2)], all[count - 1]];
  }
  if (colouring === "source") {
    const items = data.sources.slice(0, MOST).map((one, i) =>
      [`${i}`, sourceColour(i), "", sourceName(one)]);
    if (data.source.key.includes(UNKNOWN)) {
      items.push(["unknown", sourceColour(UNKNOWN), "", "Unknown"]);
    }
    if (data.attempt?.key.some((attempt) => attempt > 0)) {
      items.push(["attempt", sourceColour(0), "later", "Computed again after a preemption"]);
    }
    return items;
  }
  return [];
}

const sourceName = (one) => [one.engine, one.shard].filter(Boolean).map(plain).join(" ");

function countsOf({ holes }) {
  const counts = new Map();
  holes.key.forEach((name, i) => counts.set(name, (counts.get(name) ?? 0) + cells(holes, i)));
  return [...counts].sort(([a], [b]) => worstFirst(a, b));
}

function makeItem([, , className]) {
  const mark = swatch(className);
  const item = h("li", null, mark.element, h("bdi"));
  item.mark = mark;
  return item;
}

function setItem(item, [, colour, , words]) {
  item.mark.set(colour);
  put(item.lastChild, words);
}

function makeReason(name, pick) {
  const mark = swatch(harmless(name) ? "hatched" : "");
  const about = reason(name);
  const count = h("span", { class: "muted" });
  const button = h("button", {
    type: "button", class: "quiet", title: `${about.words} Go to the next one.`,
    onclick: () => pick(name),
  }, mark.element, about.title, count);
  const item = h("li", null, button);
  Object.assign(item, { mark, count });
  return item;
}

function setReason(item, [name, cellsMissing]) {
  item.mark.set(reasonColour(name));
  put(item.count, fmt.int(cellsMissing));
}
