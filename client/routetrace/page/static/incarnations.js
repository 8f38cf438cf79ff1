// The incarnations of a trace as choices.

import { plain } from "./text.js";

/** Options of a segmented control: the shown incarnation, and others, at most the last ones. */
export function optionsOf(facts) {
  const others = facts.incarnations.filter((one) => one.number !== facts.incarnation);
  const shown = {
    number: facts.incarnation, state: facts.state, finish_reason: facts.finish_reason,
  };
  return [...others, shown].sort((a, b) => a.number - b.number).map((one) => [
    String(one.number), nameOf(one),
  ]);
}

/** Number of an incarnation and how it ended. */
export const nameOf = (one) => `#${one.number} ${plain(one.finish_reason ?? one.state)}`;
