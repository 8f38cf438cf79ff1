// Drawing of a grid on a canvas. Functions of what they are given; nothing is kept here.
//
// `g` is a frame of drawing: { c: context, viewport, colours, data: prepared segments, left, upper,
// height, pixel: size of a device pixel in px }.

import {
  presentColour, reasonColour, sourceColour, wantsDarkInk, weightColour,
} from "./colours.js";
import { harmless } from "./reasons.js";
import { seen } from "./runs.js";
import { TILE } from "./cells.js";

const HATCH = 6; // px from line to line

/** The colour of a run's key in a colouring of facts. */
export function colourOf(colouring, data, key) {
  if (colouring === "weights") return weightColour(key, data.versions.length);
  if (colouring === "source") return sourceColour(key);
  return presentColour(key === 1);
}

/** Paint runs; `place` maps tokens and columns to px, both edges on device pixels. */
export function paintRuns(c, runs, colour, place) {
  const known = new Map();
  let now;
  seen(runs, place.start, place.stop, (i) => {
    const x = place.x(runs.t0[i]);
    const width = place.x(runs.t1[i]) - x;
    if (width <= 0) return; // its neighbours take the pixel
    const key = runs.key[i];
    let next = known.get(key);
    if (next === undefined) known.set(key, (next = colour(key)));
    if (next !== now) c.fillStyle = now = next;
    const y = place.y(runs.l0[i]);
    c.fillRect(x, y, width, place.y(runs.l1[i]) - y);
  });
}

/** A place for `paintRuns` whose edges snap to device pixels. */
export function placeOf({ start, stop, scale, left, top, rowHeight, upper, pixel }) {
  const snap = (v) => Math.round(v / pixel) * pixel;
  return {
    start, stop, pixel,
    x: (t) => snap(left + (t - start) * scale),
    y: (l) => snap(upper + (l - top) * rowHeight),
  };
}

/**
 * Paint holes, none thinner than 1.5 px. `colouring`: among other colours than those of states a
 * hole has a margin, and among values, where colours mean shares, it is hatched.
 */
export function paintHoles(c, data, colours, place, colouring = "state", values = false) {
  const { holes, paintOrder } = data;
  const least = Math.ceil(1.5 / place.pixel) * place.pixel;
  const here = [];
  seen(holes, place.start, place.stop, (i) => here.push(i));
  here.sort((a, b) => paintOrder[a] - paintOrder[b]);
  for (const i of here) {
    const x = place.x(holes.t0[i]);
    const y = place.y(holes.l0[i]);
    const width = Math.max(least, place.x(holes.t1[i]) - x);
    const height = Math.max(least, place.y(holes.l1[i]) - y);
    const colour = reasonColour(holes.key[i]);
    if (colouring !== "state") {
      c.fillStyle = colours.back;
      c.fillRect(x - 1, y - 1, width + 2, height + 2);
    }
    const hatched = width > 4 && (values || harmless(holes.key[i]));
    c.fillStyle = hatched ? colours.back : colour;
    c.fillRect(x, y, width, height);
    if (hatched) {
      c.fillStyle = hatch(c, colour);
      c.fillRect(x, y, width, height);
    }
    if (width > 4 && height > 4) {
      // An edge, as some reasons are near in lightness to what is present.
      c.strokeStyle = hatched ? colour : colours.ink;
      c.globalAlpha = hatched ? 1 : 0.4;
      c.lineWidth = 1;
      c.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
      c.globalAlpha = 1;
    }
  }
}

const hatches = new Map();

function hatch(c, colour) {
  if (!hatches.has(colour)) {
    const tile = new OffscreenCanvas(HATCH, HATCH);
    const t = tile.getContext("2d");
    t.strokeStyle = colour;
    t.lineWidth = 1.4;
    for (const d of [-HATCH / 2, HATCH / 2, HATCH * 1.5]) {
      t.beginPath();
      t.moveTo(d - 3, HATCH + 1);
      t.lineTo(d + 5, -1);
      t.stroke();
    }
    hatches.set(colour, c.createPattern(tile, "repeat"));
  }
  return hatches.get(colour);
}

/** Paint rows of a later attempt over: hatched. */
export function paintAttempts(c, data, colours, place) {
  c.fillStyle = hatch(c, colours.back);
  seen(data.attempt, place.start, place.stop, (i) => {
    if (data.attempt.key[i] === 0) return;
    const x = place.x(data.attempt.t0[i]);
    const y = place.y(data.attempt.l0[i]);
    c.fillRect(x, y, place.x(data.attempt.t1[i]) - x, place.y(data.attempt.l1[i]) - y);
  });
}

