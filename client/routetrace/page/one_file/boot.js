// The view of a trace in a file of its own: header, keys, theme.

import { unpack } from "./api.js";
import { dark, onTheme, switchTheme } from "./colours.js";
import { fmt, plain } from "./text.js";
import { trace } from "./trace.js";
import { attr, ghost, h, message, put, say, swap } from "./ui.js";

const OFFER = ["INPUT", "SELECT", "TEXTAREA"]; // elements whose keys are their own
const main = document.getElementById("main");

const theme = h("button", { type: "button", class: "ghost", onclick: next });
const named = () => put(theme, dark() ? "Light theme" : "Dark theme");
const words = h("span", { class: "muted small wide" });
document.getElementById("top").append(h("span", { class: "brand" }, "routetrace"), words,
  h("span", { class: "push status" }, theme));
attr(theme, "title", "t");
named();
onTheme(named);

function next() {
  say(switchTheme() === "dark" ? "Dark theme" : "Light theme");
}

async function open() {
  swap(main, h("div", { class: "view" }, ghost(3), ghost(8)));
  const { facts, ranges, written } = await unpack();
  const rows = ranges.reduce((sum, [start, stop]) => sum + stop - start, 0);
  const which = rows === facts.num_rows ? "all tokens"
    : `${fmt.int(rows)} of ${fmt.int(facts.num_rows)} tokens, around holes`;
  put(words, `Run ${plain(facts.run)}, as of ${fmt.time(written)}, with the experts of ${which}`);
  const view = trace({
    query: { id: facts.trace_id }, run: facts.run, session: { runs: [] }, go() {}, link: () => "#",
  });
  swap(main, view.element);
  document.title = `${view.title} · routetrace`;
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) {
      return;
    }
    if (OFFER.includes(event.target.tagName)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const keys = [...view.keys, { keys: ["t"], run: next }];
    const found = keys.find((one) => one.run && one.keys.includes(event.key));
    if (!found) return;
    event.preventDefault();
    found.run();
  });
}

open().catch((error) => {
  swap(main, h("div", { class: "narrow" }, message("This file cannot be shown",
    `A browser of 2023 or later is needed, and the whole file. (${error.message})`)));
  throw error;
});
