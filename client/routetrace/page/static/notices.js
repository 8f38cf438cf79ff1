// What is wrong with a run, in sentences: the worst first, with evidence and what to do.

import { shapeBox, SHAPES } from "./marks.js";
import { harmless, reason, worstFirst } from "./reasons.js";
import { fmt, plain } from "./text.js";
import { attr, h, put, rows } from "./ui.js";

const FULL = 0.85; // share of a capacity from which it is told
export const LATE = 5; // seconds of lag, as of the server
const [FEW, LITTLE] = [10, 0.001]; // lost rows, or share of rows, below which little is lost
const EACH = 3; // engines with the same trouble that are named one by one
const NO_ANSWER = "Check that routetrace-server runs, and its log. What is shown stays until then.";

/** Why an agent dropped rows, and what to do. Rows that an engine took back are no loss. */
const DROPS = {
  queue_full: ["queue full", reason("queue_full").remedy],
  invalid_ids: ["invalid ids", reason("invalid_ids").remedy],
  rejected: ["refused by the server", reason("rejected").remedy],
  corrupt: ["damaged on the disk they were spilled to", "Check the disk of spill_dir."],
  late: ["their request had ended or was preempted",
    "Look at the engine's log: its passes report later than its scheduler."],
  fenced: ["a newer process of the same engine took over", "Give each engine an engine_id of its " +
    "own."],
  agent_lost: ["the agent's background process died", reason("agent_lost").remedy],
  unsent: ["not sent before the engine closed", "Give close() more time, or set spill_dir."],
};
export const REWOUND = "rewound"; // drafts that were not accepted

/** The reason of most dropped rows of an engine, its words and remedy. */
export function worstDrop(dropped) {
  const [name] = Object.entries(dropped).filter(([one]) => one !== REWOUND)
    .sort(([, a], [, b]) => b - a)[0] ?? [""];
  const [words, remedy] = DROPS[name] ?? [plain(name.replaceAll("_", " ")), "Look at its log."];
  return { name, words, remedy };
}

/** Sum of rows that an engine lost. */
export const lostRows = (dropped) => Object.entries(dropped)
  .reduce((sum, [name, n]) => (name === REWOUND ? sum : sum + n), 0);

/** Since when the server has not answered. */
export const staleWords = (at) => `Not live since ${fmt.time(at)}: the server does not answer. ` +
  "It is asked again every 2 s.";

/**
 * What is wrong, as { key, tone, subject, rest, advice, links: [[words, query or null]] }.
 *
 * A link's query is that of the list of traces; null leads to the table of engines.
 */
export function noticesOf(run) {
  const found = [
    ...(run.stale_since === null ? [] : [{
      key: "stale", tone: "bad", subject: "", rest: staleWords(run.stale_since), advice: NO_ANSWER,
      links: [["Traces that are known", {}]],
    }]),
    ...ofEngines(run.engines, "dropping", dropping),
    ...ofEngines(run.engines, "late", late),
    ...ofEngines(run.engines, "gone", gone),
    ...incomplete(run),
    ...full(run.store),
  ];
  const tones = Object.keys(SIGNS);
  found.sort((a, b) => tones.indexOf(a.tone) - tones.indexOf(b.tone));
  if (!run.whole) {
    found.push({
      key: "partial", tone: "info", subject: `${fmt.plural(run.traces.total, "trace")} so far`,
      rest: ": the list of the run is on its way, and figures are of these.", advice: "",
      links: [],
    });
  } else if (found.length === 0) {
    found.push({
      key: "well", tone: "good", subject: "All is well.",
      rest: run.engines.some((one) => one.state !== "closed")
        ? " Every engine is on time, and every trace that has ended is whole."
        : " Every trace that has ended is whole. No engine is connected.",
      advice: "", links: [],
    });
  }
  return found;
}

function ofEngines(engines, state, words) {
  const found = engines.filter((one) => one.state === state);
  if (found.length <= EACH) {
    return found.map((one) => ({
      key: `${state} ${one.engine}`, subject: plain(one.engine), ...words(one),
      links: [["Its traces", { engine: one.engine }],
        ["The incomplete ones", { engine: one.engine, state: "incomplete" }]],
    }));
  }
  const tones = Object.keys(SIGNS);
  const rank = (one) => tones.indexOf(words(one).tone);
  const [worst] = found.sort((a, b) => rank(a) - rank(b) || weight(b) - weight(a));
  return [{
    key: state, subject: `${fmt.int(found.length)} engines ${ALL[state]}`,
    ...words(worst, `: ${plain(worst.engine)}`),
    links: [["See the engines", null],
      [`Traces of ${plain(worst.engine)}`, { engine: worst.engine }]],
  }];
}

const ALL = { dropping: "drop rows", late: "are late", gone: "are gone" };
const weight = (one) => one.dropped_recently || one.lag || one.last_seen || 0;

