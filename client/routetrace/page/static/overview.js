// The start: what is wrong with a run now, and the run at a glance.

import { json, poll, Trouble } from "./api.js";
import { reasonColour, onTheme } from "./colours.js";
import { nothingYet, troubleOf } from "./empty.js";
import { enginesCard } from "./engines.js";
import { figure, reasonMark } from "./marks.js";
import { missingOf, noticeList, noticesOf } from "./notices.js";
import { harmless, reason } from "./reasons.js";
import { throughput } from "./series.js";
import { fmt, plain } from "./text.js";
import { alarm } from "./trace_facts.js";
import { attr, ghost, h, message, put, rows, style, swap } from "./ui.js";

const ASKED_AGAIN = 10; // seconds until a run is asked for again that the token does not cover

/** Open the overview of a run. */
export function overview({ run, session, go, link }) {
  const path = `runs/${encodeURIComponent(run)}`;
  const href = (query) => link("traces", { ...query, run });
  const element = h("div", { class: "view centred" }, ghost(3), ghost(8));
  let parts = null;
  let empty = false;
  let failure = "";
  const stop = poll(2, async (signal) => {
    try {
      show(await json(`${path}/overview`, {}, signal));
    } catch (error) {
      if (error instanceof Trouble) failed(error);
      throw error;
    }
  });
  return {
    element, title: "Overview", keys: [],
    stop() {
      stop();
      parts?.stop();
    },
    get waits() {
      return empty ? "runs" : "session";
    },
  };

  function show(state) {
    failure = "";
    const none = state.traces.total === 0 && state.engines.length === 0;
    if (none && state.whole) {
      if (!empty) swap(element, nothingYet(run, session, go));
      empty = true;
      return;
    }
    empty = false;
    parts ??= overviewParts(run, href);
    swap(element, parts.elements);
    parts.set(state);
  }

  /** Say why nothing is shown; what is there already stays, and the frame says that it is old. */
  function failed(error) {
    if (error.status === 403) error.retryAfter = ASKED_AGAIN;
    if (parts) {
      if (error.kind !== "away") parts.warn(error);
      return;
    }
    if (failure === error.message) return;
    failure = error.message;
    swap(element, h("div", { class: "narrow" },
      message(troubleOf(error, run), plain(error.message))));
  }
}

function overviewParts(run, href) {
  const count = h("span", { class: "muted" });
  const title = h("div", { class: "title" }, h("h1", null, "Overview"), count);
  const trouble = alarm();
  const engines = enginesCard();
  const notices = noticeList(engines.focus);
  const figures = figuresCard(href);
  const chart = throughput();
  const missing = missingCard(href);
  const elements = [title, trouble.element, notices.element, figures.element,
    h("div", { class: "pair" },
      h("section", { class: "card chart", "aria-label": "Throughput" },
        h("header", null, h("h2", null, "Throughput, 10 minutes"), key()),
        h("div", { class: "body" }, chart.element)),
      missing.element),
    engines.element];
  return {
    elements,
    stop() {
      chart.stop();
      missing.stop();
    },
    warn(error) {
      trouble.set(`Not up to date: ${plain(error.message)}`);
    },
    set(state) {
      trouble.set(null);
      put(count, `${fmt.plural(state.traces.total, "trace")} of ${plain(run)}`);
      notices.set(noticesOf(state), href);
      figures.set(state);
      const { at, step_seconds: step, rows: stored, dropped } = state.throughput;
      const each = (values) => values.map((n) => n / step);
      chart.set({ at, stored: each(stored), dropped: each(dropped) });
      missing.set(state.cells, state.whole);
      engines.set(state.engines, href);
    },
  };
}

const key = () => h("span", { class: "series-key small muted" },
  h("span", null, h("i", { class: "stored", "aria-hidden": "true" }), "rows stored /s"),
  h("span", null, h("i", { class: "dropped", "aria-hidden": "true" }), "rows dropped /s"));

