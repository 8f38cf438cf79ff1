// Why cells are missing, in words, and what to do about it; the worst first.

const REASONS = {
  corrupt: [
    "Corrupt",
    "The stored bytes of these cells are lost, or do not match their checksum.",
    "Run routetrace verify --all, and check the server's disk.",
  ],
  queue_full: [
    "Queue full",
    "The agent's queue was full, so it dropped the rest of the request.",
    "The server was slow or away: look at the engine's lag, raise queue_bytes, or set spill_dir.",
  ],
  agent_lost: [
    "Agent lost",
    "The agent went away during the request, and what it had not sent went with it.",
    "Look at the engine's log at that time: a crash, a restart, or a cut network.",
  ],
  agent_closed: [
    "Agent closed",
    "The agent was closed during the request, and finish() was never called for it.",
    "Call finish() for each request before close(); let vLLM and SGLang end or abort theirs " +
      "before they are shut down.",
  ],
  rejected: [
    "Rejected",
    "The server refused the chunk that held these cells.",
    "The logs of agent and server name the field at fault.",
  ],
  invalid_ids: [
    "Invalid ids",
    "The ids were out of range, repeated, or never written, so the agent dropped them.",
    "The capture does not fit this model: check its layout, and report it with the model's name.",
  ],
  not_captured: [
    "Not captured",
    "No agent reported rows for these cells: the forward pass was skipped, or never reported.",
    "Check that capture is attached to every worker and pipeline stage, and that each pass has " +
      "a weight version.",
  ],
  kv_unknown: [
    "KV unknown",
    "Their KV was loaded from elsewhere, or came from a slot whose writer is unknown.",
    "Give both requests of a hand-over one transfer_id; routetrace explain says more.",
  ],
  ambiguous: [
    "Ambiguous",
    "Several passes qualify equally, and nothing proves which of them made their KV.",
    "Give each sample a trace id of its own; routetrace explain says more.",
  ],
  aborted: [
    "Aborted",
    "The request was aborted before it computed them.",
    "Nothing to mend.",
  ],
  other_version: [
    "Other version",
    "Rows exist, but of other weights than those asked for.",
    "Nothing to mend: read without weight_version.",
  ],
  not_yet: [
    "Not yet",
    "The request is running and has not computed them.",
    "Wait; this page follows.",
  ],
};
const HARMLESS = new Set(["aborted", "other_version", "not_yet"]);
const ORDER = Object.keys(REASONS);

/** Names of all reasons, the worst first. */
export const REASON_NAMES = ORDER;

/** Name, words and remedy of a reason; a reason of a newer server stands for itself. */
export function reason(name) {
  const [title, words, remedy] = REASONS[name] ?? [
    name, "The server gives a reason that this page does not know.", "Update routetrace.",
  ];
  return { name, title, words, remedy, harmless: HARMLESS.has(name) };
}

/** Whether nothing went wrong. */
export const harmless = (name) => HARMLESS.has(name);

/** Whether a trace is incomplete because its end was never reported. */
export const isCut = (trace) => trace.state === "incomplete" && trace.num_tokens === null;

/** Sort reasons, the worst first. */
export const worstFirst = (a, b) => rank(a) - rank(b);
const rank = (name) => (ORDER.indexOf(name) + ORDER.length + 1) % (ORDER.length + 1);
