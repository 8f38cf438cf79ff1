// The incarnations of a trace, which a server that lists none is asked for one by one.

import { json, Trouble } from "./api.js";
import { plain } from "./text.js";

const MOST = 32; // requests of a trace that are looked at

/**
 * The incarnations of a trace, as { number, state, finish_reason }.
 *
 * Their numbers have gaps: each is that of the engine request that it ends with, and the number of
 * any other request leads to the incarnation that holds it.
 */
export async function incarnationsOf(path, facts) {
  const found = new Map();
  for (let n = 1; n <= MOST && found.size < facts.num_incarnations; n += 1) {
    try {
      const one = await json(`${path}/trace`, { id: facts.trace_id, incarnation: n });
      found.set(one.incarnation, {
        number: one.incarnation, state: one.state, finish_reason: one.finish_reason,
      });
    } catch (error) {
      if (!(error instanceof Trouble) || error.status !== 404) throw error;
    }
  }
  return [...found.values()].sort((a, b) => a.number - b.number);
}

/** Options of a segmented control, with the incarnation that is shown among them. */
export function optionsOf(incarnations, facts) {
  const others = incarnations.filter((one) => one.number !== facts.incarnation);
  const shown = {
    number: facts.incarnation, state: facts.state, finish_reason: facts.finish_reason,
  };
  return [...others, shown].sort((a, b) => a.number - b.number).map((one) => [
    String(one.number), nameOf(one),
  ]);
}

/** Number of an incarnation and how it ended. */
export const nameOf = (one) => `#${one.number} ${plain(one.finish_reason ?? one.state)}`;
