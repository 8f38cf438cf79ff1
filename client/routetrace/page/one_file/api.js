// The answers that a file holds, in the place of those of the page's server.

export const HAS_SERVER = false;
/** Return the side that the file holds, as sidesOf(facts, reports) names it. */
export function offered(sidesOf, facts, reports) {
  const { other } = held.about;
  const ended = { state: "ended", incarnation: 0, num_attempts: 2,
    incarnations: other ? [{ ...other.incarnation, state: "ended" }] : [] };
  return sidesOf({ ...facts, ...ended }, reports).filter((one) => one.name === other?.name)
    .map((one) => ({ ...one, held: true }));
}
let held = null;

/** A question that the file has no answer to. */
export class Trouble extends Error {
  kind = "not_found";
  status = 404;
  missing = "";
}

/** Unpack the data of the file; `about` is what it says of itself. */
export async function unpack() {
  const text = document.getElementById("data").content.textContent;
  const stream = new Blob([decoded(text)]).stream().pipeThrough(new DecompressionStream("gzip"));
  const all = new Uint8Array(await new Response(stream).arrayBuffer());
  const size = new DataView(all.buffer).getUint32(0, true);
  const about = JSON.parse(new TextDecoder().decode(all.subarray(4, 4 + size)));
  held = { about, body: all.subarray(4 + size) };
  return about;
}

/** Bytes of base64; older browsers have no method for it. */
function decoded(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text);
  const found = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) found[i] = raw.charCodeAt(i);
  return found;
}

/** Facts or rectangles. */
export async function json(path, asked = {}) {
  const { facts, segments, other } = held.about;
  if (path.endsWith("/segments")) return segments;
  if (path.endsWith("/reports")) return { reports: other?.report ? [other.report] : [] };
  if (path.endsWith("/diff")) return other.diff;
  if (asked.incarnation && Number(asked.incarnation) !== facts.incarnation) {
    throw new Trouble("This file holds one incarnation.");
  }
  return facts;
}

/** The bytes of a tile; those of rows, none if the file does not have them. */
export async function bytes(path, asked) {
  const { facts, tiles, columns, ranges, width, other } = held.about;
  const layers = facts.layer_ids.length;
  const size = layers * columns;
  const [ids, marks] = [layers * facts.top_k * width, layers]; // bytes of a row
  const count = sum(ranges.map(([first, last]) => last - first));
  const side = sum(tiles) * size + count * (ids + marks); // bytes of a side
  const at = other && asked.against ? side : 0;
  if (path.endsWith("/rows")) return rows(asked, at + sum(tiles) * size, ids, marks);
  const before = at + (sum(tiles.slice(0, asked.z)) + asked.x) * size;
  return held.body.subarray(before, before + size);
}

const sum = (numbers) => numbers.reduce((all, n) => all + n, 0);

function rows({ start, stop }, at, ids, marks) {
  const { ranges } = held.about;
  for (const [first, last] of ranges) {
    const count = last - first;
    if (first <= start && stop <= last) {
      const found = new Uint8Array((stop - start) * (ids + marks));
      const part = (from, size) =>
        held.body.subarray(from + (start - first) * size, from + (stop - first) * size);
      found.set(part(at, ids));
      found.set(part(at + count * ids, marks), (stop - start) * ids);
      return found;
    }
    at += count * (ids + marks);
  }
  return new Uint8Array();
}

/** A question that has one answer. */
export const repeated = (path, asked) => () => json(path, asked);

/** Do work once: nothing changes. */
export function poll(seconds, work) {
  const over = new AbortController();
  work(over.signal).catch((error) => {
    if (!(error instanceof Trouble)) throw error;
  });
  return () => over.abort();
}
