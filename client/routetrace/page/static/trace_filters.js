// The filters of the list of traces. Their state is that of the address.

import { REASON_NAMES, reason } from "./reasons.js";
import { plain } from "./text.js";
import { attr, h, put, rows, segmented } from "./ui.js";

const STATES = [["", "All"], ["running", "Running"], ["complete", "Complete"],
  ["incomplete", "Incomplete"]];
const BELOW = ["1", "0.999", "0.99", "0.9", "0.5"];
const ORDERS = [["updated", "Last updated"], ["coverage", "Coverage"],
  ["missing", "Missing cells"], ["tokens", "Tokens"], ["version", "Weights"], ["id", "Id"]];
const PAUSE = 200; // ms after which what is written is looked for
/** Names of filters in an address. */
export const FILTERS = ["q", "state", "reason", "engine", "version", "below", "label"];
export const NO_FILTERS = Object.fromEntries(FILTERS.map((name) => [name, undefined]));

/**
 * The bar of filters. change(changes, quiet) is told what was chosen, quietly while somebody
 * writes; open() is Enter in the field of the id; only the filters of `names` are there.
 */
export function filterBar(change, open, names = [...FILTERS, "sort"]) {
  let timer;
  const find = h("input", {
    type: "search", id: "find", class: "mono", spellcheck: "false", autocomplete: "off",
    autocapitalize: "off", placeholder: "Find an id", "aria-label": "Part of the id of a trace",
    oninput() {
      clearTimeout(timer);
      timer = setTimeout(write, PAUSE);
    },
    onkeydown(event) {
      if (event.key !== "Enter" || event.isComposing) return;
      event.preventDefault();
      write();
      open();
    },
  });
  let told = "";
  function write() {
    clearTimeout(timer);
    told = find.value;
    change({ q: find.value }, true);
  }
  const state = segmented("State", (value) => change({ state: value }));
  const reasons = select("Reason", (value) => change({ reason: value }));
  const engine = select("Engine", (value) => change({ engine: value }));
  const below = select("Coverage", (value) => change({ below: value }));
  const order = select("Order", (value) => change({ sort: value,
    order: value === "id" ? "asc" : "desc" }));
  order.element.classList.add("for-narrow");
  const version = text("Weights 410..417", "Weight versions: one, or a..b",
    (value) => change({ version: value }));
  const label = text("Label k=v", "Add a label, as name=value", (value) => {
    if (!value) return;
    label.element.value = "";
    change({ label: [...new Set([...labels, value])] });
  });
  let labels = [];
  const chips = h("ul", { class: "chips", "aria-label": "Labels", hidden: true });
  const clear = h("button", { type: "button", class: "link", hidden: true,
    onclick: () => change(NO_FILTERS),
  }, "Clear the filters");
  const wrong = h("p", { class: "bad small", id: "wrong-filter", role: "alert", hidden: true });
  const element = h("div", { class: "filters", role: "search", "aria-label": "Filters" },
    h("div", { class: "bar" }, Object.entries({ q: find, state: state.element,
      reason: reasons.element, engine: engine.element, version: version.element,
      below: below.element, label: label.element, sort: order.element })
      .filter(([name]) => names.includes(name)).map(([, field]) => field), chips, clear), wrong);
  return {
    element,
    find,
    stop: () => clearTimeout(timer),
    /** Show the filters of an address; what is being written stays. */
    set(asked, engines) {
      if ((asked.q ?? "") !== told) find.value = told = asked.q ?? "";
      state.set(STATES, asked.state ?? "");
      reasons.set([["", "Any reason"], ...REASON_NAMES.map((name) =>
        [name, reason(name).title])], asked.reason);
      engine.set([["", "Any engine"], ...engines.map((name) => [name, plain(name)])],
        asked.engine);
      below.set([["", "Any coverage"], ...BELOW.map((share) =>
        [share, `Below ${+(100 * share).toFixed(4)} %`])], asked.below, (share) =>
        `Below ${+(100 * share).toFixed(4)} %`);
      order.set(ORDERS.map(([key, words]) => [key, `By ${words.toLowerCase()}`]),
        asked.sort ?? "updated");
      version.set(asked.version ?? "");
      labels = asked.label ?? [];
      chips.hidden = labels.length === 0;
      rows(chips, labels, (one) => one, (one) => h("li", null, h("button", {
        type: "button", class: "chip mono", onclick: () =>
          change({ label: labels.filter((other) => other !== one) }),
      }, h("bdi"), h("span", { "aria-hidden": "true" }, " ×"))), (item, one) => {
        put(item.firstChild.firstChild, plain(one));
        attr(item.firstChild, "aria-label", `Without the label ${plain(one)}`);
      });
      clear.hidden = !isFiltered(asked);
    },
    /** Say which filter the server refuses; null: none. */
    refuse(error) {
      wrong.hidden = error === null;
      put(wrong, error ? plain(error.message) : "");
      for (const [name, field] of [["version", version.element], ["label", label.element],
        ["below", below.element]]) {
        const bad = error !== null && error.field === name;
        attr(field, "aria-invalid", bad ? "true" : null);
        attr(field, "aria-describedby", bad ? "wrong-filter" : null);
      }
    },
  };
}

/** Whether an address chooses some traces alone. */
export const isFiltered = (asked) => FILTERS.some((name) => asked[name]?.length > 0);

function select(name, pick) {
  const element = h("select", { "aria-label": name, onchange: () => pick(element.value) });
  return {
    element,
    /** Show options; a value of the address that is none of them is one, too. */
    set(options, value = "", words = plain) {
      const all = options.some(([key]) => key === value) ? options
        : [...options, [value, words(value)]];
      rows(element, all, ([key]) => key, ([key]) => h("option", { value: key }),
        (option, [, text]) => put(option, text));
      if (element.value !== value) element.value = value;
      element.classList.toggle("chosen", value !== "");
    },
  };
}

function text(placeholder, name, pick) {
  let shown = "";
  const element = h("input", {
    type: "text", class: "short", spellcheck: "false", autocomplete: "off", autocapitalize: "off",
    placeholder, "aria-label": name,
    onchange: () => pick(element.value.trim()),
  });
  return {
    element,
    set(value) {
      if (value !== shown || document.activeElement !== element) element.value = value;
      shown = value;
    },
  };
}
