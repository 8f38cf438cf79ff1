// What stands around the cells of a grid: axes, tracks of weights and sources, the overview strip.

import { colourOf, paintHoles, paintRuns, placeOf, stepOf } from "./paint.js";
import { fmt } from "./text.js";

export const LEFT = 52; // px for the names of layers and tracks
export const STRIP = 34; // px of the overview strip
const AXIS = 20;
const TRACK = 8;
const PITCH = 14;

const TRACKS = [["weights", "weights"], ["source", "source"]];
const tracksOf = (data) => TRACKS.filter(([name]) => data[name]);

/** Height of what lies above the cells, in px. */
export const upperOf = (data) => AXIS + tracksOf(data).length * PITCH + 4;

/** Draw positions along, layers down, and the tracks between. */
export function paintAxes(g, layerIds) {
  const { c, viewport: v, colours, data } = g;
  c.font = `11px ${colours.sans}`;
  c.fillStyle = colours.muted;
  c.textBaseline = "alphabetic";
  c.textAlign = "center";
  const right = g.left + v.width;
  const step = Math.max(1, stepOf(v.scale, 84));
  for (let t = Math.ceil(v.start / step) * step; t <= v.stop; t += step) {
    const x = g.left + (t + (v.scale > 6 ? 0.5 : 0) - v.start) * v.scale;
    if (x > right) break;
    const text = fmt.int(t);
    const half = c.measureText(text).width / 2;
    c.fillText(text, Math.max(g.left + half, Math.min(right - half, x)), 11);
    c.fillRect(Math.round(x), AXIS - 5, 1, 4);
  }
  c.textAlign = "right";
  c.textBaseline = "middle";
  const down = Math.max(1, v.rowHeight >= 13 ? 1 : stepOf(v.rowHeight, 22));
  for (let l = Math.ceil(v.top / down) * down; l < layerIds.length; l += down) {
    const y = g.upper + (l + 0.5 - v.top) * v.rowHeight;
    if (y > g.upper + g.height) break;
    if (y < g.upper) continue;
    c.fillText(`${layerIds[l]}`, g.left - 8, Math.min(y, g.upper + g.height - 5));
  }
  tracksOf(data).forEach(([name, label], i) => {
    const upper = AXIS + i * PITCH;
    c.fillStyle = colours.muted;
    c.fillText(label, g.left - 8, upper + TRACK / 2 + 0.5);
    c.save();
    c.beginPath();
    c.rect(g.left, upper, v.width, TRACK);
    c.clip();
    paintRuns(c, data[name], (key) => colourOf(name, data, key), placeOf({
      start: v.start, stop: v.stop, scale: v.scale, left: g.left, top: 0, upper,
      rowHeight: TRACK / v.layers, pixel: g.pixel,
    }));
    c.restore();
  });
}

/** Draw the whole trace small; its picture is kept by the caller until the data or theme change. */
export function paintStrip(c, { viewport: v, data, colours, pixel, rows }) {
  const place = placeOf({
    start: 0, stop: v.tokens, scale: v.fitScale, left: 0, top: 0, upper: 0,
    rowHeight: STRIP / v.layers, pixel,
  });
  c.fillStyle = colours.sunken;
  c.fillRect(0, 0, place.x(rows), STRIP);
  paintRuns(c, data.state, (key) => colourOf("state", data, key), place);
  paintHoles(c, data, colours, place);
}

/** Draw the window of the strip: what is outside it is dimmed. */
export function paintWindow(c, { viewport: v, colours }) {
  const x = LEFT + v.start * v.fitScale;
  const width = Math.max(6, (v.stop - v.start) * v.fitScale);
  const end = LEFT + v.tokens * v.fitScale;
  if (!v.isWhole) {
    c.fillStyle = colours.back;
    c.globalAlpha = 0.6;
    c.fillRect(LEFT, 0, x - LEFT, STRIP);
    c.fillRect(x + width, 0, Math.max(0, end - x - width), STRIP);
    c.globalAlpha = 1;
  }
  c.strokeStyle = colours.accent;
  c.lineWidth = 2;
  c.beginPath();
  c.roundRect(x + 1, 1, Math.max(4, width - 2), STRIP - 2, 3);
  c.stroke();
}
