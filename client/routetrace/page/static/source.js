// What the server answers about one incarnation of a trace, as a source of the grid.

import { bytes } from "./api.js";

const WIDE = 256; // experts from which on an id takes two bytes

/**
 * A source of the grid for the answers `facts` and `segments`; `path` is that of the run, `against`
 * the side that it is compared with, or null.
 */
export function serverSource(path, facts, segments, against = null) {
  const layers = facts.layer_ids.length;
  const topK = facts.top_k;
  const asked = { id: facts.trace_id, incarnation: facts.incarnation };
  const rows = (side) => async (start, stop, signal) => {
    const end = Math.min(stop, facts.num_rows);
    const which = { ...asked, ...side, start, stop: end };
    const answer = await bytes(`${path}/trace/rows`, which, signal);
    if (answer.length === 0) return { absent: true };
    return split(answer, layers, topK, facts.num_experts > WIDE ? 2 : 1);
  };
  return {
    key: `${facts.incarnation} ${against}`,
    tokens: Math.max(facts.num_tokens, facts.num_rows + 1),
    numRows: facts.num_rows,
    promptLen: facts.prompt_len,
    layerIds: facts.layer_ids,
    topK,
    numExperts: facts.num_experts,
    levels: facts.levels,
    segments,
    values: facts.num_rows > 1 ? ["changed", ...(against ? ["differing"] : [])] : [],
    tile: (what, z, x, signal) => bytes(`${path}/trace/tile`,
      { ...asked, what, z, x, ...(what === "differing" ? { against } : {}) }, signal),
    rows: rows({}),
    other: against && rows({ against }),
  };
}

/** Ids and marks of [n, layers, topK] little-endian ids followed by [n, layers] bytes of 0 or 1. */
function split(answer, layers, topK, width) {
  const n = answer.length / (layers * (topK * width + 1));
  const size = n * layers * topK;
  if (width === 1) return { ids: answer.subarray(0, size), valid: answer.subarray(size) };
  const view = new DataView(answer.buffer, answer.byteOffset, 2 * size);
  const ids = Uint16Array.from({ length: size }, (_, i) => view.getUint16(2 * i, true));
  return { ids, valid: answer.subarray(2 * size) };
}
