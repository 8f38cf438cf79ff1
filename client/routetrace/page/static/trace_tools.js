// The row of controls above the grid of a trace.

import { attr, h, segmented } from "./ui.js";

/** Controls; `jump(by)`, `zoom(factor)`, `fit()`, `position(p)` and `colour(name)` do the work. */
export function traceTools({ colour, jump, zoom, fit, position }) {
  const colours = segmented("Colour by", colour);
  const field = h("input", {
    type: "text", inputmode: "numeric", placeholder: "Position", "aria-label": "Go to a position",
    class: "position", autocomplete: "off", onchange: go,
    onkeydown: (event) => event.key === "Enter" && go(),
  });
  function go() {
    const digits = field.value.replace(/\D/g, "");
    field.value = "";
    if (digits) position(Number(digits));
  }
  const button = (label, name, work, className = null) =>
    h("button", { type: "button", "aria-label": name, title: name, class: className,
      onclick: work }, label);
  const before = button("← Hole", "Previous hole (p)", () => jump(-1));
  const next = button("Hole →", "Next hole (n)", () => jump(1));
  const out = button("−", "Zoom out (−)", () => zoom(0.5), "ghost");
  const into = button("+", "Zoom in (+)", () => zoom(2), "ghost");
  const whole = button("Fit", "Show the whole trace (0)", fit, "ghost");
  const bar = h("span", { class: "push bar" }, before, next, field, out, into, whole);
  return {
    bar,
    colours,
    setHoles(count) {
      for (const one of [before, next]) attr(one, "disabled", count === 0);
    },
    /** Say by the buttons which way is left. */
    drawn(viewport) {
      attr(out, "aria-disabled", viewport.isWhole ? "true" : null);
      attr(whole, "aria-disabled", viewport.isWhole ? "true" : null);
      attr(into, "aria-disabled", viewport.scale >= viewport.most ? "true" : null);
    },
    focusPosition: () => field.focus(),
  };
}
