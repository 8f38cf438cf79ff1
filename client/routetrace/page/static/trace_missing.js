// The missing ranges of a trace in words: the text form of the picture.

import { reasonMark } from "./marks.js";
import { reason } from "./reasons.js";
import { cells } from "./runs.js";
import { fmt } from "./text.js";
import { h, put, rows } from "./ui.js";

const AT_FIRST = 100;
const HEADS = ["Positions", "Layers", "Cells", "Because", "What to do"];

/** The card of missing ranges; `set(data, layerIds)` fills it, pick(i) goes to hole i. */
export function missingCard(pick) {
  const count = h("span", { class: "muted" });
  const body = h("tbody");
  const more = h("button", { type: "button", onclick: () => {
    shown += 10 * AT_FIRST;
    fill();
  } });
  const foot = h("div", { class: "body bar" }, more);
  const table = h("div", { class: "scroll", tabindex: 0, role: "region",
    "aria-label": "Missing ranges" },
  h("table", null, h("thead", null, h("tr", null, HEADS.map((text, i) =>
    h("th", { scope: "col", class: i === 2 ? "right" : null }, text)))), body));
  const element = h("section", { class: "card", "aria-label": "Missing" },
    h("header", null, h("h2", null, "Missing"), count), table, foot);
  let shown = AT_FIRST;
  let ranges = null;
  let layerIds = [];

  function fill() {
    const total = ranges.t0.length;
    rows(body, Array.from({ length: Math.min(total, shown) }, (_, i) => i), (i) => i,
      (i) => makeRow(() => pick(i)), (row, i) => setRow(row, ranges, i, layerIds));
    foot.hidden = total <= shown;
    put(more, `Show ${fmt.int(Math.min(10 * AT_FIRST, total - shown))} more of ${fmt.int(total)}`);
  }

  return {
    element,
    set(data, ids) {
      ranges = data.holes;
      layerIds = ids;
      element.hidden = ranges.t0.length === 0;
      put(count, `${fmt.plural(data.missingCells, "cell")} in ${
        fmt.plural(ranges.t0.length, "range")}`);
      fill();
    },
  };
}

function makeRow(pick) {
  const position = h("button", { type: "button", class: "link", onclick: pick });
  const mark = reasonMark();
  const row = h("tr", null, h("td", null, position), h("td"),
    h("td", { class: "right" }), h("td", null, mark.element), h("td", { class: "words" }));
  row.mark = mark;
  return row;
}

function setRow(row, ranges, i, layerIds) {
  const [position, layers, count, , remedy] = row.children;
  const [t0, t1, l0, l1] = [ranges.t0[i], ranges.t1[i], ranges.l0[i], ranges.l1[i]];
  put(position.firstChild, t1 - t0 === 1 ? fmt.int(t0) : `${fmt.int(t0)} – ${fmt.int(t1 - 1)}`);
  put(layers, layerWords(layerIds, l0, l1));
  put(count, fmt.int(cells(ranges, i)));
  row.mark.set(ranges.key[i]);
  put(remedy, reason(ranges.key[i]).remedy);
}

/** Layers of columns [l0, l1) in words. */
export function layerWords(layerIds, l0, l1) {
  if (l1 - l0 === layerIds.length) return "all";
  return l1 - l0 === 1 ? `${layerIds[l0]}` : `${layerIds[l0]} – ${layerIds[l1 - 1]}`;
}
