// The grid of a trace on a canvas: tokens along, layers down.
//
// It draws from a source, whoever answers it:
//   { key: what its values belong to, tokens, numRows, promptLen, layerIds, topK, numExperts,
//     levels: number of zoom levels of tiles,
//     segments: { present: { t0, t1, l0, l1, version?, source?, attempt?, cached? },
//                 missing: { t0, t1, l0, l1, reason }, joined? },
//     values: names of the values that it has tiles of,
//     tile(what, z, x, signal): bytes of layers x 256 means over 2^z tokens, 255 where no cell is,
//     rows(start, stop, signal): { ids: [n x layers x topK], valid: [n x layers] },
//     other(start, stop, signal): the same of the side that it is compared with, or null }
// Facts are rectangles and exact at every zoom, values are tiles, ids come where one looks at them.

import { LEFT, STRIP, paintAxes, paintStrip, paintWindow, upperOf } from "./axes.js";
import { Cells } from "./cells.js";
import { onTheme, palette } from "./colours.js";
import { steer } from "./grid_input.js";
import {
  colourOf, paintAttempts, paintHoles, paintIds, paintLines, paintMarks, paintPromptEnd, paintRuns,
  paintTiles, placeOf,
} from "./paint.js";
import { keyAt, prepared } from "./runs.js";
import { h, style } from "./ui.js";
import { Viewport } from "./viewport.js";

const IDS_FROM = 24; // px a token
const MOST_ID = 22; // px that an id and its space take
const PAUSE = 70; // ms that the pointer rests before rows are asked for

export class Grid {
  viewport = new Viewport();
  colouring = "state";
  /** The cell under the pointer, or null. */
  over = null;
  source = null;
  data = null;
  #cells = null;
  #colours = null;
  #frame = null;
  #strip = null;
  #looked = null;
  #resting = null;
  #height = 0;
  #ended;

  /**
   * onCell(about | null, event | null): the cell at the pointer, else at the cursor, with what is
   * known of it; called again as more arrives. onTrouble(trouble | null): values or rows do not
   * come. onMove(): the cursor was moved, by a press or a key. onDraw(ms): drawn.
   */
  constructor({ label, onCell, onTrouble, onMove, onDraw }) {
    this.strip = h("canvas", { class: "strip", "aria-hidden": "true" });
    this.canvas = h("canvas", {
      class: "plot", tabindex: 0, role: "application", "aria-label": label,
      "aria-roledescription": "grid of cells",
    });
    this.element = h("div", { class: "grid" }, this.strip, this.canvas);
    this.onCell = onCell;
    this.onTrouble = onTrouble;
    this.onMove = onMove;
    this.onDraw = onDraw;
    this.viewport.onMove(() => this.redraw());
    const unthemed = onTheme(() => this.#repaint());
    const watcher = new ResizeObserver(() => this.#resize());
    watcher.observe(this.element);
    const unsteered = steer(this);
    this.#ended = () => {
      unthemed();
      watcher.disconnect();
      unsteered();
      cancelAnimationFrame(this.#frame);
      clearTimeout(this.#resting);
      this.#cells?.stop();
    };
  }

  stop() {
    this.#ended();
  }

  /** Draw another source: the same trace as it is now, or another incarnation. */
  setSource(source) {
    const before = this.source;
    this.source = source;
    this.data = prepared(source.segments);
    if (this.#cells && before.key === source.key && before.topK === source.topK &&
        before.layerIds.length === source.layerIds.length) {
      this.#cells.renew(source);
    } else {
      this.#cells?.stop();
      this.#cells = new Cells(source, () => this.redraw(), (trouble) => this.onTrouble(trouble));
    }
    const most = Math.max(48, Math.min(320, MOST_ID * source.topK + 8));
    this.viewport.extent(source.tokens, source.layerIds.length, most);
    this.over = null;
    this.#resize();
    this.#repaint();
  }

  setColouring(name) {
    this.colouring = name;
    this.redraw();
  }

  /** Whether values or rows are on their way. */
  get waiting() {
    return this.#cells?.waiting ?? false;
  }

  redraw() {
    this.#frame ??= requestAnimationFrame(() => {
      this.#frame = null;
      this.#draw();
    });
  }

  /** Point at a cell, or at none; rows are asked for once the pointer rests. */
  point(cell, event) {
    this.over = cell;
    clearTimeout(this.#resting);
    this.#resting = setTimeout(() => {
      this.#looked = cell ?? this.viewport.cursor;
      this.redraw();
    }, PAUSE);
    this.redraw();
    this.#tell(event);
  }

  /** Put the cursor on a cell. */
  choose(position, column) {
    this.#looked = { position, column };
    this.viewport.see(position, column);
    this.#tell(null);
  }