function dropping(one, before = "") {
  const { words, remedy } = worstDrop(one.dropped);
  const all = lostRows(one.dropped);
  const share = one.dropped_recently / (one.dropped_recently + one.rows_recently);
  const more = all > one.dropped_recently ? `, ${fmt.int(all)} in all` : "";
  const lag = one.lag > LATE ? ` It is ${fmt.duration(one.lag)} late.` : "";
  const lost = lostShards(one);
  return {
    tone: one.dropped_recently < FEW || share < LITTLE ? "warn" : "bad", advice: remedy,
    rest: `${before} has dropped ${fmt.plural(one.dropped_recently, "row")} in the last minute (${
      fmt.pct(share)} of its rows)${more}: ${words}.${lag}${lost && ` Its ${lost} gone.`}`,
  };
}

/** Shards that are gone while others of their engine are there: "shard b is". */
function lostShards({ shards, shards_gone: lost }) {
  if (shards.length === 0 || lost.length === 0) return "";
  return `${lost.length > 1 ? "shards" : "shard"} ${lost.map(plain).join(" ")} ${
    lost.length > 1 ? "are" : "is"}`;
}

function late(one, before = "") {
  return {
    tone: "bad",
    rest: `${before} is ${fmt.duration(one.lag)} late: ${
      fmt.plural(one.in_flight, "row waits", "rows wait")} there, ${
      fmt.bytes(one.queued_bytes + one.spilled_bytes)}.`,
    advice: "Nothing is lost yet. Look at the network between engine and server, and at the " +
      "time of commits below.",
  };
}

function gone(one, before = "") {
  const seen = one.last_seen === null ? "before the server's start"
    : `${fmt.duration(one.last_seen)} ago`;
  const lost = lostShards(one);
  return {
    tone: "warn",
    rest: lost ? `${before}: its ${lost} gone, last heard of ${seen}.`
      : `${before} is gone: last heard of ${seen}.`,
    advice: "If it should run, look at its log. Unless it comes back, its open traces end as " +
      "incomplete.",
  };
}

function incomplete({ traces, cells }) {
  if (traces.incomplete === 0) return [];
  const missing = missingOf(cells);
  const [name, count] = missing.find(([one]) => !harmless(one)) ?? missing[0] ?? [];
  const links = [["All incomplete traces", { state: "incomplete" }]];
  let rest = ": the end was never reported.";
  if (name) {
    const total = missing.reduce((sum, [, n]) => sum + n, 0);
    rest = `; ${fmt.pct(count / total, 0)} of the missing cells: ${
      reason(name).title.toLowerCase()}.`;
    links.unshift([`Those of ${reason(name).title.toLowerCase()}`, { reason: name }]);
  }
  return [{
    key: "incomplete", tone: name && harmless(name) ? "info" : "warn",
    subject: fmt.plural(traces.incomplete, "trace is incomplete", "traces are incomplete"),
    rest, links,
    advice: name ? `${reason(name).words} ${reason(name).remedy}` : reason("agent_lost").remedy,
  }];
}

/** [reason, cells] of a run, most first. */
export const missingOf = (cells) => Object.entries(cells.missing)
  .sort(([a, x], [b, y]) => y - x || worstFirst(a, b));

function full(store) {
  const shares = [
    ["store", "The store", store.used, store.capacity, "store_capacity"],
    ["quota", "The quota of this run", store.run, store.run_quota, "its run_quota"],
  ];
  return shares.filter(([, , used, most]) => most > 0 && used / most > FULL)
    .map(([key, name, used, most, setting]) => ({
      key, tone: "warn", subject: `${name} is ${fmt.pct(used / most, 0)} full`,
      rest: `: ${fmt.bytes(used)} of ${fmt.bytes(most)}. Above 90 % the server forgets ended ` +
        "traces, the oldest first, or refuses rows when it is full, as its when_full says.",
      advice: `Read traces sooner, delete what was read, or raise ${setting}.`,
      links: [["The oldest traces", { sort: "updated", order: "asc" }]],
    }));
}

const SIGNS = {
  bad: ["problem", "dropping"], warn: ["warning", "late"], info: ["note", "running"],
  good: ["good", "live"],
};

/** The list of notices; `set(notices, href)` fills it, toEngines() leads to their table. */
export function noticeList(toEngines) {
  const element = h("ul", { class: "card notices", "aria-label": "What is wrong now" });
  return {
    element,
    set(notices, href) {
      rows(element, notices, (one) => one.key, make, (item, one) => {
        const { mark, name, subject, rest, advice, links } = item.parts;
        attr(item, "data-tone", one.tone);
        const [word, shape] = SIGNS[one.tone];
        if (name.textContent !== word) mark.replaceChildren(SHAPES[shape]());
        put(name, word);
        put(subject, one.subject);
        put(rest, one.rest);
        put(advice, one.advice);
        advice.hidden = !one.advice;
        rows(links, one.links, ([words]) => words, ([words, query]) => (query
          ? h("a", null, words)
          : h("button", { type: "button", class: "link", onclick: toEngines }, words)),
        (link, [, query]) => query && attr(link, "href", href(query)));
      });
    },
  };
}

function make() {
  const mark = shapeBox();
  const name = h("span", { class: "unseen" });
  const subject = h("strong");
  const rest = h("span");
  const advice = h("span", { class: "advice" });
  const links = h("span", { class: "links" });
  const item = h("li", null, h("span", { class: "sign" }, mark, name),
    h("p", null, h("bdi", null, subject), rest, " ", advice), links);
  item.parts = { mark, name, subject, rest, advice, links };
  return item;
}
