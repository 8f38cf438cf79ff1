// What stands where there are no traces: how to point an engine here, or which runs have some.

import { fmt, plain } from "./text.js";
import { copyButton, h, message } from "./ui.js";

/** A card for a server or a run without traces. */
export function nothingYet(run, session, go) {
  return h("div", { class: "narrow" },
    session.runs.length === 0 ? emptyServer(session) : emptyRun(run, session, go));
}

function emptyServer(session) {
  const target = JSON.stringify(session.target);
  const engine = `vllm serve MODEL --kv-transfer-config '{
  "kv_connector": "RouteTraceConnector", "kv_role": "kv_producer",
  "kv_connector_module_path": "routetrace.capture_agent.vllm",
  "kv_connector_extra_config": {"target": ${target}}}'`;
  return message("No traces yet", "Point an engine at this server:", snippet(engine, "Copy"),
    h("p", { class: "muted" }, "SGLang: ROUTETRACE_TARGET=", plain(session.target),
      " in its environment. The README has Transformers, and engines of your own."));
}

/** A card for a run that has no traces, with the runs that have. */
export function emptyRun(run, session, go) {
  const others = session.runs.filter((one) => one !== run);
  return message(h("span", null, "Run ", h("bdi", null, plain(run)), " has no traces"),
    others.length > 0 &&
      `${fmt.plural(others.length, "run has", "runs have")} traces or engines:`,
    h("ul", { class: "bar" }, others.map((one) => h("li", null, h("button", {
      type: "button", class: "chip", onclick: () => go("overview", { run: one }),
    }, h("bdi", null, plain(one)))))));
}

/** Why a run cannot be shown, as a heading. */
export const troubleOf = (error, run) =>
  (error.status === 403 ? `Your token does not cover run ${plain(run)}`
    : error.kind === "overloaded" ? "The server is busy"
    : error.isAway ? "The server does not answer" : "The run cannot be shown");

const snippet = (text, label) => h("div", { class: "snippet" },
  h("pre", { tabindex: 0 }, h("code", null, text)), copyButton(label, label, () => text));
