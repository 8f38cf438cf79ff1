// A long list of traces, of which only the rows that are seen are in the document.

import { reasonMark, stateMark } from "./marks.js";
import { isCut } from "./reasons.js";
import { fmt, plain } from "./text.js";
import { attr, h, put, rows, style } from "./ui.js";

const ROW = 36; // px, also in traces.css
const NARROW_ROW = 60;
const BEYOND = 6; // rows above and below those that are seen
const MOST_ROWS = 72; // in the document
const COLUMNS = [
  ["id", "Trace", "asc"], ["", "State"], ["coverage", "Coverage", "asc"],
  ["missing", "Missing because", "desc"], ["tokens", "Tokens", "desc"],
  ["version", "Weights", "desc"], ["", "Engine"], ["", "Labels"], ["updated", "Updated", "desc"],
];
const RIGHT = new Set([4, 5, 8]);

/**
 * The list. at(i) is trace i, or undefined while it is on its way; href(trace) leads to it;
 * seen(first, stop) is told what is seen, sort(name, order) what is sorted by.
 */
export function traceList({ at, href, seen, sort }) {
  const narrow = matchMedia("(max-width: 720px)");
  const height = () => (narrow.matches ? NARROW_ROW : ROW);
  const heads = COLUMNS.map(([key, words, order], i) => makeHead(key, words, order, i));
  const head = h("div", { class: "head", role: "row", "aria-rowindex": 1 }, heads);
  const body = h("div", { class: "space", role: "rowgroup" });
  const element = h("div", { class: "list", role: "table", "aria-label": "Traces" },
    h("div", { class: "heads", role: "rowgroup" }, head), body);
  let count = 0;
  let chosen = -1;
  let asked = {};
  let frame = 0;

  function makeHead(key, words, order, i) {
    const content = key ? h("button", { type: "button", onclick: () => {
      const again = (asked.sort ?? "updated") === key;
      sort(key, again && (asked.order ?? "desc") === order ? flip(order) : order);
    } }, words, h("span", { "aria-hidden": "true" })) : words;
    return h("span", { role: "columnheader", class: RIGHT.has(i) ? "right" : null }, content);
  }

  /** Rows that are seen: [first, stop). */
  function range() {
    const first = Math.floor(element.scrollTop / height());
    const many = Math.ceil(element.clientHeight / height()) + 1;
    return [Math.min(first, Math.max(0, count - 1)), Math.min(count, first + many)];
  }

  function draw() {
    cancelAnimationFrame(frame);
    frame = 0;
    const [first, stop] = range();
    const from = Math.max(0, first - BEYOND);
    const to = Math.min(count, stop + BEYOND, from + MOST_ROWS);
    const shown = Array.from({ length: to - from }, (_, i) => from + i);
    // The chosen row holds the focus, also where it is not seen.
    if (chosen >= 0 && chosen < from) shown.unshift(chosen);
    if (chosen >= to) shown.push(chosen);
    style(body, "height", `${count * height()}px`);
    attr(element, "aria-rowcount", count + 1);
    const entry = chosen >= 0 ? chosen : first;
    rows(body, shown, (i) => i, makeRow, (row, i) => {
      style(row, "top", `${i * height()}px`);
      attr(row, "aria-rowindex", i + 2);
      row.classList.toggle("chosen", i === chosen);
      fill(row, at(i), href);
      attr(row.parts.link, "tabindex", i === entry ? 0 : -1);
    });
    seen(first, stop);
  }

  element.addEventListener("scroll", () => {
    frame ||= requestAnimationFrame(draw);
  }, { passive: true });
  body.addEventListener("focusin", (event) => {
    const row = event.target.closest(".row");
    if (row && row.index !== chosen) {
      chosen = row.index;
      draw();
    }
  });
  element.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !body.contains(event.target)) return;
    const page = Math.max(1, Math.floor(element.clientHeight / height()) - 2);
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -count,
      End: count }[event.key];
    if (!by) return;
    event.preventDefault();
    move(by);
  });
  const watcher = new ResizeObserver(draw);
  watcher.observe(element);
  narrow.addEventListener("change", draw);

  /** Choose the row that lies `by` rows on, and show it. */
  function move(by) {
    if (count === 0) return;
    const from = chosen >= 0 ? chosen : by > 0 ? range()[0] - 1 : range()[0] + 1;
    chosen = Math.max(0, Math.min(count - 1, from + by));
    const top = chosen * height();
    const room = element.clientHeight - head.offsetHeight;
    if (top < element.scrollTop) element.scrollTop = top;
    else if (top + height() > element.scrollTop + room) element.scrollTop = top + height() - room;
    draw();
    [...body.children].find((row) => row.index === chosen).parts.link
      .focus({ preventScroll: true });
  }

  return {
    element,
    draw,
    move,
    range,
    /** Go on with `chosen` at `top` px. */
    get place() {
      return { chosen, top: element.scrollTop };
    },
    /** Show another list of `total` traces in an order. */
    begin(total, order, place = { chosen: -1, top: 0 }) {
      count = total;
      asked = order;
      chosen = place.chosen < total ? place.chosen : -1;
      heads.forEach((cell, i) => {
        const by = COLUMNS[i][0] && COLUMNS[i][0] === (asked.sort ?? "updated");
        const up = asked.order === "asc";
        attr(cell, "aria-sort", by ? (up ? "ascending" : "descending") : null);
        if (COLUMNS[i][0]) put(cell.firstChild.lastChild, by ? (up ? " ↑" : " ↓") : "");
      });
      style(body, "height", `${count * height()}px`);
      element.scrollTop = place.top;
      draw();
    },
    stop() {
      cancelAnimationFrame(frame);
      watcher.disconnect();
      narrow.removeEventListener("change", draw);
    },
  };
}

