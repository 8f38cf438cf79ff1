// Numbers, times and foreign text as people read them. Nothing here touches the document.

const integer = new Intl.NumberFormat("en");
const calendar = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });
const clock = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const NBSP = "\u00a0";

export const fmt = {
  int: (n) => integer.format(n),

  /** Three digits and a prefix: 407 k. */
  si(n) {
    const size = Math.abs(n) < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(Math.abs(n)) / 3));
    const short = n / 1000 ** size;
    const digits = size === 0 ? (Number.isInteger(n) || n >= 100 ? 0 : 1)
      : Math.max(0, 2 - Math.floor(Math.log10(Math.abs(short))));
    return short.toFixed(digits) + (size ? NBSP + " kMGT"[size] : "");
  },

  /** How long ago a time in Unix seconds was; clocks that differ make nothing of the future. */
  ago(at) {
    const seconds = Date.now() / 1000 - at;
    if (seconds < 2) return "now";
    for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
      if (seconds >= 2 * size) return `${Math.floor(seconds / size)}${NBSP}${unit} ago`;
    }
    return `${Math.floor(seconds)}${NBSP}s ago`;
  },

  bytes(n) {
    let unit = 0;
    while (n >= 1024 && unit < 4) {
      n /= 1024;
      unit += 1;
    }
    const digits = unit && n < 10 ? 1 : 0;
    return `${n.toFixed(digits)}${NBSP}${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
  },

  /** Never 100 % unless it is all, never 0 % unless it is nothing. */
  pct(share, digits = 1) {
    if (share === 0 || share === 1) return `${100 * share}${NBSP}%`;
    for (let d = digits; d < 5; d += 1) {
      const text = (100 * share).toFixed(d);
      if (+text < 100 && +text > 0) return `${text}${NBSP}%`;
    }
    return share > 0.5 ? `> 99.9999${NBSP}%` : `< 0.0001${NBSP}%`;
  },

  duration(seconds) {
    if (seconds < 1) return `${Math.round(seconds * 1000)}${NBSP}ms`;
    if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)}${NBSP}s`;
    if (seconds < 3600) {
      const whole = Math.round(seconds);
      return `${Math.floor(whole / 60)}${NBSP}min ${whole % 60}${NBSP}s`;
    }
    const [n, unit] = seconds < 86400 ? [seconds / 3600, "h"] : [seconds / 86400, "d"];
    return `${n.toFixed(n < 9.95 ? 1 : 0)}${NBSP}${unit}`;
  },

  /** A time of today; the date, too, on other days. */
  time(at) {
    const then = new Date(at * 1000);
    const today = then.toDateString() === new Date().toDateString();
    return (today ? clock : calendar).format(then);
  },

  plural: (n, one, many = `${one}s`) => `${integer.format(n)} ${n === 1 ? one : many}`,
};

// Controls, format characters (bidi among them), every space but the plain one, half surrogates.
const UNSEEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}]|(?! )\p{Zs}/gu;

function spelled(character) {
  const code = character.codePointAt(0).toString(16);
  return code.length > 4 ? `\\u{${code}}` : `\\u${code.padStart(4, "0")}`;
}

/** An id or a label as text: characters that cannot be seen, or turn a line around, spelled out. */
export const plain = (text) => String(text).replace(UNSEEN, spelled);