/** Paint tiles of the level that fits; a coarser one stands in for one on its way. */
export function paintTiles(g, cells, what, { levels, numRows, layerIds }) {
  const { c, viewport: v } = g;
  const table = g.colours.values[what];
  const most = levels - 1;
  const layers = layerIds.length;
  const z = Math.max(0, Math.min(most, Math.floor(Math.log2(1 / v.scale))));
  const wide = TILE << z;
  const first = Math.floor(v.start / wide);
  const last = Math.floor(Math.min(numRows - 1, v.stop) / wide);
  c.imageSmoothingEnabled = false;
  // Neighbours first, so that what is seen is asked for before them.
  if (first > 0) cells.tile(what, z, first - 1, table);
  if ((last + 1) * wide < numRows) cells.tile(what, z, last + 1, table);
  for (let x = last; x >= first; x -= 1) {
    let image = cells.tile(what, z, x, table);
    let at = 0;
    let part = TILE;
    for (let up = z + 1; !image && up <= most; up += 1) {
      const parent = Math.floor((x * wide) / (TILE << up));
      image = cells.tile(what, up, parent, table, false);
      at = (x * wide - parent * (TILE << up)) / (1 << up);
      part = wide / (1 << up);
    }
    if (!image) continue;
    c.drawImage(image, at, 0, part, layers, g.left + (x * wide - v.start) * v.scale,
      g.upper - v.top * v.rowHeight, wide * v.scale, layers * v.rowHeight);
  }
}

/** Paint lines between cells, once they are large. */
export function paintLines(g) {
  const { c, viewport: v } = g;
  c.fillStyle = g.colours.back;
  c.globalAlpha = Math.min(1, (v.scale - 6) / 8);
  for (let t = Math.floor(v.start); t <= v.stop; t += 1) {
    c.fillRect(g.place.x(t), g.upper, 1, g.height);
  }
  if (v.rowHeight > 7) {
    for (let l = Math.floor(v.top); l < v.top + g.height / v.rowHeight; l += 1) {
      c.fillRect(g.left, g.place.y(l), v.width, 1);
    }
  }
  c.globalAlpha = 1;
}

/** Print expert ids into the cells in the router's order, in each cell as many as fit into all. */
export function paintIds(g, cells, { layerIds, numRows, topK, numExperts }, backOf) {
  const { c, viewport: v } = g;
  c.font = `500 11px ${g.colours.mono}`;
  c.textAlign = "center";
  c.textBaseline = "middle";
  const letter = c.measureText("0").width;
  const digits = `${numExperts - 1}`.length;
  const fit = Math.floor((v.scale - 6 + letter) / (letter * (digits + 1)));
  const count = Math.max(1, Math.min(topK, fit));
  const inks = new Map();
  const bottom = Math.min(layerIds.length, v.top + g.height / v.rowHeight);
  const right = Math.min(numRows, v.stop);
  for (let t = Math.floor(v.start); t < right; t += 1) {
    for (let l = Math.floor(v.top); l < bottom; l += 1) {
      const cell = cells.row(t, l);
      if (!cell) break;
      if (!cell.valid) continue;
      let text = `${cell.ids[0]}`;
      for (let k = 1; k < count; k += 1) text += ` ${`${cell.ids[k]}`.padStart(digits)}`;
      if (count > 1) text = text.padStart(count * (digits + 1) - 1);
      const back = backOf(t, l);
      if (!inks.has(back)) inks.set(back, wantsDarkInk(back) ? "#14181f" : "#f4f6f9");
      c.fillStyle = inks.get(back);
      c.fillText(text, g.left + (t + 0.5 - v.start) * v.scale,
        g.upper + (l + 0.5 - v.top) * v.rowHeight + 0.5);
    }
  }
}

/** Paint the cell of the cursor, and that under the pointer with lines to the axes. */
export function paintMarks(g, over) {
  const { c, viewport: v, colours } = g;
  const width = Math.max(1, v.scale);
  for (const cell of [v.cursor, over]) {
    if (!cell) continue;
    const x = g.left + (cell.position - v.start) * v.scale;
    const y = g.upper + (cell.column - v.top) * v.rowHeight;
    if (cell === over) {
      c.fillStyle = colours.accent;
      c.globalAlpha = 0.4;
      c.fillRect(x + width / 2 - 0.5, g.upper, 1, g.height);
      c.fillRect(g.left, y + v.rowHeight / 2 - 0.5, v.width, 1);
      c.globalAlpha = 1;
    }
    // Two lines, so that one of them is seen on any colour.
    const box = [x - (width < 4 ? 2 : 0), y - (v.rowHeight < 4 ? 1 : 0),
      Math.max(width, 6), Math.max(v.rowHeight, 6)];
    c.lineWidth = 4;
    c.strokeStyle = colours.back;
    c.strokeRect(...box);
    c.lineWidth = 2;
    c.strokeStyle = colours.accent;
    c.strokeRect(...box);
  }
}

/** Paint a dashed line where the prompt ends. */
export function paintPromptEnd(g, promptLen) {
  const { c } = g;
  c.strokeStyle = g.colours.muted;
  c.lineWidth = 1;
  c.setLineDash([3, 3]);
  c.beginPath();
  c.moveTo(g.place.x(promptLen) + 0.5, g.upper);
  c.lineTo(g.place.x(promptLen) + 0.5, g.upper + g.height);
  c.stroke();
  c.setLineDash([]);
}

/** The round step of an axis with marks at least `least` px apart. */
export function stepOf(scale, least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least / scale)));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n * scale >= least) ?? 10 * power;
}