/** The row of figures. */
function figuresCard(href) {
  const element = h("dl", { class: "card figures", "aria-label": "Figures" });
  const coverage = figure("Coverage");
  const traces = figure("Traces");
  const states = stateBar(href);
  traces.element.append(states.element);
  const rate = figure("Rows stored");
  const commit = figure("Committed in");
  const store = figure("Store");
  const meter = h("span", { class: "meter", "aria-hidden": "true" }, h("i"));
  store.element.insertBefore(h("dd", null, meter), store.element.lastChild);
  element.append(...[coverage, traces, rate, commit, store].map((one) => one.element));
  return {
    element,
    set(state) {
      const { cells, latency } = state;
      const lost = missingOf(cells).reduce((sum, [, n]) => sum + n, 0);
      // Those that are still on their way may have holes.
      const known = cells.total > 0 && (state.whole || lost > 0);
      coverage.set(known ? fmt.pct(state.coverage, 2) : "–", known
        ? lost === 0 ? `all of ${fmt.si(cells.total)} cells`
          : `${fmt.si(lost)} of ${fmt.si(cells.total)} cells missing`
        : state.whole ? "no trace has ended" : "not known yet",
      lost > 0 ? "bad" : "");
      traces.set(fmt.int(state.traces.total), "");
      states.set(state.traces);
      const dropped = state.engines.reduce((sum, one) => sum + one.dropped_recently, 0);
      rate.set(`${fmt.si(state.rows_per_second)}/s`, dropped > 0
        ? `${fmt.si(dropped)} dropped in the last minute` : "none dropped in the last minute");
      commit.set(latency.commit_p50 === null ? "–" : fmt.duration(latency.commit_p50),
        latency.commit_p99 === null ? "no chunk in 10 minutes"
          : `p50; p99 ${fmt.duration(latency.commit_p99)}`);
      const { used, capacity, run, run_quota: quota, ack_mode: mode } = state.store;
      const share = capacity > 0 ? used / capacity : 0;
      const filled = share > 0 && share < 0.01 ? "< 1\u00a0%" : fmt.pct(share, 0);
      store.set(capacity > 0 ? filled : fmt.bytes(used), [
        capacity > 0 ? `${fmt.bytes(used)} of ${fmt.bytes(capacity)}` : "",
        quota > 0 ? `this run ${fmt.bytes(run)} of ${fmt.bytes(quota)}` : "",
        mode === "memory" || state.store.kind === "memory" ? "in memory" : "",
      ].filter(Boolean).join("; "), share > 0.85 ? "warn" : "");
      style(meter.firstChild, "width", `${(100 * share).toFixed(1)}%`);
      attr(meter, "class", share > 0.85 ? "meter full" : "meter");
    },
  };
}

const STATES = ["complete", "running", "incomplete"];

/** Traces by state: a bar, and the same in words that lead to them. */
function stateBar(href) {
  const bar = h("div", { class: "stack", "aria-hidden": "true" },
    STATES.map((state) => h("i", { "data-state": state })));
  const links = h("span", { class: "small links" }, STATES.map((state) => h("a", null)));
  const element = h("dd", null, bar, links);
  return {
    element,
    set(traces) {
      STATES.forEach((state, i) => {
        const [part, link] = [bar.children[i], links.children[i]];
        part.hidden = traces[state] === 0;
        style(part, "flex-grow", `${traces[state]}`);
        attr(link, "href", href({ state }));
        put(link, `${fmt.int(traces[state])} ${state}`);
      });
    },
  };
}

/** Missing cells by reason: bars, and what each means. */
function missingCard(href) {
  const total = h("span", { class: "muted small" });
  const none = h("p", { class: "muted" });
  const list = h("ul", { class: "reasons" });
  const element = h("section", { class: "card", "aria-label": "Missing cells" },
    h("header", null, h("h2", null, "Missing cells by reason"), total),
    h("div", { class: "body" }, none, list));
  let last = null;
  function set(cells, whole) {
    last = [cells, whole];
    const missing = missingOf(cells);
    const sum = missing.reduce((all, [, n]) => all + n, 0);
    put(total, sum > 0 ? fmt.int(sum) : "");
    none.hidden = sum > 0;
    put(none, whole ? "No cell of a trace that has ended is missing." : "None so far.");
    list.hidden = sum === 0;
    rows(list, missing, ([name]) => name, ([name]) => makeReason(name), (item, [name, n]) => {
      const { mark, link, bar, count } = item.parts;
      mark.set(name);
      attr(link, "href", href({ reason: name }));
      style(bar, "width", `${(100 * n) / missing[0][1]}%`);
      style(bar, "--swatch", reasonColour(name));
      put(count, `${fmt.int(n)}, ${fmt.pct(n / sum, 0)}`);
    });
  }
  const unwatch = onTheme(() => last && set(...last));
  return { element, set, stop: unwatch };
}

function makeReason(name) {
  const mark = reasonMark();
  const link = h("a", null, mark.element);
  const bar = h("i", { class: harmless(name) ? "hatched" : null });
  const count = h("span", { class: "right" });
  const { words, remedy } = reason(name);
  const item = h("li", null, link, h("span", { class: "track", "aria-hidden": "true" }, bar), count,
    h("p", { class: "small muted" }, `${words} ${remedy}`));
  item.parts = { mark, link, bar, count };
  return item;
}
