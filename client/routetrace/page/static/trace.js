// The view of one trace: asks for it again and again, and shows what is there or why nothing is.

import { HAS_SERVER, json, offered, poll, repeated, Trouble } from "./api.js";
import { emptyRun } from "./empty.js";
import { plain } from "./text.js";
import { sidesOf } from "./trace_mismatch.js";
import { traceParts } from "./trace_parts.js";
import { ghost, h, message, swap } from "./ui.js";

const ASKED_AGAIN = 10; // seconds until a trace that is not there is asked for again
const SHARE = 10; // a running trace is read again after this many times as long as a read takes
const QUIET = 400; // ms after which the address follows the cursor

/** Open the view of `query.id`. */
export function trace({ query, run, session, go, link }) {
  const path = `runs/${encodeURIComponent(run)}`;
  const element = h("div", { class: "view" }, ghost(3), ghost(8));
  let parts = null;
  let shown = null; // facts
  let reports = []; // of trainers
  let compared = { content: null, found: null }; // what was asked for last
  let failure = "";
  let end = null;
  let addressTimer;

  const view = {
    element,
    title: plain(query.id),
    get keys() {
      return parts?.keys ?? [];
    },
    stop() {
      end?.();
      clearTimeout(addressTimer);
      compared = null;
      parts?.stop();
    },
    /** Take another incarnation or position of the same trace in place. */
    accepts(next) {
      if (next.id !== query.id) return false;
      const { incarnation, at, against } = query;
      Object.assign(query, { incarnation: next.incarnation, at: next.at, against: next.against });
      if (next.incarnation !== incarnation) follow();
      else if (next.against !== against && parts) compare();
      else if (next.at !== at) goToAddress();
      return true;
    },
  };
  follow();
  return view;

  /** Ask for the facts every 2 s, and for the rectangles when the facts have changed. */
  function follow() {
    end?.();
    const question = repeated(`${path}/trace`, { id: query.id, incarnation: query.incarnation });
    let seen = null;
    let rest = 0;
    let askReports = 0;
    [reports, compared] = [[], { content: null, found: null }];
    end = poll(2, async (signal) => {
      try {
        const facts = (await question(signal)) ?? shown;
        const content = contentOf(facts);
        let segments = null;
        if (content !== seen && performance.now() >= rest) {
          const began = performance.now();
          segments = await json(`${path}/trace/segments`,
            { id: query.id, incarnation: facts.incarnation }, signal);
          seen = content;
          rest = performance.now() + SHARE * (performance.now() - began);
        }
        show(facts, segments);
        if (facts.num_tokens !== null && performance.now() >= askReports) {
          askReports = performance.now() + 1000 * ASKED_AGAIN;
          const asked = { id: query.id, incarnation: facts.incarnation };
          ({ reports } = await json(`${path}/trace/reports`, asked, signal));
        }
        if (!signal.aborted) compare();
      } catch (error) {
        if (error instanceof Trouble) failed(error);
        throw error;
      }
    });
  }

  function show(facts, segments) {
    const first = parts === null;
    shown = facts;
    failure = "";
    parts ??= traceParts({
      id: query.id,
      path,
      pickIncarnation: (number) => go("trace", { id: query.id, incarnation: number, run }),
      pickSide: (side) => go("trace", { ...query, against: side, run }),
      moved: keepAddress,
      expertsAt: HAS_SERVER && ((filters) => link("experts", { ...filters, run })),
    });
    swap(element, parts.elements);
    parts.set(facts, segments);
    parts.warn(null);
    if (first) goToAddress();
  }

  /** Compare with the side that the address names, or the first report, once for each state. */
  async function compare() {
    if (compared === null) return; // the view has ended
    const sides = offered(sidesOf, shown, reports);
    const side = sides.find((one) => one.name === query.against) ??
      sides.find((one) => one.report ?? one.held) ?? null;
    const content = `${contentOf(shown)} ${side?.name} ${side?.report?.reported_at}`;
    if (content === compared.content) {
      parts.compare(sides, side, compared.found);
      return;
    }
    const asked = (compared = { content, found: null });
    parts.compare(sides, side, null);
    if (side === null) return;
    try {
      asked.found = await json(`${path}/trace/diff`,
        { id: query.id, incarnation: shown.incarnation, against: side.name });
    } catch (error) {
      if (!(error instanceof Trouble)) throw error;
      asked.found = error;
      if (error.isAway || error.kind === "overloaded") asked.content = null; // asked for again
    }
    if (asked === compared) parts.compare(sides, side, asked.found);
  }

  /** Say why there is nothing, or nothing newer, to see. */
  function failed(error) {
    if ([403, 404].includes(error.status)) error.retryAfter = ASKED_AGAIN;
    if (parts) {
      // The mark of the frame says that nothing answers at all.
      if (error.kind !== "away") parts.warn(error);
    } else if (failure !== error.message) {
      failure = error.message; // what is being written into the card stays
      swap(element, error.missing === "run"
        ? h("div", { class: "narrow" }, emptyRun(run, session, go))
        : notShown(error, { id: query.id, run, open: (id) => go("trace", { id, run }) }));
    }
  }

  function goToAddress() {
    const at = Number.parseInt(query.at, 10);
    if (Number.isFinite(at)) parts?.goTo(at);
  }

  /** Let the address name the cursor, so that it can be passed on. */
  function keepAddress(position) {
    clearTimeout(addressTimer);
    addressTimer = setTimeout(() => {
      query.at = String(position);
      go("trace", { ...query, run }, true);
    }, QUIET);
  }
}

/** The part of a trace's facts of which the cells are a function. */
const contentOf = ({ expires, incarnations, labels, timeline, ...rest }) => JSON.stringify(rest);

/** A card for a trace that cannot be shown. */
function notShown(error, { id, run, open }) {
  const heading = error.status === 404 ? "There is no such trace"
    : error.status === 403 ? `Your token does not cover run ${plain(run)}`
    : error.kind === "overloaded" ? "The server is busy"
    : error.isAway ? "The server does not answer"
    : "This trace cannot be shown";
  const field = h("input", { type: "text", value: id, "aria-label": "Id of a trace",
    spellcheck: "false", autocomplete: "off", class: "mono grow" });
  const form = h("form", { class: "bar open", onsubmit(event) {
    event.preventDefault();
    if (field.value) open(field.value);
  } }, field, h("button", { type: "submit", class: "main" }, "Open"));
  return h("div", { class: "narrow" }, message(heading,
    h("p", null, h("bdi", { class: "id" }, plain(error.message))), error.status === 404 && form));
}
