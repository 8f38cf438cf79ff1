// A canvas that is redrawn when its size or the theme changes.

import { onTheme, palette } from "./colours.js";
import { h, tip } from "./ui.js";

/** A canvas that draw() draws; forget() drops what it keeps for a size and a theme. */
export function drawing(attributes, draw, forget = () => {}) {
  const canvas = h("canvas", { tabindex: 0, role: "img", ...attributes });
  let colours = null;
  const again = () => {
    forget();
    draw();
  };
  const watcher = new ResizeObserver(again);
  watcher.observe(canvas);
  const unwatch = onTheme(() => {
    colours = null;
    again();
  });
  canvas.addEventListener("pointerleave", () => tip.hide());
  return {
    canvas,
    get colours() {
      return (colours ??= palette(canvas));
    },
    /** Return a cleared 2D context of width × height px. */
    context(width, height) {
      const scale = devicePixelRatio;
      const size = [width, height].map((n) => Math.round(n * scale));
      if (canvas.width !== size[0]) canvas.width = size[0];
      if (canvas.height !== size[1]) canvas.height = size[1];
      const c = canvas.getContext("2d");
      c.setTransform(scale, 0, 0, scale, 0, 0);
      c.clearRect(0, 0, width, height);
      return c;
    },
    /** Call press(key, shift) for each key; it returns whether it handled the key. */
    onKey(press) {
      canvas.addEventListener("keydown", (event) => {
        if (event.ctrlKey || event.metaKey || event.altKey) return;
        if (press(event.key, event.shiftKey)) event.preventDefault();
      });
    },
    stop() {
      watcher.disconnect();
      unwatch();
      tip.hide();
    },
  };
}

/** A number within [0, most]. */
export const within = (most, n) => Math.max(0, Math.min(most, n));
