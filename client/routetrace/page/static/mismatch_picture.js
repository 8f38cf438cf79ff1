// Disagreement over training steps on a canvas: its share as a line, and by step and layer.

import { drawing, within } from "./drawing.js";
import { fmt, plain } from "./text.js";
import { attr, say, tip } from "./ui.js";

const [LEFT, RIGHT] = [52, 12];
const [LINE, GAP, LOWER] = [120, 20, 24]; // heights: of the line, below it, of the axis
const UPPER = 10;
const [LEAST_ROW, MOST_ROW, MOST_MAP] = [3, 14, 380];
const FEW = 1.5; // usual distances of steps that make a gap
const MOST_SLOTS = 4000; // beyond it steps stand side by side, without gaps
const NAME = 56; // px from one step that is named to the next
const FAR = 10; // steps of Shift and an arrow

/**
 * The picture. `set(data, chosen)` draws columns of /mismatch and the index of the chosen step;
 * pick(index) is told where another one is chosen.
 */
export function picture(pick) {
  const plate = drawing({ class: "series mismatch", "aria-describedby": "mismatch-words" }, draw,
    () => { map = null; });
  const { canvas } = plate;
  let data = null;
  let chosen = 0;
  let layer = null; // column of the cell that the keys are on
  let place = null;
  let map = null; // the cells, drawn once for data and theme

  function draw() {
    if (!data || canvas.clientWidth === 0) return;
    const { colours } = plate;
    place = placed(data, canvas.clientWidth);
    map ??= cells(data, place, colours.differing);
    canvas.style.setProperty("height", `${place.height}px`);
    paint(plate.context(place.width, place.height), { data, place, colours, map, chosen, layer });
    attr(canvas, "aria-label", `Share of cells that differ in ${
      fmt.plural(data.step.length, "training step")}, and by layer. ${words(data, chosen, layer)}`);
  }

  const cellAt = (event) => {
    const slot = (event.offsetX - LEFT) / place.wide - 0.5;
    let index = 0;
    place.slot.forEach((one, i) => {
      if (Math.abs(one - slot) < Math.abs(place.slot[index] - slot)) index = i;
    });
    const column = Math.floor((event.offsetY - place.upper) / place.row);
    return [index, column >= 0 && column < data.layer_ids.length ? column : null];
  };
  canvas.addEventListener("pointermove", (event) => {
    if (!data) return;
    const [index, column] = cellAt(event);
    tip.show(event.clientX, event.clientY, words(data, index, column));
  });
  canvas.addEventListener("click", (event) => {
    if (!data) return;
    const [index, column] = cellAt(event);
    layer = column;
    pick(index);
  });
  plate.onKey((key, shift) => {
    if (!data) return false;
    const by = shift ? FAR : 1;
    const last = { step: data.step.length - 1, layer: data.layer_ids.length - 1 };
    const along = {
      ArrowLeft: chosen - by, ArrowRight: chosen + by, Home: 0, End: last.step,
    }[key];
    const down = {
      ArrowUp: layer === null ? last.layer : layer - 1, ArrowDown: layer === null ? 0 : layer + 1,
    }[key];
    if (key === "Escape") layer = null;
    else if (down !== undefined && last.layer < 0) return false; // no layers
    else if (down !== undefined) layer = within(last.layer, down);
    else if (along === undefined) return false;
    pick(along === undefined ? chosen : within(last.step, along));
    say(words(data, chosen, layer));
    return true;
  });
  return {
    element: canvas,
    set(next, index) {
      if (next !== data) map = null;
      if (layer !== null) {
        const at = next.layer_ids.indexOf(data.layer_ids[layer]);
        layer = at < 0 ? null : at;
      }
      data = next;
      chosen = index;
      draw();
    },
    stop: plate.stop,
  };
}

/** Share of the cells of a step that differ; null without cells. */
export const share = (data, i) => (data.cells[i] > 0 ? data.differing[i] / data.cells[i] : null);

/** Whether a step is the first one with its weight version, as far as versions are known. */
function updated(data, i) {
  const version = data.weight_version[i];
  const before = data.weight_version.slice(0, i).findLast((one) => one !== null);
  return version !== null && before !== undefined && version !== before;
}

function words(data, i, column) {
  const at = data.weight_version[i] === null ? "" : `, weights ${plain(data.weight_version[i])}`;
  const of = column === null ? share(data, i) : data.by_layer[i][column];
  const where = column === null ? "" : `, layer ${data.layer_ids[column]}`;
  return `Step ${plain(data.step[i])}${at}${where}: ${
    of === null ? "no cell compared" : `${fmt.pct(of, 2)} of cells differ`}`;
}

