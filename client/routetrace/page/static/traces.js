// The list of the traces of a run: filters, a frozen order, pages of it as far as it is seen.

import { json, poll, Trouble } from "./api.js";
import { onTheme } from "./colours.js";
import { nothingYet, troubleOf } from "./empty.js";
import { staleWords } from "./notices.js";
import { fmt, plain } from "./text.js";
import { alarm } from "./trace_facts.js";
import { filterBar, FILTERS, isFiltered, NO_FILTERS } from "./trace_filters.js";
import { traceList } from "./trace_list.js";
import { ghost, h, put, say, swap } from "./ui.js";

const PAGE = 100; // traces of a call
const MOST_PAGES = 60; // kept

/** Where the list was left, so that one comes back to the same place: { key, view, ... }. */
let left = null;

/** Open the list of the traces of a run. */
export function traces({ query, run, session, go, link }) {
  const path = `runs/${encodeURIComponent(run)}`;
  let asked = chosenOf(query);
  let pages = new Map();
  let loading = new Set();
  let answer = null; // the last one
  let fresh = new AbortController(); // of the order that is shown
  let ready = Promise.resolve();
  let engines = [];
  let empty = false;
  let changing = false; // what is shown stays until the other order is there
  let refused = false; // a filter: there is nothing to ask for until it is another one
  let failure = "";
  let none = null; // filters for which the card says that nothing matches

  const count = h("span", { class: "muted" });
  const newer = h("button", {
    type: "button", class: "chip", hidden: true, onclick: () => begin(),
  });
  const stale = alarm();
  const bar = filterBar(change, openFirst);
  const list = traceList({
    at: (i) => pages.get(Math.floor(i / PAGE))?.[i % PAGE],
    href: (trace) => link("trace", { id: trace.trace_id, run }),
    seen: loadSeen,
    sort: (sort, order) => change({ sort, order }),
  });
  const card = h("section", { class: "card", "aria-label": "List" }, ghost(8));
  const whole = [h("div", { class: "title" }, h("h1", null, "Traces"), count, newer),
    stale.element, bar.element, card];
  const element = h("div", { class: "view centred traces" }, whole);
  const unwatch = onTheme(() => list.draw());
  bar.set(asked, engines);
  begin(left?.key === keyOf(run, asked) ? left : null);
  const end = poll(2, follow);

  return {
    element, title: "Traces", keys: [
      { keys: ["j"], words: "Next trace", run: () => list.move(1) },
      { keys: ["k"], words: "Trace before", run: () => list.move(-1) },
      { keys: ["Enter"], words: "Open the chosen trace" },
    ],
    find() {
      bar.find.focus();
      bar.find.select();
    },
    accepts(next) {
      const other = chosenOf(next);
      if (keyOf(run, other) !== keyOf(run, asked)) {
        asked = other;
        begin();
      }
      return true;
    },
    stop() {
      if (answer) left = { key: keyOf(run, asked), view: answer.view, ...list.place };
      end();
      unwatch();
      fresh.abort();
      list.stop();
      bar.stop();
    },
    get waits() {
      return empty ? "runs" : null;
    },
  };

  /** Take other filters or another order, and let the address follow. */
  function change(changes, quiet = false) {
    const before = keyOf(run, asked);
    const next = chosenOf({ ...asked, ...changes });
    if (keyOf(run, next) === before) return;
    asked = next;
    go("traces", { ...asked, run }, quiet);
    begin();
  }

  /** Ask for the order of now, or for the one that was `kept`. */
  function begin(kept = null) {
    fresh.abort();
    fresh = new AbortController();
    changing = true;
    refused = false;
    bar.set(asked, engines);
    ready = first(kept, fresh.signal);
    return ready;
  }

  /** Wait for the newest request; an aborted one has no result. */
  async function settled() {
    for (let awaited = null; awaited !== ready;) await (awaited = ready);
  }

  async function first(kept, signal) {
    try {
      const [found, place] = await askFirst(kept, signal);
      if (signal.aborted) return;
      failure = "";
      pages = new Map();
      loading = new Set();
      changing = false;
      bar.refuse(null);
      engines = found.engines;
      bar.set(asked, engines);
      take(found);
      if (found.matching > 0) {
        swap(card, list.element);
        list.begin(found.matching, asked, place);
      }
      say(fmt.plural(found.matching, "trace"));
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof Trouble)) throw error;
      answer = null; // the poll begins anew
      refused = error.status === 400;
      if (refused) {
        bar.refuse(error);
        pages = new Map();
        put(count, "");
        newer.hidden = true;
      }
      failed(error);
    }
  }

  /** The first page of a list, and where to go on in it. */
  async function askFirst(kept, signal) {
    if (kept) {
      try {
        const offset = pageOf(kept.chosen) * PAGE;
        return [await ask({ view: kept.view, offset, engines: 1 }, signal), kept];
      } catch (error) {
        if (error.status !== 409) throw error;
      }
    }
    return [await ask({ ...asked, engines: 1 }, signal), undefined];
  }

  function ask(what, signal) {
    return json(`${path}/traces`, { ...what, limit: PAGE }, signal);
  }

  /** Keep an answer, and say what it says of the whole list. */
  function take(found) {
    answer = found;
    if (found.traces.length > 0 && found.offset % PAGE === 0) {
      keep(found.offset / PAGE, found.traces);
    }
    put(count, isFiltered(asked)
      ? `${fmt.int(found.matching)} of ${fmt.plural(found.total, "trace")}`
      : fmt.plural(found.total, "trace"));
    newer.hidden = found.newer === 0;
    put(newer, `${fmt.int(found.newer)} newer: show`);
    stale.set(found.stale_since && staleWords(found.stale_since));
    const before = empty;
    empty = found.total === 0 && found.whole;
    if (!empty) swap(element, whole);
    else if (!before) swap(element, nothingYet(run, session, go));
    if (found.matching > 0) none = null;
    else if (!found.whole) swap(card, ghost(8));
    else if (none !== keyOf(found.total, asked)) {
      none = keyOf(found.total, asked);
      swap(card, nothing(found));
    }
  }

  function keep(page, rows) {
    pages.delete(page);
    pages.set(page, rows);
    for (const oldest of pages.keys()) {
      if (pages.size <= MOST_PAGES) break;
      pages.delete(oldest);
    }
  }

  function loadSeen(from, to) {
    if (!answer || changing) return;
    for (let page = pageOf(from); page <= pageOf(to - 1); page += 1) {
      if (!pages.has(page) && !loading.has(page)) load(page, fresh.signal);
    }
  }

  async function load(page, signal) {
    loading.add(page);
    try {
      const found = await ask({ view: answer.view, offset: page * PAGE }, signal);
      if (signal.aborted) return;
      take(found);
      list.draw();
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof Trouble)) throw error;
      if (error.status === 409) begin();
      else failed(error);
    } finally {
      if (!signal.aborted) loading.delete(page);
    }
  }

  /** Every 2 s: what is seen as it is now, and how much is newer. */
  async function follow(over) {
    await settled();
    if (refused) return;
    const signal = AbortSignal.any([over, fresh.signal]);
    try {
      if (!answer || answer.matching === 0 || (!answer.whole && list.place.top === 0)) {
        await begin();
        return;
      }
      const [from, to] = list.range();
      for (let page = pageOf(from); page <= pageOf(to - 1); page += 1) {
        take(await ask({ view: answer.view, offset: page * PAGE }, signal));
      }
      list.draw();
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Trouble && error.status === 409) begin();
      else throw error;
    }
  }

  /** Enter in the field: the trace with this id, or the only one, or the first of the list. */
  async function openFirst() {
    await settled();
    const rows = pages.get(0) ?? [];
    const one = rows.find((trace) => trace.trace_id === asked.q) ??
      (asked.q && answer?.matching === 1 ? rows[0] : null);
    if (one) go("trace", { id: one.trace_id, run });
    else if (asked.q && answer?.matching === 0) go("trace", { id: asked.q, run });
    else list.move(1);
  }

  function nothing(found) {
    return words("No trace matches",
      `Run ${plain(run)} has ${fmt.plural(found.total, "trace")}, and none with all of these.`,
      h("div", { class: "bar" }, clearButton(), asked.q &&
        h("a", { class: "chip", href: link("trace", { id: asked.q, run }) },
          "Why is there no trace with this id?")));
  }

  function clearButton() {
    return h("button", { type: "button", onclick: () => change(NO_FILTERS) }, "Clear the filters");
  }

  function failed(error) {
    if (pages.size > 0 || failure === error.message) return; // what is there stays
    failure = error.message;
    swap(card, refused
      ? words("This filter is not understood", "Mend it above, or do without.", clearButton())
      : words(troubleOf(error, run), plain(error.message)));
  }
}

const words = (heading, text, ...more) => h("div", { class: "message" }, h("h2", null, heading),
  h("p", null, text), more);
const pageOf = (i) => Math.max(0, Math.floor(i / PAGE));

const NAMES = [...FILTERS, "sort", "order"];

/** Filters and order of an address; what is not given is left out. */
function chosenOf(query) {
  const given = NAMES.map((name) => [name, query[name]])
    .filter(([, value]) => value?.length > 0);
  return Object.fromEntries(given);
}

const keyOf = (run, asked) => JSON.stringify([run, ...NAMES.map((name) => asked[name] ?? null)]);
