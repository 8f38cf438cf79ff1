// Going from hole to hole of a grid.

import { reason } from "./reasons.js";
import { layerWords } from "./trace_missing.js";
import { say } from "./ui.js";

/** A walk over the holes of a grid, from the cursor on; moved(position) is called for each step. */
export function holeWalk(grid, moved) {
  const { viewport } = grid;
  let at = -1;

  /** The hole that a step starts from: that of the cursor, or a place between two. */
  function from(by) {
    const { holes } = grid.data;
    const { cursor } = viewport;
    if (!cursor) return by > 0 ? -1 : 0;
    if (holes.t0[at] === cursor.position && holes.l0[at] === cursor.column) return at;
    const next = holes.t0.findIndex((start) => start > cursor.position);
    const behind = next < 0 ? holes.t0.length : next;
    return by > 0 ? behind - 1 : behind;
  }

  function goTo(i) {
    const { holes } = grid.data;
    const [t0, t1, l0, l1] = [holes.t0[i], holes.t1[i], holes.l0[i], holes.l1[i]];
    at = i;
    viewport.show(t0, t1, l0, l1);
    grid.choose(t0, l0);
    say(`Hole ${i + 1} of ${holes.t0.length}: positions ${t0} to ${t1 - 1}, layers ${
      layerWords(grid.source.layerIds, l0, l1)}, ${reason(holes.key[i]).title}`);
    moved(t0);
  }

  return {
    goTo,
    /** Go to the next hole, or the one before for -1, of a reason or of any. */
    jump(by, name = null) {
      const { holes } = grid.data;
      const total = holes.t0.length;
      const begin = from(by);
      for (let n = 1; n <= total; n += 1) {
        const next = (begin + by * n + total * n) % total;
        if (name === null || holes.key[next] === name) return goTo(next);
      }
      return say("No cell is missing");
    },
    reset() {
      at = -1;
    },
  };
}