  #tell(event) {
    const cell = this.over ?? this.viewport.cursor;
    this.onCell(cell && this.about(cell), event);
  }

  /** What is known of a cell; `row` is null while its ids are on their way. */
  about({ position, column }) {
    const { data, source } = this;
    const about = { position, column, layer: source.layerIds[column] };
    about.reason = keyAt(data.holes, position, column) ?? null;
    const i = keyAt(data.rectangles, position, column);
    about.present = i !== undefined && about.reason === null;
    if (about.present) {
      for (const name of ["version", "source", "attempt", "cached"]) {
        if (data.present[name]) about[name] = data.present[name][i];
      }
      about.agent = data.sources[about.source];
      about.row = this.#cells.row(position, column);
      if (source.other) about.other = this.#cells.row(position, column, "other");
    }
    return about;
  }

  /** Height of the cells in px: small layers where there are many, and a part of the window. */
  #wantedHeight() {
    const most = Math.max(260, Math.min(940, Math.round(innerHeight * 0.52)));
    const layers = this.source?.layerIds.length ?? 1;
    return Math.max(Math.min(most, layers * 20), 100);
  }

  #resize() {
    const width = this.element.clientWidth;
    if (!width || !this.data) return;
    const scale = devicePixelRatio;
    this.upper = upperOf(this.data);
    this.#height = this.#wantedHeight();
    const size = (canvas, height) => {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      style(canvas, "height", `${height}px`);
    };
    size(this.canvas, this.#height + this.upper);
    size(this.strip, STRIP);
    this.#strip = null;
    this.viewport.resize(width - LEFT, this.#height);
    this.redraw();
  }

  #repaint() {
    this.#colours = null;
    this.#strip = null;
    this.redraw();
  }

  #draw() {
    if (!this.data || !this.#height) return;
    const began = performance.now();
    this.#colours ??= palette(this.element);
    const pixel = 1 / devicePixelRatio;
    const c = this.canvas.getContext("2d", { alpha: false });
    const v = this.viewport;
    const g = {
      c, viewport: v, colours: this.#colours, data: this.data, left: LEFT, upper: this.upper,
      height: this.#height, pixel,
    };
    g.place = placeOf({ ...g, start: v.start, stop: v.stop, scale: v.scale, top: v.top,
      rowHeight: v.rowHeight });
    c.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    c.fillStyle = g.colours.back;
    c.fillRect(0, 0, v.width + LEFT, this.#height + this.upper);
    this.#cells.begin();
    this.#paintCells(g);
    paintAxes(g, this.source.layerIds);
    this.#drawStrip(g);
    const looked = this.#looked;
    if (looked && this.about(looked).present) this.#cells.row(looked.position, looked.column);
    this.#cells.end();
    this.#tell(null);
    this.onDraw(performance.now() - began);
  }

  #paintCells(g) {
    const { c, viewport: v, data } = g;
    const { colouring, source } = this;
    const values = source.values.includes(colouring);
    c.save();
    c.beginPath();
    c.rect(LEFT, this.upper, v.width, this.#height);
    c.clip();
    c.fillStyle = g.colours.sunken;
    c.fillRect(LEFT, this.upper, g.place.x(source.numRows) - LEFT, this.#height);
    if (values) paintTiles(g, this.#cells, colouring, source);
    else paintRuns(c, data[colouring], (key) => colourOf(colouring, data, key), g.place);
    if (colouring === "source" && data.attempt) paintAttempts(c, data, g.colours, g.place);
    if (v.scale > 6) paintLines(g);
    paintHoles(c, data, g.colours, g.place, colouring, values);
    if (v.scale >= IDS_FROM && v.rowHeight >= 13) {
      paintIds(g, this.#cells, source, (t, l) => this.#backOf(g, t, l));
    }
    if (source.promptLen > v.start && source.promptLen < Math.min(v.stop, source.numRows)) {
      paintPromptEnd(g, source.promptLen);
    }
    paintMarks(g, this.over);
    c.restore();
  }

  /** Colour behind a cell's ids. */
  #backOf(g, position, column) {
    const { data, colours } = g;
    if (!this.source.values.includes(this.colouring)) {
      return colourOf(this.colouring, data, keyAt(data[this.colouring], position, column));
    }
    const byte = this.#cells.byteAt(this.colouring, position, column);
    return byte === null || byte === 255 ? colours.sunken : colours.values[this.colouring][byte];
  }

  #drawStrip({ pixel, colours, data, viewport }) {
    const scale = devicePixelRatio;
    if (!this.#strip) {
      const picture = new OffscreenCanvas(
        Math.max(1, Math.round(viewport.width * scale)), Math.round(STRIP * scale));
      const c = picture.getContext("2d");
      c.scale(scale, scale);
      paintStrip(c, { viewport, data, colours, pixel, rows: this.source.numRows });
      this.#strip = picture;
    }
    const c = this.strip.getContext("2d");
    c.setTransform(1, 0, 0, 1, 0, 0);
    c.clearRect(0, 0, this.strip.width, this.strip.height);
    c.drawImage(this.#strip, LEFT * scale, 0);
    c.scale(scale, scale);
    paintWindow(c, { viewport, colours });
  }

  /** The cell at a point of the canvas, in px; null outside the rows. */
  cellAt(x, y) {
    const v = this.viewport;
    if (!this.source || x < LEFT || y < this.upper) return null;
    const position = Math.floor(v.start + (x - LEFT) / v.scale);
    const column = Math.floor(v.top + (y - this.upper) / v.rowHeight);
    const inside = position < this.source.numRows && column < this.source.layerIds.length;
    return inside ? { position, column } : null;
  }
}
