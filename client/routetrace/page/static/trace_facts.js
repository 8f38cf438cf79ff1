// The head of a trace: facts, labels, the course of the request.

import { isCut, reason } from "./reasons.js";
import { fmt, plain } from "./text.js";
import { attr, h, put, rows, swap } from "./ui.js";

/** Facts by name; each is [value, remark, tone] or null where the answer has none. */
const FACTS = [
  ["Coverage", (t) => (t.state === "running" ? [fmt.pct(t.coverage, 2), "so far"]
    : isCut(t) ? [fmt.pct(t.coverage, 2), "of what was reported", "bad"]
    : [fmt.pct(t.coverage, 2), "", t.coverage < 1 ? "bad" : "good"])],
  // The number of tokens of a request that runs is not known before its end.
  ["Tokens", (t) => [fmt.int(Math.max(t.num_tokens, t.num_rows)), `${t.state === "running"
    ? "so far, " : isCut(t) ? "reported, " : ""}${fmt.int(t.prompt_len)} of the prompt`]],
  ["Layers", (t) => [fmt.int(t.layer_ids.length), `top-${t.top_k} of ${t.num_experts}`]],
  ["Weights", (t) => t.weights?.length && [[...new Set(t.weights.map(String))].join(" – "), ""]],
  ["Engine", (t) => t.engines.length === 1 && [namesOf(t.engines), ""]],
  ["Engines", (t) => t.engines.length > 1 && [namesOf(t.engines), ""]],
  ["Attempts", (t) => t.num_attempts > 1 && [fmt.int(t.num_attempts), ""]],
  ["Finish", (t) => t.finish_reason && [plain(t.finish_reason), ""]],
  ["Stored", (t) => t.stored_bytes !== undefined && [fmt.bytes(t.stored_bytes), ""]],
  ["Updated", (t) => [fmt.time(t.updated), ""]],
  ["Forgotten in", (t) => t.expires && [inTime(t.expires), ""]],
];

const CUT = "The end of this request was never reported, so its number of tokens is not known. " +
  reason("agent_lost").remedy;
const CLOSED = `${reason("agent_closed").words} So its number of tokens is not known. ${
  reason("agent_closed").remedy}`;
const HANDED_OVER = "This request was handed over to another engine, which has not reported that " +
  "it went on. Look at the log of that engine, and whether its capture uses the same trace ids.";

const ENDS = { handoff: HANDED_OVER, closed: CLOSED };

const namesOf = (names) => (names.length > 3
  ? `${names.slice(0, 2).map(plain).join(", ")} and ${names.length - 2} more`
  : names.map(plain).join(", "));

function inTime(at) {
  const left = at - Date.now() / 1000;
  return left > 0 ? fmt.duration(left).replace(/ \d+\s*s$/, "") : "a moment";
}

/** The card of facts; `set(trace)` fills it. expertsAt(filters): an address, or nothing. */
export function factsCard(expertsAt) {
  const list = h("dl", { class: "facts" });
  const labels = h("ul", { class: "labels", "aria-label": "Labels" });
  const load = h("a", { class: "small", hidden: !expertsAt });
  const cut = h("p", { class: "bad", hidden: true });
  const course = timeline();
  const element = h("section", { class: "card", "aria-label": "Facts" },
    h("div", { class: "body" }, h("div", { class: "facts-and-labels" }, list, labels, load),
      cut, course.element));
  return {
    element,
    set(trace) {
      const shown = FACTS.map(([name, of]) => [name, of(trace)]).filter(([, fact]) => fact);
      rows(list, shown, ([name]) => name, makeFact, (item, [, [value, remark, tone]]) => {
        const [text, more] = item.lastChild.children;
        put(text, value);
        put(more, remark);
        attr(text, "class", tone || null);
      });
      const pairs = Object.entries(trace.labels ?? {}).sort();
      labels.hidden = pairs.length === 0;
      rows(labels, pairs, ([name]) => name, () => h("li", { class: "chip mono" }, h("bdi")),
        (item, [name, value]) => {
          put(item.firstChild, `${plain(name)}=${plain(value)}`);
          attr(item, "title", item.textContent);
        });
      if (expertsAt) {
        const like = likeIt(trace);
        attr(load, "href", expertsAt(like));
        const same = [like.engine && "engine", like.version && "weights"].filter(Boolean);
        put(load, `Load of experts${same.length > 0 ? `: same ${same.join(" and ")}` : ""}`);
      }
      cut.hidden = !isCut(trace);
      put(cut, ENDS[trace.finish_reason] ?? CUT);
      course.set(trace.timeline);
    },
  };
}

/** Filters of traces by the engine and the weights of one. */
const likeIt = ({ engines, weights }) => ({
  engine: engines.length === 1 ? engines[0] : undefined,
  version: weights ? [...new Set(weights)].join("..") : undefined,
});

const makeFact = ([name]) => h("div", null, h("dt", null, name),
  h("dd", null, h("bdi"), " ", h("span", { class: "remark" })));

function timeline() {
  const element = h("ol", { class: "timeline", "aria-label": "Course of the request" });
  return {
    element,
    set(steps) {
      element.hidden = steps.length < 2;
      rows(element, steps, (step) => step.name, makeStep, (item, step, i) => {
        const [name, at, took] = item.children;
        put(name, plain(step.name));
        put(at, fmt.time(step.at));
        const next = steps[i + 1];
        put(took, next ? fmt.duration(next.at - step.at) : "");
        took.hidden = !next;
      });
    },
  };
}

const makeStep = () => h("li", null, h("b"), h("span", { class: "small muted" }),
  h("span", { class: "took" }));

/** A sentence about an alarm above the rest; `set(null)` hides it. */
export function alarm() {
  const element = h("div", { class: "alarm", role: "alert", hidden: true });
  return {
    element,
    set(...children) {
      element.hidden = children[0] === null;
      swap(element, children);
    },
  };
}
