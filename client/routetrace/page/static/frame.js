// The frame around the views: header, run, navigation, whether the server answers, keys, theme.

import { connection } from "./api.js";
import { dark, onTheme, switchTheme } from "./colours.js";
import { fmt, plain } from "./text.js";
import { attr, h, put, rows, s, say } from "./ui.js";

/** Build the frame. pickRun(run), signOut() and keys(), the list of keys, do the work. */
export function frame({ tabs, pickRun, signOut, keys }) {
  const runs = h("select", { "aria-label": "Run", hidden: true,
    onchange: () => pickRun(runs.value) });
  const nav = h("nav", { class: "tabs", "aria-label": "Views" });
  const target = h("span", { class: "muted small wide" });
  const light = liveMark();
  const out = h("button", { type: "button", class: "ghost", hidden: true, onclick: signOut },
    "Sign out");
  const help = keysDialog(keys);
  const theme = h("button", { type: "button", class: "ghost icon", onclick: nextTheme }, moon());
  const named = () => attr(theme, "aria-label", dark() ? "Light theme (t)" : "Dark theme (t)");
  named();
  onTheme(named);
  const brand = h("a", { class: "brand", href: "#/" }, mark(), "routetrace");
  document.getElementById("top").append(brand, runs, nav,
    h("span", { class: "push status" }, target, light, out,
      h("button", { type: "button", class: "ghost icon wide", "aria-label": "Keys (?)",
        onclick: help.open }, "?"), theme));

  function nextTheme() {
    say(switchTheme() === "dark" ? "Dark theme" : "Light theme");
  }

  return {
    nextTheme,
    openHelp: help.open,
    get busy() {
      return document.querySelector("dialog[open]") !== null;
    },
    /** Show who is signed in and which runs there are; null: nobody is. */
    setSession(session, run) {
      const names = session ? session.runs : [];
      // A run of the address alone is an option, too, unless there is none to choose.
      const all = names.length === 0 || names.includes(run) ? names : [...names, run];
      runs.hidden = all.length === 0;
      rows(runs, all, (one) => one, (one) => h("option", { value: one }), (option, one) =>
        put(option, plain(one)));
      runs.value = run ?? "";
      put(target, session ? plain(session.target) : "");
      out.hidden = !session?.expires;
      nav.hidden = !session;
    },
    setTab(name, address) {
      rows(nav, tabs, (tab) => tab.name, (tab) => h("a", null, tab.title), (link, tab) => {
        attr(link, "href", address(tab.name));
        attr(link, "aria-current", tab.name === name ? "page" : null);
      });
    },
  };
}

function liveMark() {
  const word = h("span", null, "live");
  const element = h("span", { class: "live", role: "status" }, h("i", { "aria-hidden": "true" }),
    word);
  connection.addEventListener("change", () => {
    element.classList.toggle("stale", connection.away);
    put(word, connection.away ? `not live since ${fmt.time(connection.since / 1000)}` : "live");
  });
  return element;
}

function keysDialog(keys) {
  const list = h("dl", { class: "keys" });
  const element = h("dialog", { "aria-labelledby": "keys" }, h("h2", { id: "keys" }, "Keys"), list,
    h("div", { class: "bar end" },
      h("button", { type: "button", onclick: () => element.close() }, "Close")));
  document.body.append(element);
  return {
    open() {
      const known = keys().filter((one) => one.words);
      rows(list, known, (one) => one.keys.join(" "), () => h("div", null, h("dt"), h("dd")),
        (pair, one) => {
          const names = one.shown ?? one.keys[0];
          pair.firstChild.replaceChildren(...names.split(" ").flatMap((key, i) =>
            [i ? " " : "", h("kbd", null, key)]));
          put(pair.lastChild, one.words);
        });
      element.showModal();
    },
  };
}

const mark = () => s("svg", { viewBox: "0 0 16 16", width: 20, height: 20, "aria-hidden": "true" },
  s("rect", { width: 16, height: 16, rx: 4, class: "mark" }),
  s("path", { d: "M3.5 4.500h3l3 7h3M6.500 4.500h6", fill: "none", class: "mark-line",
    "stroke-width": 1.6, "stroke-linecap": "round", "stroke-linejoin": "round" }));

const moon = () => s("svg", { viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true" },
  s("circle", { cx: 8, cy: 8, r: 6, fill: "none", stroke: "currentColor", "stroke-width": 1.5 }),
  s("path", { d: "M8 2a6 6 0 0 1 0 12Z", fill: "currentColor" }));
