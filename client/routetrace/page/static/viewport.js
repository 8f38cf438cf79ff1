// Which part of a grid is seen: tokens along, layers down. Knows no canvas.

const MOST_ROW = 22; // px a layer, as high as ids need
const MOST_FIT = 40; // px a token where a short trace is seen as a whole

export class Viewport {
  /** Pixels a token at most: enough for all ids of a cell. */
  most = 48;
  tokens = 1;
  layers = 1;
  start = 0; // first token seen, fractional
  top = 0; // first column of layers seen, fractional
  scale = 0; // px a token
  width = 1;
  height = 1;
  cursor = null; // { position, column }
  #listeners = new Set();

  onMove(listener) {
    this.#listeners.add(listener);
  }

  get fitScale() {
    return Math.min(MOST_FIT, this.width / this.tokens);
  }

  /** Height of a layer: all are seen where the whole trace is; they grow with the tokens. */
  get rowHeight() {
    const all = this.height / this.layers;
    const grown = (all * this.scale) / this.fitScale;
    return Math.max(all, Math.min(grown, this.scale * 0.62, MOST_ROW));
  }

  /** One past the last token seen. */
  get stop() {
    return Math.min(this.tokens, this.start + this.width / this.scale);
  }

  get isWhole() {
    return this.scale <= this.fitScale * 1.001;
  }

  /** Show a trace of another size; a cursor outside it goes. */
  extent(tokens, layers, most) {
    const whole = !this.scale || this.isWhole;
    Object.assign(this, { tokens: Math.max(1, tokens), layers: Math.max(1, layers), most });
    if (this.cursor && (this.cursor.position >= tokens || this.cursor.column >= layers)) {
      this.cursor = null;
    }
    if (whole) this.scale = this.fitScale;
    this.moved();
  }

  resize(width, height) {
    const whole = !this.scale || this.isWhole;
    Object.assign(this, { width: Math.max(1, width), height: Math.max(1, height) });
    if (whole) this.scale = this.fitScale;
    this.moved();
  }

  moved() {
    const { tokens, layers, width, height } = this;
    this.scale = Math.min(this.most, Math.max(this.fitScale, this.scale));
    this.start = Math.max(0, Math.min(tokens - width / this.scale, this.start));
    this.top = Math.max(0, Math.min(layers - height / this.rowHeight, this.top));
    for (const listener of this.#listeners) listener();
  }

  pan(dx, dy) {
    this.start += dx / this.scale;
    this.top += dy / this.rowHeight;
    this.moved();
  }

  /** Zoom about a point of the canvas, in px. */
  zoom(factor, x = this.width / 2, y = this.height / 2) {
    const token = this.start + x / this.scale;
    const layer = this.top + y / this.rowHeight;
    this.scale = Math.min(this.most, Math.max(this.fitScale, this.scale * factor));
    this.start = token - x / this.scale;
    this.top = layer - y / this.rowHeight;
    this.moved();
  }

  fit() {
    this.scale = this.fitScale;
    this.moved();
  }

  /** Show tokens [start, stop) in the middle, not larger than 48 px a token. */
  show(start, stop, first = 0, last = this.layers) {
    const span = Math.max(24, (stop - start) * 1.6);
    this.scale = Math.min(48, this.width / span);
    this.scale = Math.min(this.most, Math.max(this.fitScale, this.scale));
    this.start = (start + stop) / 2 - this.width / this.scale / 2;
    this.top = (first + last) / 2 - this.height / this.rowHeight / 2;
    this.moved();
  }

  /** Put the cursor on a cell, and bring the cell into sight. */
  see(position, column) {
    if (position < this.start || position + 1 > this.start + this.width / this.scale) {
      this.start = position - this.width / this.scale / 2;
    }
    if (column < this.top || column + 1 > this.top + this.height / this.rowHeight) {
      this.top = column - this.height / this.rowHeight / 2;
    }
    this.cursor = { position, column };
    this.moved();
  }
}
