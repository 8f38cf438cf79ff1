// Marks in text: swatches, reasons, states. Each is built once; `set` gives it another value.

import { rampStops, reasonColour } from "./colours.js";
import { harmless, reason } from "./reasons.js";
import { attr, h, put, s, style } from "./ui.js";

/** A swatch of a colour; `set` gives it another one. */
export function swatch(className = "") {
  const element = h("i", { class: `swatch ${className}`.trim(), "aria-hidden": "true" });
  return { element, set: (colour) => style(element, "--swatch", colour) };
}

/** The bar of a ramp of shares. */
export function rampBar(name) {
  const element = h("span", { class: "ramp", "aria-hidden": "true" });
  return {
    element,
    set() {
      style(element, "background-image", `linear-gradient(90deg, ${rampStops(name).join(", ")})`);
    },
  };
}

/** A figure with its name and a remark. */
export function figure(name) {
  const value = h("dd", { class: "value" });
  const remark = h("dd", { class: "small muted" });
  return {
    element: h("div", null, h("dt", null, name), value, remark),
    set(text, more, tone = "") {
      put(value, text);
      attr(value, "class", `value ${tone}`.trim());
      put(remark, more);
      remark.hidden = !more;
    },
  };
}

/** A reason by swatch and name; `set` gives it another one. */
export function reasonMark() {
  const mark = swatch();
  const name = h("span");
  const element = h("span", { class: "state" }, mark.element, name);
  return {
    element,
    set(which) {
      mark.set(reasonColour(which));
      mark.element.classList.toggle("hatched", harmless(which));
      put(name, reason(which).title);
    },
  };
}

/** Shapes of states, for a `shapeBox`. */
export const SHAPES = {
  complete: () => s("circle", { cx: 5, cy: 5, r: 4, fill: "currentColor" }),
  running: () => s("circle", { cx: 5, cy: 5, r: 3.25, fill: "none", stroke: "currentColor",
    "stroke-width": 1.75 }),
  incomplete: () => s("path", { d: "M5 .2 9.800 5 5 9.800 .2 5Z", fill: "currentColor" }),
  late: () => s("path", { d: "M5 .8 9.800 9.200H.2Z", fill: "currentColor" }),
  gone: () => s("path", { d: "M1.500 1.500 8.500 8.500M8.500 1.500 1.500 8.500", fill: "none",
    stroke: "currentColor", "stroke-width": 1.75 }),
};

SHAPES.live = SHAPES.complete;
SHAPES.dropping = SHAPES.incomplete;
SHAPES.closed = SHAPES.running;

export const shapeBox = () =>
  s("svg", { viewBox: "0 0 10 10", width: 10, height: 10, "aria-hidden": "true" });

/** The state of a trace or an engine by shape, colour and word; `set` gives it another one. */
export function stateMark() {
  const shape = shapeBox();
  const word = h("span");
  const element = h("span", { class: "state" }, shape, word);
  return {
    element,
    set(state) {
      if (word.textContent === state) return;
      word.textContent = state;
      attr(element, "data-state", state);
      shape.replaceChildren(...(SHAPES[state] ? [SHAPES[state]()] : []));
    },
  };
}
