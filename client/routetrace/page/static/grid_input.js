// Pointer, wheel and keys of a grid.

import { LEFT } from "./axes.js";

const DRAG = 4; // px before a press becomes a drag

/** Steer a grid; returns the end of it. */
export function steer(grid) {
  const { canvas, strip, viewport: v } = grid;
  const over = new AbortController();
  const on = (element, name, work, options = {}) =>
    element.addEventListener(name, work, { signal: over.signal, ...options });
  let press = null;

  on(canvas, "pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    press = { x: event.clientX, y: event.clientY, moved: false };
  });
  on(canvas, "pointermove", (event) => {
    if (press) {
      const [dx, dy] = [press.x - event.clientX, press.y - event.clientY];
      if (!press.moved && Math.hypot(dx, dy) < DRAG) return;
      Object.assign(press, { x: event.clientX, y: event.clientY, moved: true });
      canvas.classList.add("dragged");
      if (grid.over) grid.point(null, null);
      v.pan(dx, dy);
    } else if (event.pointerType !== "touch") {
      grid.point(grid.cellAt(event.offsetX, event.offsetY), event);
    }
  });
  on(canvas, "pointerup", (event) => {
    const cell = press && !press.moved && grid.cellAt(event.offsetX, event.offsetY);
    release();
    if (!cell) return;
    grid.choose(cell.position, cell.column);
    grid.onMove();
    grid.onPick();
  });
  on(canvas, "pointercancel", release);
  on(canvas, "pointerleave", () => !press && grid.point(null, null));
  function release() {
    press = null;
    canvas.classList.remove("dragged");
  }

  on(canvas, "wheel", (event) => {
    const zooms = event.ctrlKey || event.metaKey;
    const across = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (!zooms && (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))) {
      v.pan(across, 0);
    } else if (zooms || document.activeElement === canvas) {
      // Lines and pages of other mice are about so many px.
      const unit = [1, 16, 400][event.deltaMode];
      v.zoom(Math.exp(-event.deltaY * unit * 0.0022), event.offsetX - LEFT,
        event.offsetY - grid.upper);
    } else {
      return; // the page scrolls until the grid is entered
    }
    event.preventDefault();
  }, { passive: false });
  on(canvas, "dblclick", (event) => {
    v.zoom(4, event.offsetX - LEFT, event.offsetY - grid.upper);
  });

  on(canvas, "keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !grid.source) return;
    if (event.key === "Escape") canvas.blur();
    if (event.key === "Enter" && v.cursor) grid.onPick();
    const cell = moved(grid, event.key, event.shiftKey);
    if (!cell) return;
    event.preventDefault();
    event.stopPropagation();
    grid.choose(cell.position, cell.column);
    grid.onMove();
  });

  on(strip, "pointerdown", (down) => {
    strip.setPointerCapture(down.pointerId);
    const drag = new AbortController();
    const signal = AbortSignal.any([drag.signal, over.signal]);
    const to = (event) => {
      v.start = (event.offsetX - LEFT) / v.fitScale - v.width / v.scale / 2;
      v.moved();
    };
    to(down);
    strip.addEventListener("pointermove", to, { signal });
    for (const end of ["pointerup", "pointercancel"]) {
      strip.addEventListener(end, () => drag.abort(), { signal });
    }
  });
  return () => over.abort();
}

/** The cell that an arrow key leads to; Home and End are the ends of the trace. */
function moved(grid, key, far) {
  const { viewport: v, source } = grid;
  const last = { position: source.numRows - 1, column: source.layerIds.length - 1 };
  if (last.position < 0) return null;
  // Whole tokens where they are large; a few pixels where they are smaller.
  const along = v.scale >= 6 ? (far ? 10 : 1) : Math.round((far ? 60 : 6) / v.scale);
  const down = far ? 8 : 1;
  const steps = {
    ArrowLeft: [-along, 0], ArrowRight: [along, 0], ArrowUp: [0, -down], ArrowDown: [0, down],
    Home: [-Infinity, 0], End: [Infinity, 0],
  };
  if (!steps[key]) return null;
  const centre = {
    position: Math.floor((v.start + v.stop) / 2), column: Math.floor(source.layerIds.length / 2),
  };
  const at = v.cursor ?? centre;
  const clamp = (value, most) => Math.max(0, Math.min(most, value));
  return {
    position: clamp(at.position + steps[key][0], last.position),
    column: clamp(at.column + steps[key][1], last.column),
  };
}
