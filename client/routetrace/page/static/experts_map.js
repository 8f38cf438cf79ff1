// Load of each expert at each layer on a canvas, with entropy and balancedness of the layers.

import { drawing, within } from "./drawing.js";
import { times } from "./experts_parts.js";
import { fmt } from "./text.js";
import { attr, say, style, tip } from "./ui.js";

const [LEFT, RIGHT, UPPER, LOWER] = [40, 4, 24, 20];
const [LEAST_ROW, MOST_ROW, MOST_MAP] = [4, 16, 480];
const LEAST_COLUMN = 2; // px of an expert; the picture is moved sideways below it
const [SIDE, APART] = [72, 20]; // width of a bar of the layers, and the gap before it
const OCTAVES = 3; // factors of two to either end of the colours
const FAR = 16; // experts of Shift and an arrow
const SIDES = [["Entropy", "entropy", 3], ["Balancedness", "balancedness", 2]];

/** The picture; `set(data, by)` draws an answer of /experts, with experts "id" or "load". */
export function loadMap() {
  const plate = drawing({ class: "series load-map" }, draw, () => { map = null; });
  const { canvas } = plate;
  let [data, by] = [null, "id"];
  let order = null; // experts of each layer, as they stand
  let [map, place] = [null, null];
  let cell = null; // [layer column, expert column] that the keys are on

  function draw() {
    if (!data || canvas.parentElement === null) return;
    const least = LEFT + RIGHT + data.num_experts * LEAST_COLUMN + SIDES.length * (SIDE + APART);
    style(canvas, "min-width", `${least}px`);
    if (canvas.clientWidth === 0) return;
    const { colours } = plate;
    place = placed(data, canvas.clientWidth);
    map ??= picture(data, order, colours.diverging);
    style(canvas, "height", `${place.height}px`);
    paint(plate.context(place.width, place.height), { data, place, colours, map, by, cell });
    attr(canvas, "aria-label", `Load of ${fmt.plural(data.num_experts, "expert")} at ${
      fmt.plural(data.layer_ids.length, "layer")}; 1 × is even. ${
      cell ? words(data, order, ...cell) : "The arrows go from cell to cell."}`);
  }

  const cellAt = (event) => {
    const column = Math.floor((event.offsetX - LEFT) / place.column);
    const layer = Math.floor((event.offsetY - UPPER) / place.row);
    const there = layer >= 0 && layer < data.layer_ids.length && column >= 0;
    return there ? [layer, column] : null;
  };
  canvas.addEventListener("pointermove", (event) => {
    const at = data && cellAt(event);
    if (!at) {
      tip.hide();
      return;
    }
    const side = at[1] >= data.num_experts;
    tip.show(event.clientX, event.clientY,
      side ? layerWords(data, at[0]) : words(data, order, ...at));
  });
  plate.onKey((key, shift) => {
    if (!data) return false;
    const far = shift ? FAR : 1;
    const [layer, column] = cell ?? [0, -1];
    const next = {
      ArrowLeft: [layer, column - far], ArrowRight: [layer, column + far],
      ArrowUp: [layer - 1, column], ArrowDown: [layer + (cell ? 1 : 0), column],
      Home: [layer, 0], End: [layer, data.num_experts - 1],
    }[key];
    if (!next && key !== "Escape") return false;
    cell = next
      ? next.map((n, i) => within([data.layer_ids.length, data.num_experts][i] - 1, n)) : null;
    draw();
    if (cell) say(words(data, order, ...cell));
    return true;
  });
  return {
    element: canvas,
    set(next, sorted) {
      if (next === data && sorted === by) return;
      if (data && next.num_experts * next.layer_ids.length !==
        data.num_experts * data.layer_ids.length) cell = null;
      [data, by, map] = [next, sorted, null];
      order = data.layer_ids.map((_, layer) => ordered(data, layer, by));
      draw();
    },
    stop: plate.stop,
  };
}

const loadOf = (data, layer, expert) => data.load[layer * data.num_experts + expert];

function ordered(data, layer, by) {
  const ids = Array.from({ length: data.num_experts }, (_, expert) => expert);
  return by === "id" ? ids
    : ids.sort((a, b) => loadOf(data, layer, b) - loadOf(data, layer, a) || a - b);
}

