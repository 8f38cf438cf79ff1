// The view without a trace: open one by its id, or what to do while there is none.

import { fmt, plain, shell } from "./text.js";
import { copyButton, h, message } from "./ui.js";

export function start({ run, session, go }) {
  const known = session.runs.includes(run);
  const field = h("input", {
    type: "search", id: "find", class: "mono grow", spellcheck: "false", autocomplete: "off",
    autocapitalize: "off", placeholder: "Id of a trace", "aria-label": "Id of a trace",
  });
  const form = h("form", { class: "bar open", role: "search", onsubmit(event) {
    event.preventDefault();
    if (field.value) go("trace", { id: field.value, run });
  } }, field, h("button", { type: "submit", class: "main" }, "Open"));
  const element = h("div", { class: "view narrow" },
    session.runs.length === 0 ? emptyServer(session)
      : known ? opener(form, run, session) : emptyRun(run, session, go));
  const focus = () => field.isConnected && field.focus();
  return {
    element, title: "Open a trace", keys: [], stop() {}, focus, find: focus,
    waits: known ? "session" : "runs",
  };
}

function opener(form, run, session) {
  const command = `routetrace list --target ${shell(session.target)} --run ${shell(run)}`;
  return message("Open a trace", "Its id is the request's: trainers name it in their errors, " +
    "engines return it with each answer. Ids are exact.", form,
  h("h2", null, "Which traces are there?"), snippet(command, "Copy the command"));
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
  return message(h("span", null, "Run ", h("bdi", null, plain(run)), " has no traces"),
    `${fmt.plural(session.runs.length, "run has", "runs have")} traces:`,
    h("ul", { class: "bar" }, session.runs.map((one) => h("li", null, h("button", {
      type: "button", class: "chip", onclick: () => go("trace", { run: one }),
    }, h("bdi", null, plain(one)))))));
}

const snippet = (text, label) => h("div", { class: "snippet" },
  h("pre", { tabindex: 0 }, h("code", null, text)), copyButton(label, label, () => text));
