// Where another side differs from the rows of a trace: the verdict, figures, worst tokens.

import { nameOf } from "./incarnations.js";
import { figure } from "./marks.js";
import { fmt, plain } from "./text.js";
import { attr, h, put, rows } from "./ui.js";

const MOST = 10; // worst tokens that are listed

/**
 * Sides that a trace can be compared with: reports of trainers, then incarnations that have ended,
 * then the last attempt. `name` is that of an address, `option` of a choice, `who` in sentences.
 */
export function sidesOf(facts, reports) {
  const sides = reports.map((report) => ({
    name: `report:${report.reporter}`, option: `report of ${plain(report.reporter)}`,
    who: "the trainer", title: "Against the report of a trainer", about: aboutOf(report), report,
  }));
  if (facts.state === "running") return sides;
  for (const one of facts.incarnations) {
    if (one.number === facts.incarnation || one.state === "running") continue;
    const who = `incarnation #${one.number}`;
    sides.push({ name: `#${one.number}`, option: nameOf(one), who, title: `Against ${who}`,
      about: "Tokens count as the same unless their digests differ." });
  }
  if (facts.num_attempts > 1) {
    sides.push({ name: "latest", option: "last attempt", who: "the last attempt",
      title: "Against the last attempt",
      about: "Where a row was computed again after a preemption, the last one." });
  }
  return sides;
}

/** pick(name): another side, "" for none; goTo(position): a worst token. `set` fills the card. */
export function mismatchCard(pick, goTo) {
  const title = h("h2");
  const choice = h("select", { "aria-label": "Compare with", onchange: () => pick(choice.value) });
  const about = h("span", { class: "muted small" });
  const words = h("p");
  const names = ["Cells that differ", "Tokens with any", "Experts in common", "Compared"];
  const [cells, tokens, overlap, compared] = names.map(figure);
  const figures = h("dl", { class: "figures four", "aria-label": "Figures of the mismatch" },
    [cells, tokens, overlap, compared].map((one) => one.element));
  const heading = h("h3", null, "Tokens that differ most");
  const list = h("ol", { class: "worst" });
  const said = h("div", { class: "body" }, words);
  const worst = h("div", { class: "body" }, heading, list);
  const element = h("section", { class: "card mismatch", "aria-label": "Mismatch", hidden: true },
    h("header", null, title, choice, about), said, figures, worst);
  return {
    element,
    /** Show sides, the chosen one or null, and the answer of /diff, an error, or null: awaited. */
    set(sides, side, found) {
      element.hidden = sides.length === 0;
      if (element.hidden) return;
      // The first report is compared with unless another side is chosen.
      const none = { name: "", option: side ? "nothing" : "compare with …" };
      const options = sides[0].report || sides[0].held ? sides : [none, ...sides];
      rows(choice, options, (one) => one.name, (one) => h("option", { value: one.name }),
        (option, one) => put(option, one.option));
      choice.value = side?.name ?? "";
      choice.hidden = options.length < 2;
      put(title, side?.title ?? "Comparison");
      put(about, side?.about ?? "");
      said.hidden = !side;
      const shown = found && !(found instanceof Error) ? found : null;
      put(words, shown ? verdict(shown, side.who)
        : found ? plain(found.message) : "Comparing all cells …");
      const bad = shown?.diagnosis || shown?.cause || found instanceof Error;
      attr(words, "class", bad ? "bad" : null);
      figures.hidden = !shown?.cells;
      worst.hidden = !shown?.worst.length;
      if (!shown?.cells) return;
      cells.set(fmt.pct(shown.differing / shown.cells, 2), `${fmt.si(shown.differing)} of ${
        fmt.si(shown.cells)}`);
      tokens.set(fmt.pct(shown.differing_tokens / shown.tokens, 1),
        `${fmt.si(shown.differing_tokens)} of ${fmt.si(shown.tokens)}`);
      overlap.set(fmt.pct(shown.overlap, 2), "of those that were chosen");
      compared.set(fmt.si(shown.cells), shown.missing > 0
        ? `cells; ${fmt.si(shown.missing)} are there on one side alone` : "cells");
      rows(list, shown.worst.slice(0, MOST), ({ position }) => position, makeToken, setToken);
    },
  };

  function makeToken({ position }) {
    const rest = h("span", { class: "muted" });
    const item = h("li", null, h("button", { type: "button", class: "link",
      onclick: () => goTo(position) }, `Position ${fmt.int(position)}`), rest);
    item.rest = rest;
    return item;
  }
}

function setToken(item, one) {
  const weights = one.weight_version === null ? "" : `, weights ${plain(one.weight_version)}`;
  put(item.rest, `${fmt.int(one.differing)} of ${fmt.plural(one.layers, "layer")}, ${
    fmt.pct(one.overlap, 0)} in common${weights}`);
}

function aboutOf(report) {
  return [plain(report.reporter), report.step !== null && `step ${plain(report.step)}`,
    report.weight_version !== null && `trained with weights ${plain(report.weight_version)}`,
    `reported ${fmt.ago(report.reported_at)}`].filter(Boolean).join(", ");
}

function verdict(found, who) {
  const rest = found.other_tokens_from === null ? "" : ` From position ${
    fmt.int(found.other_tokens_from)} on the tokens are not the same, as their digests say: ` +
    "nothing is compared there.";
  if (found.cells === 0) return `No cell is there on both sides.${rest}`;
  const cause = found.diagnosis ?? found.cause;
  if (cause) return `${plain(cause).replaceAll("the trainer", who)}.${rest}`;
  if (found.differing === 0) return `The same in all ${fmt.int(found.cells)} cells.${rest}`;
  return `Rows match in order; the differences show no pattern with a known cause.${rest}`;
}
