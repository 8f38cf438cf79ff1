// Values of cells: tiles and rows of a source, loaded as they are looked at and kept for a while.

export const TILE = 256; // columns of a tile
const BLOCK = 64; // positions of one request for rows
const KEPT_TILES = 160;
const KEPT_BLOCKS = 48;
const AT_ONCE = 4;
const ABSENT = { ids: [], valid: false, absent: true };
const REST = 2000; // ms before a part that failed is asked for again

export class Cells {
  #source;
  #layers;
  #changed;
  #failed;
  #over = new AbortController();
  #tiles = new Map();
  #blocks = new Map();
  #wanted = new Map();
  #underWay = new Set();
  #restUntil = 0;
  #resting = null;

  /** changed() is called when something arrived, failed(trouble or null) when that changes. */
  constructor(source, changed, failed) {
    this.#source = source;
    this.#layers = source.layerIds.length;
    this.#changed = changed;
    this.#failed = failed;
  }

  stop() {
    this.#over.abort();
    clearTimeout(this.#resting);
  }

  /** Take a newer source of the same values; older ones stand in until they are here. */
  renew(source) {
    this.#over.abort();
    this.#over = new AbortController();
    this.#underWay.clear();
    this.#source = source;
    for (const kept of [...this.#tiles.values(), ...this.#blocks.values()]) kept.stale = true;
  }

  /** Whether something is on its way. */
  get waiting() {
    return this.#underWay.size > 0;
  }

  /** Begin a drawing: what an earlier one wanted, and nobody asked for yet, is no longer wanted. */
  begin() {
    this.#wanted.clear();
  }

  /** End a drawing: ask for what it wanted, the last first, as that is under the pointer. */
  end() {
    if (performance.now() < this.#restUntil) return;
    for (const [key, ask] of [...this.#wanted].reverse()) {
      if (this.#underWay.size >= AT_ONCE) return;
      this.#wanted.delete(key);
      if (!this.#underWay.has(key)) this.#ask(key, ask);
    }
  }

  async #ask(key, ask) {
    const { signal } = this.#over;
    this.#underWay.add(key);
    try {
      await ask(signal);
      this.#failed(null);
    } catch (error) {
      if (signal.aborted) return;
      const wait = Math.max(REST, 1000 * (error.retryAfter ?? 0));
      this.#restUntil = performance.now() + wait;
      clearTimeout(this.#resting);
      this.#resting = setTimeout(this.#changed, wait + 20);
      this.#failed(error);
    } finally {
      if (!signal.aborted) this.#underWay.delete(key);
    }
    if (!signal.aborted) this.#changed();
  }

  /** A tile as a picture of TILE x layers in the colours of `table`; null while it is not here. */
  tile(what, z, x, table, want = true) {
    const key = `${what}/${z}/${x}`;
    const kept = this.#tiles.get(key);
    if (want && (!kept || kept.stale)) {
      this.#wanted.set(key, async (signal) => {
        const bytes = await this.#source.tile(what, z, x, signal);
        keep(this.#tiles, key, { bytes }, KEPT_TILES);
      });
    }
    if (!kept) return null;
    keep(this.#tiles, key, kept, KEPT_TILES);
    if (kept.table !== table) Object.assign(kept, { table, image: this.#painted(kept, table) });
    return kept.image;
  }

  #painted({ bytes, image }, table) {
    const canvas = image ?? new OffscreenCanvas(TILE, this.#layers);
    const data = new ImageData(TILE, this.#layers);
    const out = new Uint32Array(data.data.buffer);
    for (let i = 0; i < out.length; i += 1) out[i] = table[bytes[i]];
    canvas.getContext("2d").putImageData(data, 0, 0);
    return canvas;
  }

  /** The byte of a cell in the finest tile, or null. */
  byteAt(what, position, column) {
    const kept = this.#tiles.get(`${what}/0/${Math.floor(position / TILE)}`);
    return kept ? kept.bytes[column * TILE + (position % TILE)] : null;
  }

  /**
   * { ids, valid } of a cell, ids in the router's order; `absent` if the source does not have its
   * rows; null while they are not here. `side`: "rows", or "other" of what it is compared with.
   */
  row(position, column, side = "rows") {
    const block = Math.floor(position / BLOCK);
    const key = `${side}/${block}`;
    const kept = this.#blocks.get(key);
    if (!kept || kept.stale) {
      this.#wanted.set(key, async (signal) => {
        const rows = await this.#source[side](block * BLOCK, (block + 1) * BLOCK, signal);
        keep(this.#blocks, key, rows, KEPT_BLOCKS);
      });
    }
    if (!kept) return null;
    keep(this.#blocks, key, kept, KEPT_BLOCKS);
    if (kept.absent) return ABSENT;
    const cell = (position - block * BLOCK) * this.#layers + column;
    const { topK } = this.#source;
    if (cell >= kept.valid.length) return { ids: [], valid: false };
    return {
      ids: kept.ids.subarray(cell * topK, (cell + 1) * topK),
      valid: kept.valid[cell] === 1,
    };
  }
}

/** Put a value at the young end of a map, and let the oldest go. */
function keep(map, key, value, most) {
  map.delete(key);
  map.set(key, value);
  while (map.size > most) map.delete(map.keys().next().value);
}
