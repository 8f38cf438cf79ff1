// Disagreement of trainer and rollout over training steps.

import { poll, repeated, Trouble } from "./api.js";
import { troubleOf } from "./empty.js";
import { agesCard, layersCard, rampKey, stepBar, stepFigures, verdict } from "./mismatch_parts.js";
import { picture } from "./mismatch_picture.js";
import { fmt, plain } from "./text.js";
import { alarm } from "./trace_facts.js";
import { copyButton, ghost, h, message, put, swap } from "./ui.js";

const EVERY = 5; // seconds between two questions: steps take longer
const [SHOWN, ALL] = [500, 2000]; // steps; all of which an address may name one
const CALL = "client.report_agreement(step, agreement)";

/** Open the view; `step` of the address is the chosen one, the last one without it. */
export function mismatch({ query, run, go, link }) {
  const element = h("div", { class: "view centred" }, ghost(3), ghost(8));
  let parts = null;
  let data = null;
  let wanted = query.step ?? null; // null: the last one, also of later answers
  let failure = "";
  let [ask, most] = [asking(SHOWN), SHOWN];
  const stop = poll(EVERY, async (signal) => {
    try {
      const next = await ask(signal);
      if (next !== null || failure) show(next ?? data);
    } catch (error) {
      if (error instanceof Trouble) failed(error);
      throw error;
    }
  });
  return {
    element, title: "Mismatch", keys: [], waits: "session",
    accepts(next) {
      wanted = next.step ?? null;
      if (data && data.step.length > 0) show(data);
      return true;
    },
    stop() {
      stop();
      parts?.stop();
    },
  };

  function asking(steps) {
    return repeated(`runs/${encodeURIComponent(run)}/mismatch`, { most: steps });
  }

  function chosen() {
    const at = wanted === null ? -1 : data.step.findIndex((one) => String(one) === wanted);
    const earlier = wanted !== null || data.superseded >= data.step.length;
    if (at < 0 && earlier && data.total > data.step.length && most === SHOWN) {
      [ask, most] = [asking(ALL), ALL];
    }
    return at < 0 ? Math.max(0, data.step.length - 1 - data.superseded) : at;
  }

  function pick(index) {
    if (index < 0 || index >= data.step.length) return;
    wanted = String(data.step[index]);
    go("mismatch", { step: wanted, run }, true);
    parts.set(data, index);
  }

  function show(next) {
    failure = "";
    data = next;
    if (data === null) return;
    if (data.step.length === 0) {
      swap(element, nothingYet());
      return;
    }
    parts ??= viewParts(run, pick, (id) => link("trace", { id, run }));
    parts.warn(null);
    swap(element, parts.elements);
    parts.set(data, chosen());
  }

  function failed(error) {
    if (parts) {
      failure = error.message;
      if (error.kind !== "away") parts.warn(error);
      return;
    }
    if (failure === error.message) return;
    failure = error.message;
    swap(element, h("div", { class: "narrow" },
      message(troubleOf(error, run), plain(error.message))));
  }
}

const nothingYet = () => h("div", { class: "narrow" },
  message("No trainer has reported its choices",
    "Compare the rows with what the trainer's own routers chose, and report it for each step:",
    h("div", { class: "snippet" }, h("pre", { tabindex: 0 }, h("code", null, CALL)),
      copyButton("Copy", "Copy", () => CALL)),
    h("p", { class: "muted" }, "AgreementLog(wandb.log, client=client) does both. See “Over " +
      "training steps” in docs/trainers.md.")));

function viewParts(run, pick, href) {
  const count = h("span", { class: "muted" });
  const title = h("div", { class: "title" }, h("h1", null, "Mismatch"), count);
  const trouble = alarm();
  const words = verdict(href);
  const figures = stepFigures();
  const grid = picture(pick);
  const key = rampKey();
  const bar = stepBar(pick);
  const layers = layersCard();
  const ages = agesCard();
  return {
    elements: [title, trouble.element, words.element, figures.element,
      h("section", { class: "card steps", "aria-label": "Training steps" },
        h("header", null, h("h2", null, "Cells that differ, by training step and layer"),
          key.element),
        h("div", { class: "body" }, bar.element, grid.element)),
      h("div", { class: "pair halves" }, layers.element, ages.element)],
    set(data, i) {
      const more = data.total > data.step.length ? `the last ${fmt.int(data.step.length)} of ` : "";
      const { superseded } = data;
      const old = superseded ? `; the last ${fmt.int(superseded)} predate a resume` : "";
      put(count, `${more}${fmt.plural(data.total, "step")} of ${plain(run)}${old}`);
      for (const part of [words, figures, bar, grid, layers, ages]) part.set(data, i);
    },
    warn(error) {
      trouble.set(error === null ? null : `Not up to date: ${plain(error.message)}`);
    },
    stop() {
      grid.stop();
      key.stop();
    },
  };
}
