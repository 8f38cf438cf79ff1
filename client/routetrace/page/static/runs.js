// Rectangles of cells, [t0, t1) positions by [l0, l1) columns, made ready to be drawn and asked.

/**
 * Join rectangles that follow each other in the same layers with the same key, and index them.
 *
 * Returns columns t0, t1, l0, l1, key in ascending t0, and `reach`, the furthest t1 so far, by
 * which `seen` finds where to begin.
 */
export function joined(columns, keyOf) {
  const { t0, t1, l0, l1 } = columns;
  const order = Array.from(t0.keys()).sort((a, b) => t0[a] - t0[b]);
  const runs = { t0: [], t1: [], l0: [], l1: [], key: [], reach: [] };
  const last = new Map();
  for (const i of order) {
    const band = l0[i] * 65536 + l1[i];
    const key = keyOf(i);
    const at = last.get(band);
    if (at !== undefined && runs.t1[at] === t0[i] && runs.key[at] === key) {
      runs.t1[at] = t1[i];
      continue;
    }
    last.set(band, runs.t0.length);
    runs.t0.push(t0[i]);
    runs.t1.push(t1[i]);
    runs.l0.push(l0[i]);
    runs.l1.push(l1[i]);
    runs.key.push(key);
  }
  let reach = 0;
  for (const end of runs.t1) runs.reach.push((reach = Math.max(reach, end)));
  return runs;
}

/** Call `visit(i)` for each run that has a token in [start, stop). */
export function seen(runs, start, stop, visit) {
  let low = 0;
  let high = runs.reach.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (runs.reach[middle] > start) high = middle;
    else low = middle + 1;
  }
  for (let i = low; i < runs.t0.length && runs.t0[i] < stop; i += 1) {
    if (runs.t1[i] > start) visit(i);
  }
}

/** Key of the run that holds a cell, or undefined. */
export function keyAt(runs, position, column) {
  let found;
  seen(runs, position, position + 1, (i) => {
    if (runs.l0[i] <= column && column < runs.l1[i]) found = runs.key[i];
  });
  return found;
}

/** Number of cells in a run. */
export const cells = (runs, i) => (runs.t1[i] - runs.t0[i]) * (runs.l1[i] - runs.l0[i]);

/** Key of runs whose weights, or agent, are unknown. */
export const UNKNOWN = -1;

/** Sort numbers, or strings of integers above 2^53. */
const byValue = (a, b) => {
  const [x, y] = [BigInt(a), BigInt(b)];
  return x < y ? -1 : x > y ? 1 : 0;
};

/** Everything that drawing needs to know about the segments of a trace. */
export function prepared(segments) {
  const { present, missing } = segments;
  const versions = [...new Set(present.version ?? [])].filter((v) => v !== null).sort(byValue);
  const rank = new Map([[null, UNKNOWN], ...versions.map((version, i) => [version, i])]);
  const by = (column) => present[column] && joined(present, (i) => present[column][i]);
  const holes = joined(missing, (i) => missing.reason[i]);
  // Small holes last, so that none is hidden under its wider neighbour.
  const order = Array.from(holes.t0.keys()).sort((a, b) => cells(holes, b) - cells(holes, a));
  const total = order.reduce((sum, i) => sum + cells(holes, i), 0);
  return {
    versions,
    holes,
    missingCells: total,
    paintOrder: rankOf(order),
    state: joined(present, (i) => (present.cached?.[i] ? 1 : 0)),
    weights: present.version && joined(present, (i) => rank.get(present.version[i])),
    source: present.source && joined(present, (i) => present.source[i] ?? UNKNOWN),
    attempt: by("attempt"),
    rectangles: joined(present, (i) => i),
    present,
    sources: segments.sources ?? [],
    joined: segments.joined ?? 0,
  };
}

function rankOf(order) {
  const rank = new Uint32Array(order.length);
  order.forEach((i, at) => { rank[i] = at; });
  return rank;
}