const flip = (order) => (order === "asc" ? "desc" : "asc");

function makeRow(i) {
  const link = h("a", { class: "mono" }, h("bdi"));
  const state = stateMark();
  const reason = reasonMark();
  const bar = h("i");
  const meter = h("span", { class: "meter", "aria-hidden": "true" }, bar);
  const coverage = h("span");
  const cell = (className, ...children) => h("span", { role: "cell", class: className }, children);
  const row = h("div", { class: "row", role: "row" }, cell("name", link), cell("is", state.element),
    cell("covers", meter, coverage), cell("because", reason.element, h("span", { class: "muted" })),
    cell("right tokens"), cell("right weights"), cell("engine", h("bdi")),
    cell("muted small labelled", h("bdi")), cell("right muted when"));
  Object.assign(row, { index: i, parts: { link, state, reason, bar, meter, coverage } });
  return row;
}

function fill(row, trace, href) {
  row.classList.toggle("coming", !trace);
  if (!trace) return;
  const { link, state, reason, bar, meter, coverage } = row.parts;
  const [, , , because, tokens, weights, engine, labels, when] = row.children;
  const gone = trace.state === "gone";
  put(link.firstChild, plain(trace.trace_id));
  attr(link, "href", href(trace));
  attr(link, "title", plain(trace.trace_id));
  state.set(trace.state);
  const share = trace.coverage ?? null;
  meter.hidden = share === null;
  meter.classList.toggle("holes", share !== null && share < 1);
  if (share !== null) style(bar, "width", `${(100 * share).toFixed(2)}%`);
  put(coverage, share !== null ? fmt.pct(share) : gone ? "–" : "so far");
  attr(coverage, "class", share === null ? "muted" : null);
  reason.element.hidden = !trace.reason;
  because.lastChild.hidden = Boolean(trace.reason);
  if (trace.reason) reason.set(trace.reason);
  put(because.lastChild, trace.reason ? "" : isCut(trace) ? "end not reported" : "–");
  put(tokens, gone ? "–" : fmt.int(trace.num_tokens ?? trace.num_rows));
  put(weights, trace.weights ? [...new Set(trace.weights.map(String))].join(" – ") : "–");
  put(engine.firstChild, namesOf(trace.engines ?? []));
  attr(engine, "title", trace.engines?.length > 1 ? trace.engines.map(plain).join(", ") : null);
  const pairs = Object.entries(trace.labels ?? {}).sort().map(([name, value]) =>
    `${plain(name)}=${plain(value)}`).join("  ");
  put(labels.firstChild, pairs);
  attr(labels, "title", pairs || null);
  put(when, gone ? "–" : fmt.ago(trace.updated));
  attr(when, "title", gone ? null : fmt.time(trace.updated));
}

const namesOf = (names) => (names.length > 1
  ? `${plain(names[0])} and ${names.length - 1} more` : names.map(plain).join(""));
