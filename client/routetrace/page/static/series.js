// Lines over time on a canvas, with a cursor that reads values, and lines the size of a word.

import { drawing, within } from "./drawing.js";
import { fmt } from "./text.js";
import { attr, h, put, s, say } from "./ui.js";

const [LEFT, RIGHT, UPPER, LOWER] = [52, 12, 10, 24];
const LEAST = 3; // px of a step in which rows were dropped, however few they are
const FAR = 15; // steps of Shift and an arrow

/**
 * Rows stored, as a line, and rows dropped, as bars from below; both per second.
 *
 * `set({ at, stored, dropped })` draws them: times in Unix seconds and numbers of the same length.
 * The words below the picture are those of the place of the cursor, or of the whole.
 */
export function throughput() {
  const plate = drawing({ class: "series", "aria-describedby": "throughput-words" }, draw);
  const { canvas } = plate;
  const words = h("figcaption", { id: "throughput-words", class: "small muted" });
  const element = h("figure", null, canvas, words);
  let data = null;
  let chosen = null; // step of the cursor

  function draw() {
    if (!data || canvas.clientWidth === 0) return;
    const { clientWidth: width, clientHeight: height } = canvas;
    paint(plate.context(width, height), {
      ...data, width, height, colours: plate.colours, chosen,
    });
    put(words, chosen === null ? summary(data) : reading(data, chosen));
    attr(canvas, "aria-label",
      `Rows stored and dropped in the last 10 minutes. ${summary(data)}`);
  }

  function choose(step) {
    if (step !== null) step = within(data.at.length - 1, step);
    if (step === chosen) return;
    chosen = step;
    draw();
  }

  canvas.addEventListener("pointermove", (event) => {
    if (!data) return;
    const share = (event.offsetX - LEFT) / (canvas.clientWidth - LEFT - RIGHT);
    choose(Math.round(share * (data.at.length - 1)));
  });
  canvas.addEventListener("pointerleave", () => choose(null));
  canvas.addEventListener("blur", () => choose(null));
  plate.onKey((key, shift) => {
    if (!data) return false;
    const end = data.at.length - 1;
    const by = shift ? FAR : 1;
    const next = {
      ArrowLeft: (chosen ?? end + 1) - by, ArrowRight: (chosen ?? -1) + by, Home: 0, End: end,
      Escape: null,
    }[key];
    if (next === undefined) return false;
    choose(next);
    say(words.textContent);
    return true;
  });
  return {
    element,
    set(next) {
      // The cursor stays at its time while the minutes move on.
      if (chosen !== null && data) {
        const moved = next.at.indexOf(data.at[chosen]);
        chosen = moved < 0 ? 0 : moved;
      }
      data = next;
      draw();
    },
    stop: plate.stop,
  };
}

const sum = (values) => values.reduce((all, one) => all + one, 0);

function reading({ at, stored, dropped }, i) {
  const lost = dropped[i] > 0 ? `${fmt.si(dropped[i])} rows/s dropped` : "none dropped";
  return `${fmt.time(at[i])}: ${fmt.si(stored[i])} rows/s stored, ${lost}`;
}

function summary({ at, stored, dropped }) {
  const most = Math.max(...stored);
  if (most === 0 && sum(dropped) === 0) return "No rows in these 10 minutes.";
  const step = at[1] - at[0];
  const lost = Math.round(sum(dropped) * step);
  const first = dropped.findIndex((one) => one > 0);
  return `At most ${fmt.si(most)} rows/s, at ${fmt.time(at[stored.indexOf(most)])}. ${
    lost > 0 ? `${fmt.plural(lost, "row")} dropped, the first at ${fmt.time(at[first])}.`
      : "None dropped."}`;
}

/** The step between round figures of an axis, and the end of the axis. */
function round(most) {
  if (most <= 4) return [1, 4];
  const power = 10 ** Math.floor(Math.log10(most / 4));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => most / one <= 4);
  return [step, Math.ceil(most / step) * step];
}

function paint(c, { at, stored, dropped, width, height, colours, chosen }) {
  const [step, most] = round(Math.max(...stored, ...dropped));
  const last = at.length - 1;
  const x = (i) => LEFT + (i / last) * (width - LEFT - RIGHT);
  const y = (v) => UPPER + (1 - v / most) * (height - UPPER - LOWER);
  const ground = y(0);
  c.font = `11px ${colours.sans}`;
  c.textBaseline = "middle";
  c.textAlign = "right";
  for (let v = 0; v <= most * 1.001; v += step) {
    c.fillStyle = colours.line;
    c.fillRect(LEFT, Math.round(y(v)), width - LEFT - RIGHT, 1);
    c.fillStyle = colours.muted;
    const text = fmt.si(v).replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
    c.fillText(text, LEFT - 8, y(v));
  }
  paintTimes(c, at, x, width, height);
  const line = new Path2D();
  stored.forEach((v, i) => line.lineTo(x(i), y(v)));
  const under = new Path2D(line);
  under.lineTo(x(last), ground);
  under.lineTo(x(0), ground);
  c.fillStyle = colours.accent;
  c.globalAlpha = 0.1;
  c.fill(under);
  c.globalAlpha = 1;
  c.strokeStyle = colours.accent;
  c.lineWidth = 1.5;
  c.lineJoin = "round";
  c.stroke(line);
  c.fillStyle = colours.bad;
  const wide = Math.max(1.5, x(1) - x(0));
  dropped.forEach((v, i) => {
    if (v === 0) return;
    const high = Math.max(LEAST, ground - y(v));
    c.fillRect(x(i) - wide / 2, ground - high, wide, high);
  });
  if (chosen === null) return;
  c.fillStyle = colours.ink;
  c.fillRect(Math.round(x(chosen)), UPPER, 1, ground - UPPER);
  c.beginPath();
  c.arc(x(chosen), y(stored[chosen]), 3.5, 0, 2 * Math.PI);
  c.fillStyle = colours.accent;
  c.fill();
  c.strokeStyle = colours.back;
  c.stroke();
}

/** Whole minutes along, as many as fit. */
function paintTimes(c, at, x, width, height) {
  const minutes = [1, 2, 5].find((one) => (10 / one) * 56 <= width - LEFT - RIGHT) ?? 5;
  at.forEach((time, i) => {
    const then = Math.round(time);
    const step = i > 0 ? Math.round(at[i - 1]) : then;
    const whole = 60 * minutes;
    if (Math.floor(then / whole) === Math.floor(step / whole)) return;
    const text = fmt.time(Math.floor(then / whole) * whole).slice(0, -3);
    const half = c.measureText(text).width / 2;
    c.textAlign = "center";
    c.fillText(text, Math.min(width - half, x(i)), height - 8);
  });
}

/** A line the size of a word; `set(values)` draws two or more. */
export function spark(wide = 84, high = 20) {
  const area = s("path", { class: "spark-area" });
  const line = s("path", { class: "spark-line", fill: "none" });
  const element = s("svg", { class: "spark", width: wide, height: high,
    viewBox: `0 0 ${wide} ${high}`, "aria-hidden": "true" }, area, line);
  return {
    element,
    set(values) {
      const most = Math.max(...values) || 1;
      const points = values.map((v, i) =>
        `${((i / (values.length - 1)) * wide).toFixed(1)} ${
          (high - 1 - (v / most) * (high - 3)).toFixed(1)}`).join("L");
      attr(line, "d", `M${points}`);
      attr(area, "d", `M0 ${high}L${points}L${wide} ${high}Z`);
    },
  };
}
