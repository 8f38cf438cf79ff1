// What is said of disagreement beside its picture: the verdict, and the chosen step.

import { onTheme } from "./colours.js";
import { figure, rampBar } from "./marks.js";
import { share } from "./mismatch_picture.js";
import { noticeList } from "./notices.js";
import { fmt, plain } from "./text.js";
import { attr, h, put, rows, style } from "./ui.js";

const WORST = 8; // layers that are named
const RECENT = 20; // steps of the sentence where nothing has changed

/** The verdict in words; href(trace) is the address of a trace. */
export function verdict(href) {
  const list = noticeList(() => {});
  return {
    element: list.element,
    set(data, i) {
      const found = [];
      const { since } = data;
      if (since) {
        const cause = since.cause ? `Likely: ${plain(since.cause)}. ` : "";
        found.push({
          key: "since", tone: "bad", subject: "", rest: since.words, links: [],
          advice: cause + (since.weight_version === null
            ? "No update came with it: look at what the trainer changed, and whether rows are " +
              "replayed for the samples that they are of."
            : "Check that this update brought all router weights and biases, and all experts, to " +
              "the engines, in the same precision as the trainer's."),
        });
      } else {
        found.push({ key: "steady", tone: "good", subject: "", rest: steady(data), advice: "",
          links: [] });
      }
      if (data.diagnosis[i] || data.trace_ids[i].length > 0) {
        found.push({
          key: "diagnosis", tone: data.diagnosis[i] ? "bad" : "info",
          subject: `Step ${plain(data.step[i])}: `,
          rest: plain(data.diagnosis[i] || "the trainer names traces to look at."), advice: "",
          links: data.trace_ids[i].map((id) => [plain(id), id]),
        });
      }
      list.set(found, href);
    },
  };
}

function steady(data) {
  const last = data.step.map((_, i) => i).slice(-RECENT);
  const sum = (name) => last.reduce((all, i) => all + data[name][i], 0);
  const cells = sum("cells");
  if (cells === 0) return "No cell was compared.";
  return `${fmt.pct(sum("differing") / cells, 2)} of cells differ in the last ${
    fmt.plural(last.length, "step")}, and no step is clearly worse than those before it.`;
}

/** Figures of the chosen step. */
export function stepFigures() {
  const names = ["Cells that differ", "Tokens with any", "Experts in common", "Compared"];
  const [cells, tokens, overlap, compared] = names.map(figure);
  const element = h("dl", { class: "card figures four", "aria-label": "Figures of the step" },
    [cells, tokens, overlap, compared].map((one) => one.element));
  return {
    element,
    set(data, i) {
      const of = share(data, i);
      cells.set(of === null ? "–" : fmt.pct(of, 2), `of step ${plain(data.step[i])}`);
      const all = data.tokens[i];
      tokens.set(all > 0 ? fmt.pct(data.differing_tokens[i] / all, 1) : "–",
        all > 0 ? `${fmt.si(data.differing_tokens[i])} of ${fmt.si(all)} tokens` : "");
      overlap.set(data.overlap[i] === null ? "–" : fmt.pct(data.overlap[i], 2),
        "of those that were chosen");
      compared.set(fmt.si(data.cells[i]), `cells, by ${
        fmt.plural(data.reporters[i], "reporter")}, ${fmt.ago(data.reported_at[i])}`);
    },
  };
}

/** The worst layers of the chosen step, as bars. */
export function layersCard() {
  const list = h("ul", { class: "reasons" });
  const none = h("p", { class: "muted" }, "No layer differs.");
  const element = h("section", { class: "card", "aria-label": "Layers" },
    h("header", null, h("h2", null, "Layers that differ most")),
    h("div", { class: "body" }, none, list));
  return {
    element,
    set(data, i) {
      const worst = data.by_layer[i].map((of, column) => [data.layer_ids[column], of ?? 0])
        .filter(([, of]) => of > 0).sort(([, a], [, b]) => b - a).slice(0, WORST);
      none.hidden = worst.length > 0;
      rows(list, worst, ([layer]) => layer, ([layer]) => bar(`Layer ${layer}`),
        (item, [, of]) => item.set(of / worst[0][1], fmt.pct(of, 2)));
    },
  };
}

/** Disagreement by the weights that computed the rows: how it grows with their age. */
export function agesCard() {
  const list = h("ul", { class: "reasons" });
  const none = h("p", { class: "muted" }, "The weight versions of the rows are not known.");
  const element = h("section", { class: "card", "aria-label": "Weights of the rows" },
    h("header", null, h("h2", null, "By the weights that computed the rows")),
    h("div", { class: "body" }, none, list));
  return {
    element,
    set(data, i) {
      const trainer = data.weight_version[i];
      const found = data.by_version[i].filter(({ cells }) => cells > 0).reverse();
      const most = Math.max(...found.map(({ cells, differing }) => differing / cells));
      none.hidden = found.length > 0;
      rows(list, found, ({ version }) => version, () => bar(""), (item, one) => {
        item.name(`${plain(one.version)}${age(trainer, one.version)}`);
        item.set(most > 0 ? one.differing / one.cells / most : 0,
          `${fmt.pct(one.differing / one.cells, 2)} of ${fmt.si(one.cells)}`);
      });
    },
  };
}

function age(trainer, version) {
  if (trainer === null) return "";
  const behind = BigInt(trainer) - BigInt(version);
  return behind === 0n ? ", the trainer's" : behind > 0n ? `, ${behind} behind`
    : `, ${-behind} ahead`;
}

function bar(text) {
  const label = h("span", null, text);
  const inner = h("i");
  const count = h("span", { class: "right" });
  const item = h("li", null, label, h("span", { class: "track", "aria-hidden": "true" }, inner),
    count);
  item.name = (words) => put(label, words);
  item.set = (of, words) => {
    style(inner, "width", `${(100 * of).toFixed(1)}%`);
    put(count, words);
  };
  return item;
}

/** What the colours of the cells mean. */
export function rampKey() {
  const ramp = rampBar("differing");
  const element = h("span", { class: "bar small muted" }, "0 %", ramp.element,
    "100 % of the cells of a layer");
  ramp.set();
  return { element, stop: onTheme(ramp.set) };
}

/** A row of links to the steps around the chosen one, and to the first one that is worse. */
export function stepBar(pick) {
  const button = (words, to) => h("button", { type: "button", onclick: () => pick(to()) }, words);
  const words = h("span", { class: "muted", id: "mismatch-words" });
  let now = { data: null, i: 0 };
  const back = button("< step", () => now.i - 1);
  const next = button("step >", () => now.i + 1);
  const since = button("First worse step", () => now.data.step.indexOf(now.data.since.step));
  return {
    element: h("div", { class: "bar" }, back, next, since, words),
    set(data, i) {
      now = { data, i };
      attr(back, "aria-disabled", i === 0 ? "true" : null);
      attr(next, "aria-disabled", i === data.step.length - 1 ? "true" : null);
      since.hidden = !data.since || !data.step.includes(data.since.step);
      put(words, `Step ${plain(data.step[i])}${data.weight_version[i] === null ? ""
        : `, trained with weights ${plain(data.weight_version[i])}`}`);
    },
  };
}
