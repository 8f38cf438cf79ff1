// Calls of the page's server, and whether it answers.

/** Whether a server answers; a file that holds one trace has none. */
export const HAS_SERVER = true;
/** Return the sides offered for comparison; with a server, all of them. */
export const offered = (sidesOf, facts, reports) => sidesOf(facts, reports);
const BASE = "/api/v1/";
const AWAY = new Set(["away", "unavailable", "deadline_exceeded"]);

/**
 * A call that failed. `kind`: "away", "signed_out", or the server's own word; `missing`: which kind
 * of thing is not there, a "trace" or a "run"; `field`: what is wrong; `retryAfter`: seconds.
 */
export class Trouble extends Error {
  constructor(kind, message, { status = 0, retryAfter = 0, missing = "", field = "" } = {}) {
    super(message);
    Object.assign(this, { kind, status, retryAfter, missing, field });
  }

  /** Whether the page, or the server behind it, does not answer. */
  get isAway() {
    return AWAY.has(this.kind);
  }
}

/** Whether the server answers: `since` is when it last did, in ms, while it does not. */
export const connection = new (class extends EventTarget {
  away = false;
  since = null;
  #last = Date.now();

  report(answered) {
    if (answered) this.#last = Date.now();
    if (this.away === !answered) return;
    this.away = !answered;
    this.since = answered ? null : this.#last;
    this.dispatchEvent(new Event("change"));
  }
})();

/** Dispatched on `session` when an answer says that nobody is signed in. */
export const session = new EventTarget();

const address = (path, asked) => {
  const given = Object.entries(asked).flatMap(([name, value]) =>
    [value].flat().map((one) => [name, one])).filter(([, value]) => value !== undefined &&
    value !== null);
  const query = given.map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&");
  return `${BASE}${path}${query && `?${query}`}`;
};

async function answerTo(path, asked, options) {
  let answer;
  try {
    answer = await fetch(address(path, asked), {
      credentials: "same-origin", cache: "no-store", ...options,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw away();
  }
  if (answer.ok || answer.status === 304) {
    connection.report(true);
    return answer;
  }
  throw await trouble(answer);
}

async function trouble(answer) {
  const body = await answer.json().catch(() => null);
  const error = body?.error ?? {};
  const { status } = answer;
  if (status === 401) {
    session.dispatchEvent(new Event("signedout"));
    return new Trouble("signed_out", error.message ?? "Signed out.", { status });
  }
  const words = error.message ?? `The server answered with status ${status}.`;
  const retryAfter = Number(answer.headers.get("retry-after")) || (status === 503 ? 5 : 0);
  const found = new Trouble(error.kind ?? "unknown", words, {
    status, retryAfter, missing: error.missing, field: error.field,
  });
  // The page answers here, but perhaps the server behind it does not.
  connection.report(!found.isAway);
  return found;
}

/** The body of an answer; a connection that ends within it is a server that went away. */
async function content(answer, form) {
  try {
    return await answer[form]();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw away();
  }
}

function away() {
  connection.report(false);
  return new Trouble("away", "The server does not answer. It is asked again every 2 seconds.");
}

/** Ask for JSON. */
export async function json(path, asked = {}, signal = undefined) {
  return JSON.parse(await content(await answerTo(path, asked, { signal }), "text"));
}

/** Ask for bytes. */
export async function bytes(path, asked = {}, signal = undefined) {
  return new Uint8Array(await content(await answerTo(path, asked, { signal }), "arrayBuffer"));
}

/** Send JSON, or nothing. */
export async function send(method, path, body) {
  await answerTo(path, {}, {
    method,
    headers: body === undefined ? {} : { "content-type": "application/json" },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
}

/** A question that is asked again and again; an answer that has not changed is null. */
export function repeated(path, asked) {
  let tag = null;
  let text = null;
  return async (signal) => {
    const headers = tag === null ? {} : { "if-none-match": tag };
    const answer = await answerTo(path, asked, { headers, signal });
    if (answer.status === 304) return null;
    tag = answer.headers.get("etag");
    const now = await content(answer, "text");
    if (now === text) return null;
    text = now;
    return JSON.parse(now);
  };
}

/**
 * Do work every `seconds` while the tab is seen, at once when it is seen again, and after the time
 * that the server names where it is busy. Returns the end of it.
 */
export function poll(seconds, work) {
  const over = new AbortController();
  let timer;
  let busy = false;
  async function turn() {
    if (busy) return;
    busy = true;
    clearTimeout(timer);
    let wait = seconds;
    if (!document.hidden) {
      try {
        await work(over.signal);
      } catch (error) {
        if (over.signal.aborted) return;
        if (!(error instanceof Trouble)) throw error;
        wait = Math.max(seconds, error.retryAfter);
      }
    }
    busy = false;
    if (!over.signal.aborted) timer = setTimeout(turn, wait * 1000);
  }
  const seen = () => !document.hidden && turn();
  document.addEventListener("visibilitychange", seen);
  turn();
  return () => {
    over.abort();
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", seen);
  };
}
