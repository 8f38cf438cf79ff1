// Where one is: addresses, keys, signing in. A view is a module; VIEWS is the only list of them.

import { json, poll, send, session as signedOut, Trouble } from "./api.js";
import { restoreTheme } from "./colours.js";
import { experts } from "./experts.js";
import { frame } from "./frame.js";
import { mismatch } from "./mismatch.js";
import { overview } from "./overview.js";
import { signIn } from "./signin.js";
import { trace } from "./trace.js";
import { traces } from "./traces.js";
import { plain } from "./text.js";
import { ghost, h, message, say, swap } from "./ui.js";

/**
 * Views by the name in the address; the first one is the start. `key` follows `g`; `title` is that
 * of the tab; a view without them is reached from the view `within`, whose tab it has.
 *
 * open(context) returns { element, title, keys, stop(), find?(), focus?(), accepts?(query),
 * waits? }, of a context { query, run, session, go(view, query, quiet), link(view, query) }.
 * `waits`: what the view does not ask for itself; "session": which runs there are; "runs": it is
 * built again, too, once there are others.
 */
const VIEWS = [
  { name: "overview", title: "Overview", key: "o", open: overview },
  { name: "traces", title: "Traces", key: "t", open: traces },
  { name: "trace", within: "traces", open: trace },
  { name: "experts", title: "Experts", key: "e", open: experts },
  { name: "mismatch", title: "Mismatch", key: "m", open: mismatch },
];
const TABS = VIEWS.filter((one) => !one.within);
const FIND = "traces"; // the view where a trace is found
const LISTS = ["label"]; // what an address may have several of
const LEADER = 900; // ms in which the second key of two follows
const OFFER = ["INPUT", "SELECT", "TEXTAREA"]; // elements whose keys are their own

const main = document.getElementById("main");
let who = null; // the answer of /session
let view = null;
let place = null; // { name, query }
let leader = 0;
let finding = false; // whether the view that is on its way begins with its field
let unwatch = () => {};

restoreTheme();
const page = frame({
  tabs: TABS,
  keys: () => [...globalKeys(), ...(view?.keys ?? [])],
  pickRun: (run) => go(TABS.find((one) => one.name === place.name)?.name ?? FIND, { run }),
  async signOut() {
    try {
      await send("DELETE", "session");
    } catch (error) {
      if (!(error instanceof Trouble)) throw error;
    }
    showSignIn();
  },
});

const address = (name, query) => {
  const given = Object.entries(query).flatMap(([key, value]) =>
    [value].flat().map((one) => [key, one ?? ""])).filter(([, value]) => value !== "");
  const text = given.map(([key, value]) => `${key}=${encodeURIComponent(value)}`).join("&");
  return `#/${name}${text && `?${text}`}`;
};

/** Go to a view; quietly: the address follows what is on the page already. */
function go(name, query, quiet = false) {
  const next = address(name, query);
  if (quiet) history.replaceState(null, "", next);
  else if (location.hash === next) route();
  else location.hash = next;
}

function parsed() {
  const [name, text = ""] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const query = Object.create(null);
  for (const part of text.split("&").filter(Boolean)) {
    const [key, value = ""] = part.split(/=(.*)/s);
    if (LISTS.includes(key)) (query[key] ??= []).push(decoded(value));
    else query[key] = decoded(value);
  }
  const wanted = VIEWS.find((one) => one.name === name) ?? VIEWS[0];
  // A view of one thing needs its id.
  const known = wanted.within && !query.id
    ? VIEWS.find((one) => one.name === wanted.within) : wanted;
  return { known, query };
}

function decoded(value) {
  try {
    return decodeURIComponent(value);
  } catch {
    return value; // a stray % of an address that somebody typed
  }
}

function route() {
  if (!who) return;
  const { known, query } = parsed();
  const run = query.run ?? who.runs[0] ?? "default";
  if (place && place.name === known.name && place.run === run && view.accepts?.(query)) return;
  place = { name: known.name, run };
  page.setSession(who, run);
  page.setTab(known.within ?? known.name, (name) => address(name, { run }));
  open(known.open({ query, run, session: who, go, link: address }));
  scrollTo(0, 0);
  if (finding) view.find?.();
  finding = false;
}

function open(next) {
  const had = main.contains(document.activeElement) && document.activeElement !== main;
  view?.stop();
  view = next;
  swap(main, view.element);
  document.title = `${view.title} · routetrace`;
  say(view.title);
  if (view.focus) view.focus();
  else if (had) main.focus({ preventScroll: true });
}

function showSignIn(words) {
  unwatch();
  who = null;
  place = null;
  page.setSession(null, null);
  open(signIn(words, parsed().query.run, begin));
}

/** Ask who is signed in, again and again until there is an answer; then open the address. */
function begin() {
  const stop = poll(2, async (signal) => {
    try {
      who = await json("session", {}, signal);
    } catch (error) {
      if (!(error instanceof Trouble) || error.kind === "signed_out") {
        stop();
      } else {
        open(waiting(error));
      }
      throw error;
    }
    stop();
    route();
    watchRuns();
  });
}

/** Follow who is signed in and which runs there are, while the view asks for nothing itself. */
function watchRuns() {
  unwatch();
  unwatch = poll(2, async (signal) => {
    if (!view.waits) return;
    const next = await json("session", {}, signal);
    const same = next.runs.join("\n") === who.runs.join("\n");
    who = next;
    if (same) return;
    page.setSession(who, place.run);
    if (view.waits === "runs") {
      place = null;
      route();
    }
  });
}

const waiting = (error) => ({
  element: h("div", { class: "view narrow" },
    message(error.isAway ? "The server does not answer" : "The page cannot be shown yet",
      plain(error.message))),
  title: "routetrace", keys: [], stop() {},
});

signedOut.addEventListener("signedout", () => {
  if (who) showSignIn("Signed out: the token is not valid any more.");
  else if (!main.querySelector("input[type=password]")) showSignIn();
});

function globalKeys() {
  return [
    ...(who ? TABS.map(({ name, title, key }) => ({
      keys: [`g ${key}`], words: title, run: () => go(name, { run: place.run }),
    })) : []),
    ...(who ? [{ keys: ["/"], words: "Find a trace", run: find }] : []),
    { keys: ["t"], words: "Light or dark", run: page.nextTheme },
    { keys: ["?"], words: "This list", run: page.openHelp },
    { keys: ["Esc"], words: "Leave a field, the grid, or this list" },
  ];
}

function find() {
  if (view.find) {
    view.find();
    return;
  }
  finding = true;
  go(FIND, { run: place.run });
}

// Its target is no address of a view.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
addEventListener("hashchange", route);
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || page.busy) return;
  if (OFFER.includes(event.target.tagName)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const two = leader && performance.now() - leader < LEADER ? `g ${event.key}` : null;
  leader = event.key === "g" ? performance.now() : 0;
  const all = [...(view?.keys ?? []), ...globalKeys()];
  const found = all.find((one) => one.run && two && one.keys.includes(two)) ??
    all.find((one) => one.run && one.keys.includes(event.key));
  if (!found) return;
  leader = 0;
  event.preventDefault();
  found.run();
});

swap(main, h("div", { class: "view" }, ghost(3), ghost(8)));
begin();
