// How the newest traces spread over experts: load by layer and expert, and over time.

import { json, poll, repeated, Trouble } from "./api.js";
import { onTheme } from "./colours.js";
import { emptyRun, troubleOf } from "./empty.js";
import { loadMap } from "./experts_map.js";
import { counted, expertFigures, hotCard } from "./experts_parts.js";
import { rampBar } from "./marks.js";
import { fmt, plain } from "./text.js";
import { alarm } from "./trace_facts.js";
import { filterBar, FILTERS, isFiltered, NO_FILTERS } from "./trace_filters.js";
import { ghost, h, message, put, segmented, swap } from "./ui.js";

const EVERY = 1; // seconds between two questions: a count takes some
const ORDERS = [["id", "By id"], ["load", "Hottest first"]];
const SHOWN = ["engine", "version", "label"]; // filters that help here

/** Open the view; the address has the filters, and the order of experts as `by`. */
export function experts({ query, run, session, go, link }) {
  let asked = chosenOf(query);
  let by = query.by === "load" ? "load" : "id";
  let after; // Unix time, of the page's process: an earlier count is too old
  let data = null;
  let failure = "";
  let refused = false; // a filter: there is nothing to ask for until it is another one
  let ask = asking();
  const state = h("span", { class: "muted", role: "status" });
  const again = h("button", { type: "button", class: "chip", hidden: true, onclick: recount },
    "Count again");
  const trouble = alarm();
  const bar = filterBar(change, () => {}, SHOWN);
  const place = h("div", { class: "view" }, ghost(3), ghost(8));
  const element = h("div", { class: "view centred experts" },
    h("div", { class: "title" }, h("h1", null, "Experts"), state, again), trouble.element,
    bar.element, place);
  let parts = null;
  let engines = [];
  bar.set(asked, engines);
  const stop = poll(EVERY, turn);
  nameEngines();
  return {
    element, title: "Experts",
    get waits() {
      return data?.traces === 0 ? "runs" : "session";
    },
    keys: [{ keys: ["s"], words: "Experts by id, or hottest first",
      run: () => order(by === "id" ? "load" : "id") }],
    accepts(next) {
      by = next.by === "load" ? "load" : "id";
      const other = chosenOf(next);
      if (JSON.stringify(other) !== JSON.stringify(asked)) begin(other);
      else parts?.set(data, by);
      return true;
    },
    stop() {
      stop();
      bar.stop();
      parts?.stop();
    },
  };

  async function nameEngines() {
    try {
      const path = `runs/${encodeURIComponent(run)}/traces`;
      ({ engines } = await json(path, { limit: 1, engines: 1 }));
      bar.set(asked, engines);
    } catch (error) {
      if (!(error instanceof Trouble)) throw error; // the filter has fewer choices
    }
  }

  function asking() {
    return repeated(`runs/${encodeURIComponent(run)}/experts`, { ...asked, after });
  }

  function change(changes) {
    begin(chosenOf({ ...asked, ...changes }));
    go("experts", { ...asked, by: by === "id" ? undefined : by, run }, true);
  }

  function begin(next) {
    asked = next;
    after = undefined;
    data = null;
    refused = false;
    bar.set(asked, engines);
    ask = asking();
    turn().catch(() => {}); // the next one says it
  }

  function recount() {
    after = data.counted_at + 0.001;
    ask = asking();
    turn().catch(() => {});
  }

  function order(next) {
    by = next;
    go("experts", { ...asked, by: by === "id" ? undefined : by, run }, true);
    parts?.set(data, by);
  }

  async function turn(signal) {
    if (refused) return;
    const mine = ask;
    try {
      const next = await mine(signal);
      if (mine !== ask) return; // other traces are asked for by now
      failure = "";
      bar.refuse(null);
      trouble.set(null);
      if (next === null) say();
      else if (next.counting) wait(next.counting);
      else show(next);
    } catch (error) {
      if (error instanceof Trouble && mine === ask) failed(error);
      throw error;
    }
  }

  function wait({ tokens, of }) {
    if (of === 0) return; // done before it is seen
    again.hidden = true;
    put(state, `Counting ${fmt.plural(of, "token")}: ${fmt.int(tokens)}`);
    if (data === null && !parts) swap(place, ghost(3), ghost(8));
  }

  function say() {
    if (data === null) return;
    again.hidden = data.traces === 0;
    put(state, data.traces > 0 ? counted(data) : "");
  }

  function show(next) {
    data = next;
    say();
    if (data.traces === 0) {
      parts?.stop();
      parts = null;
      swap(place, nothing());
      return;
    }
    parts ??= viewParts(order);
    swap(place, parts.elements);
    parts.set(data, by);
  }

  function nothing() {
    if (isFiltered(asked)) {
      return message("No trace matches", "None that has ended is of these filters.",
        h("button", { type: "button", onclick: () => change(NO_FILTERS) }, "Clear the filters"));
    }
    if (!session.runs.includes(run)) return emptyRun(run, session, go);
    return message("No trace has ended yet", "Experts are counted in traces that have ended.",
      h("a", { href: link("traces", { run }) }, "Traces of this run"));
  }

  function failed(error) {
    if (error.kind === "invalid_argument") {
      refused = true;
      bar.refuse(error);
    } else if (parts) trouble.set(`Not up to date: ${plain(error.message)}`);
    else if (failure !== error.message) {
      swap(place, h("div", { class: "narrow" },
        message(troubleOf(error, run), plain(error.message))));
    }
    failure = error.message;
  }
}

const chosenOf = (query) => Object.fromEntries(FILTERS.filter((name) => query[name]?.length > 0)
  .map((name) => [name, query[name]]));

function viewParts(pick) {
  const figures = expertFigures();
  const order = segmented("Order of experts", pick);
  const map = loadMap();
  const ramp = rampBar("diverging");
  const unwatch = onTheme(ramp.set);
  ramp.set();
  const hot = hotCard();
  return {
    elements: [figures.element,
      h("section", { class: "card", "aria-label": "Load" },
        h("header", null, h("h2", null, "Load by layer and expert"), order.element,
          h("span", { class: "bar small muted push" }, "⅛ ×", ramp.element, "8 ×",
            h("span", null, "1 × is even"))),
        h("div", { class: "body sideways", tabindex: 0, role: "group", "aria-label":
          "Load by layer and expert" }, map.element)),
      hot.element],
    set(data, by) {
      if (data === null) return;
      order.set(ORDERS, by);
      figures.set(data);
      map.set(data, by);
      hot.set(data);
    },
    stop() {
      unwatch();
      map.stop();
    },
  };
}
