// Where a trainer's report of a trace differs from its rows: the verdict, figures, worst tokens.

import { figure } from "./marks.js";
import { fmt, plain } from "./text.js";
import { attr, h, put, rows } from "./ui.js";

const MOST = 10; // worst tokens that are listed
const PREFIX = "report:";

/** The side of a reporter, as an address names it. */
export const sideOf = (reporter) => `${PREFIX}${reporter}`;

/** pick(side): another reporter; goTo(position): a worst token. `set(reports, side, found)`. */
export function mismatchCard(pick, goTo) {
  const choice = h("select", { "aria-label": "Reporter", onchange: () => pick(choice.value) });
  const about = h("span", { class: "muted small" });
  const words = h("p");
  const names = ["Cells that differ", "Tokens with any", "Experts in common", "Compared"];
  const [cells, tokens, overlap, compared] = names.map(figure);
  const figures = h("dl", { class: "figures four", "aria-label": "Figures of the mismatch" },
    [cells, tokens, overlap, compared].map((one) => one.element));
  const heading = h("h3", null, "Tokens that differ most");
  const list = h("ol", { class: "worst" });
  const element = h("section", { class: "card mismatch", "aria-label": "Mismatch", hidden: true },
    h("header", null, h("h2", null, "Against the report of a trainer"), choice, about),
    h("div", { class: "body" }, words), figures,
    h("div", { class: "body" }, heading, list));
  return {
    element,
    /** Show reports, the chosen side, and the answer of /diff, an error, or null: on its way. */
    set(reports, side, found) {
      element.hidden = reports.length === 0;
      if (element.hidden) return;
      rows(choice, reports, (one) => sideOf(one.reporter),
        (one) => h("option", { value: sideOf(one.reporter) }),
        (option, one) => put(option, plain(one.reporter)));
      choice.value = side;
      choice.hidden = reports.length < 2;
      put(about, aboutOf(reports.find((one) => sideOf(one.reporter) === side)));
      const shown = found && !(found instanceof Error) ? found : null;
      put(words, shown ? verdict(shown) : found ? plain(found.message) : "Comparing all cells …");
      const bad = shown?.diagnosis || shown?.cause || found instanceof Error;
      attr(words, "class", bad ? "bad" : null);
      figures.hidden = !shown?.cells;
      heading.hidden = list.hidden = !shown?.worst.length;
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
  if (!report) return "";
  return [plain(report.reporter), report.step !== null && `step ${plain(report.step)}`,
    report.weight_version !== null && `trained with weights ${plain(report.weight_version)}`,
    `reported ${fmt.ago(report.reported_at)}`].filter(Boolean).join(", ");
}

function verdict(found) {
  const rest = found.other_tokens_from === null ? "" : ` From position ${
    fmt.int(found.other_tokens_from)} on the tokens are not the same, as their digests say: ` +
    "nothing is compared there.";
  if (found.cells === 0) return `No cell is there on both sides.${rest}`;
  const cause = found.diagnosis ?? found.cause;
  if (cause) return `${plain(cause)}.${rest}`;
  if (found.differing === 0) return `The same in all ${fmt.int(found.cells)} cells.${rest}`;
  return `Rows fit as they are; what differs has no pattern that names a cause.${rest}`;
}