function words(data, order, layer, column) {
  const expert = order[layer][column];
  const load = loadOf(data, layer, expert);
  const which = `Layer ${data.layer_ids[layer]}, expert ${expert}: `;
  if (data.cells[layer] === 0) return `${which}no cell of this layer is there`;
  if (load === 0) return `${which}chosen by no token`;
  return `${which}${times(load)} the even share, ${
    fmt.pct(load / data.num_experts, 2)} of the layer’s choices`;
}

function layerWords(data, layer) {
  const [entropy, balance] = SIDES.map(([, name, digits]) =>
    data[name][layer]?.toFixed(digits) ?? "not known");
  return `Layer ${data.layer_ids[layer]}: entropy ${entropy}, balancedness ${balance}`;
}

function placed(data, width) {
  const layers = data.layer_ids.length;
  const row = Math.max(LEAST_ROW, Math.min(MOST_ROW, MOST_MAP / layers));
  const inner = width - LEFT - RIGHT - SIDES.length * (SIDE + APART);
  return {
    width, row, inner, column: inner / data.num_experts,
    height: Math.ceil(UPPER + layers * row + LOWER),
  };
}

/** A picture with a pixel for each layer and expert. */
function picture(data, order, table) {
  const canvas = document.createElement("canvas");
  canvas.width = data.num_experts;
  canvas.height = data.layer_ids.length;
  const c = canvas.getContext("2d");
  const image = c.createImageData(canvas.width, canvas.height);
  const pixels = new Uint32Array(image.data.buffer);
  order.forEach((experts, layer) => experts.forEach((expert, column) => {
    if (data.cells[layer] === 0) return;
    const octaves = Math.log2(loadOf(data, layer, expert)); // -Infinity of what was never chosen
    const at = Math.max(0, Math.min(1, 0.5 + octaves / (2 * OCTAVES)));
    pixels[layer * canvas.width + column] = table[Math.round(254 * at)];
  }));
  c.putImageData(image, 0, 0);
  return canvas;
}

function paint(c, { data, place, colours, map, by, cell }) {
  const { inner, row, column, height } = place;
  const layers = data.layer_ids.length;
  c.font = `11px ${colours.sans}`;
  c.textBaseline = "middle";
  c.fillStyle = colours.muted;
  c.textAlign = "left";
  c.fillText(by === "id" ? "Expert ids along, layers down"
    : "Experts of each layer along, hottest first", LEFT, UPPER / 2);
  c.imageSmoothingEnabled = false;
  c.drawImage(map, LEFT, UPPER, inner, layers * row);
  c.textAlign = "right";
  const every = Math.max(1, Math.ceil(14 / row));
  for (let layer = 0; layer < layers; layer += every) {
    c.fillText(`${data.layer_ids[layer]}`, LEFT - 8, UPPER + (layer + 0.5) * row);
  }
  c.textAlign = "center";
  const step = [1, 2, 4, 8, 16, 32, 64, 128, 256].find((n) => n * column >= 32) ?? 512;
  if (by === "id") {
    for (let expert = 0; expert < data.num_experts; expert += step) {
      c.fillText(`${expert}`, LEFT + (expert + 0.5) * column, height - LOWER / 2);
    }
  }
  SIDES.forEach(([name, field], i) => {
    const x = LEFT + inner + APART + i * (SIDE + APART);
    c.fillStyle = colours.muted;
    c.textAlign = "left";
    c.fillText(name, x, UPPER / 2);
    data[field].forEach((value, layer) => {
      c.fillStyle = colours.sunken;
      c.fillRect(x, UPPER + layer * row, SIDE, Math.max(1, row - 1));
      c.fillStyle = colours.muted;
      c.fillRect(x, UPPER + layer * row, SIDE * (value ?? 0), Math.max(1, row - 1));
    });
    c.fillStyle = colours.muted;
    c.textAlign = "right";
    c.fillText("1", x + SIDE, height - LOWER / 2);
  });
  if (!cell) return;
  c.strokeStyle = colours.ink;
  c.lineWidth = 1.5;
  const [x, y] = [LEFT + cell[1] * column, UPPER + cell[0] * row];
  c.strokeRect(x - 0.75, y - 0.75, column + 1.5, row + 1.5);
}
