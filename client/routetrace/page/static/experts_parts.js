// What is said of the load of experts beside its picture: figures, and the hottest over time.

import { figure } from "./marks.js";
import { spark } from "./series.js";
import { fmt, plain } from "./text.js";
import { attr, h, put, rows } from "./ui.js";

const LEFT_OUT = {
  gone: "no longer there", corrupt: "corrupt", other_model: "of another model",
  long: "too long to be counted here",
};
const [WIDE, HIGH] = [400, 24]; // px of a line over time

/** A load as a multiple of the even share. */
export const times = (load) => `${load.toFixed(load >= 10 ? 0 : load < 0.1 ? 3 : 2)} ×`;

/** Which traces were counted, in words. */
export function counted(data) {
  const out = Object.entries(data.left_out).map(([why, n]) => `${fmt.int(n)} ${LEFT_OUT[why]}`);
  return [
    `${fmt.plural(data.tokens, "token")} of the newest ${fmt.plural(data.traces, "trace")}${
      out.length > 0 ? ` (left out: ${out.join(", ")})` : ""}`,
    weights(data.weights), `counted ${fmt.ago(data.counted_at)}`,
  ].filter(Boolean).join(", ");
}

function weights(range) {
  if (range === null) return "";
  const [least, most] = range;
  return least === most ? `weights ${plain(least)}` : `weights ${plain(least)} to ${plain(most)}`;
}

/** Entropy, balancedness, the hottest expert, and those that are nearly idle. */
export function expertFigures() {
  const names = ["Entropy", "Balancedness", "Hottest", "Nearly idle"];
  const [entropy, balance, hottest, idle] = names.map(figure);
  const element = h("dl", { class: "card figures four", "aria-label": "Figures of the load" },
    [entropy, balance, hottest, idle].map((one) => one.element));
  return {
    element,
    set(data) {
      entropy.set(mean(data.entropy).toFixed(3), `of 1; ${least(data, data.entropy, 3)}`);
      balance.set(mean(data.balancedness).toFixed(2),
        `mean / largest load; ${least(data, data.balancedness, 2)}`);
      const [top] = data.hot;
      hottest.set(times(top.load), `the even share: layer ${top.layer}, expert ${top.expert}`);
      const all = data.cells.filter((cells) => cells > 0).length * data.num_experts;
      idle.set(fmt.int(data.idle), `of ${fmt.int(all)} below a fifth of the even share${
        data.never > 0 ? `, ${fmt.int(data.never)} never chosen` : ""}`);
    },
  };
}

function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.reduce((all, value) => all + value, 0) / Math.max(1, known.length);
}

function least(data, values, digits) {
  const known = values.filter((value) => value !== null);
  const value = Math.min(...known);
  return `least ${value.toFixed(digits)}, layer ${data.layer_ids[values.indexOf(value)]}`;
}

/** The hottest experts as a table, with their load from the oldest to the newest traces. */
export function hotCard() {
  const words = h("span", { class: "muted small" });
  const body = h("tbody");
  const heads = [["Layer", "right"], ["Expert", "right"], ["Load", "right"],
    ["Least to most", "right"], ["Oldest to newest traces", ""]];
  const element = h("section", { class: "card", "aria-label": "Hottest experts" },
    h("header", null, h("h2", null, "Hottest experts over time"), words),
    h("div", { class: "sideways", tabindex: 0, role: "group", "aria-label": "Hottest experts" },
      h("table", { class: "hot" }, h("thead", null, h("tr", null, heads.map(([text, side]) =>
        h("th", { scope: "col", class: side || null }, text)))), body)));
  return {
    element,
    set(data) {
      put(words, `Load / even share, in ${fmt.plural(data.parts.length, "stretch", "stretches")
        } of about ${fmt.si(data.tokens / data.parts.length)} tokens`);
      rows(body, data.hot, ({ layer, expert }) => `${layer}.${expert}`, makeHot, (row, one) => {
        put(row.children[2], times(one.load));
        put(row.children[3], `${times(Math.min(...one.series))} to ${
          times(Math.max(...one.series))}`);
        const line = row.line;
        attr(line.element, "class", one.series.length > 1 ? "spark" : "spark unseen");
        if (one.series.length > 1) line.set(one.series);
      });
    },
  };
}

function makeHot({ layer, expert }) {
  const line = spark(WIDE, HIGH);
  const row = h("tr", null, h("td", { class: "right" }, layer), h("td", { class: "right" }, expert),
    h("td", { class: "right" }), h("td", { class: "right muted" }), h("td", null, line.element));
  row.line = line;
  return row;
}