/** Where everything is, in px. Steps that were not reported have empty slots. */
function placed(data, width) {
  const steps = data.step.map(Number);
  const strides = steps.slice(1).map((step, i) => step - steps[i]);
  const stride = Math.min(...strides, Infinity);
  const usual = strides.toSorted((a, b) => a - b)[strides.length >> 1];
  const slots = Number.isFinite(stride) ? Math.round((steps.at(-1) - steps[0]) / stride) + 1 : 1;
  const sparse = slots > MOST_SLOTS;
  const slot = steps.map((step, i) =>
    (sparse || slots === 1 ? i : Math.round((step - steps[0]) / stride)));
  const count = slot.at(-1) + 1;
  const layers = data.layer_ids.length;
  const wide = (width - LEFT - RIGHT) / count;
  const apart = (steps.at(-1) - steps[0]) / Math.max(1, count - 1); // steps of a slot
  const row = Math.max(LEAST_ROW, Math.min(MOST_ROW, MOST_MAP / layers));
  const upper = UPPER + LINE + GAP;
  return {
    near: (i) => strides[i] <= FEW * usual, // whether no step is left out after it
    width, slot, count, row, upper, wide, named: slots === 1 ? 1 : round((NAME * apart) / wide),
    height: Math.ceil(upper + layers * row + LOWER),
  };
}

/** The least round number that is not below `least`. */
function round(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return [1, 2, 5, 10].map((one) => one * power).find((one) => one >= least);
}

/** A picture with a pixel for each slot and layer. */
function cells(data, place, table) {
  const canvas = document.createElement("canvas");
  canvas.width = place.count;
  canvas.height = data.layer_ids.length;
  if (canvas.height === 0) return canvas;
  const c = canvas.getContext("2d");
  const image = c.createImageData(canvas.width, canvas.height);
  const pixels = new Uint32Array(image.data.buffer);
  place.slot.forEach((slot, i) => data.by_layer[i].forEach((of, column) => {
    // A square root, as 3 % has to be seen.
    if (of !== null) pixels[column * canvas.width + slot] = table[Math.round(254 * Math.sqrt(of))];
  }));
  c.putImageData(image, 0, 0);
  return canvas;
}

function paint(c, { data, place, colours, map, chosen, layer }) {
  const { width, wide, row, upper } = place;
  const x = (i) => LEFT + (place.slot[i] + 0.5) * wide;
  const shares = data.step.map((_, i) => share(data, i));
  const most = Math.max(0.01, ...shares);
  const y = (v) => UPPER + (1 - v / most) * LINE;
  c.font = `11px ${colours.sans}`;
  c.textBaseline = "middle";
  c.textAlign = "right";
  for (const v of [0, most / 2, most]) {
    c.fillStyle = colours.line;
    c.fillRect(LEFT, Math.round(y(v)), width - LEFT - RIGHT, 1);
    c.fillStyle = colours.muted;
    c.fillText(fmt.pct(v, 1), LEFT - 8, y(v));
  }
  // Updates of the weights; where they are close, the line between them says nothing more.
  if (wide >= 1.5) {
    c.fillStyle = colours.edge;
    data.step.forEach((_, i) => {
      if (updated(data, i)) c.fillRect(Math.round(x(i) - wide / 2), UPPER + LINE + 2, 1, 8);
    });
  }
  paintLine(c, { place, shares, x, y, colours });
  c.imageSmoothingEnabled = wide < 1;
  if (map.height > 0) c.drawImage(map, LEFT, upper, place.count * wide, map.height * row);
  paintNames(c, { data, place, x, colours });
  c.strokeStyle = c.fillStyle = colours.ink;
  c.fillRect(Math.round(x(chosen)), UPPER, 1, upper - UPPER);
  const box = Math.max(3, wide);
  c.strokeRect(x(chosen) - box / 2, upper + (layer ?? 0) * row, box,
    layer === null ? map.height * row : row);
  if (shares[chosen] === null) return;
  c.beginPath();
  c.arc(x(chosen), y(shares[chosen]), 3.5, 0, 2 * Math.PI);
  c.fillStyle = colours.accent;
  c.fill();
}

/** A line through neighbouring steps, a dot for a step alone; none across steps left out. */
function paintLine(c, { place, shares, x, y, colours }) {
  c.strokeStyle = c.fillStyle = colours.accent;
  c.lineWidth = 1.5;
  c.lineJoin = "round";
  const joined = (i) => i >= 0 && i + 1 < shares.length && shares[i] !== null &&
    shares[i + 1] !== null && place.near(i);
  c.beginPath();
  shares.forEach((v, i) => {
    if (v === null) return;
    if (joined(i - 1)) c.lineTo(x(i), y(v));
    else c.moveTo(x(i), y(v));
    if (!joined(i - 1) && !joined(i)) c.rect(x(i) - 1, y(v) - 1, 2, 2);
  });
  c.stroke();
  c.lineWidth = 1;
}

/** Names of layers down and of steps along, as many as fit. */
function paintNames(c, { data, place, x, colours }) {
  c.fillStyle = colours.muted;
  const layers = data.layer_ids;
  const every = Math.max(1, Math.ceil(14 / place.row));
  for (let l = 0; l < layers.length; l += every) {
    c.fillText(`${layers[l]}`, LEFT - 8, place.upper + (l + 0.5) * place.row);
  }
  c.textAlign = "center";
  let end = -Infinity;
  data.step.forEach((step, i) => {
    if (Number(step) % place.named !== 0) return;
    const text = plain(step);
    const half = c.measureText(text).width / 2;
    const at = Math.max(LEFT + half, Math.min(place.width - half, x(i)));
    if (at - half < end + 24) return;
    c.fillText(text, at, place.height - 10);
    end = at + half;
  });
}
