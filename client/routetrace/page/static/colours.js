// Colours that a canvas needs: of reasons, ramps, and the style sheet's own.
//
// Those of reasons differ by 8 or more (OKLab x 100) from each other and from present cells, for
// normal and for red-, green- and blue-blind eyes. Ramps are monotone in lightness.

import { h, style } from "./ui.js";

const MISSING = {
  corrupt: ["#101418", "#ffffff"],
  queue_full: ["#d5560f", "#f0743a"],
  agent_lost: ["#8f0f72", "#c24f9c"],
  agent_closed: ["#4b2a1a", "#894506"],
  rejected: ["#3fa0dc", "#7fd0f5"],
  invalid_ids: ["#4c5400", "#b3c430"],
  not_captured: ["#e8a21f", "#ffd27a"],
  kv_unknown: ["#1d4fc4", "#3f86ee"],
  ambiguous: ["#12807a", "#35b8ae"],
  aborted: ["#7c8591", "#8a94a1"],
  other_version: ["#7c8591", "#8a94a1"],
  not_yet: ["#9aa2ad", "#66707d"],
};
const PRESENT = ["#dbe1e9", "#2f3c4e"];
const CACHED = ["#ebeff3", "#222c39"];
const SOURCES = [
  ["#8fb3dc", "#4f78a8"], ["#c0abdf", "#8a6fb0"], ["#dcc593", "#a88a4f"], ["#93cfc3", "#4d9a8c"],
  ["#c7ced6", "#5b6b7d"], ["#e0a9b8", "#9d5f72"],
];
const RAMPS = {
  changed: [
    "#f3f4f6 #d3e3f3 #9dc3e6 #5b94cf #2a62a8 #123063",
    "#161c24 #17304d #1f5487 #3d84c6 #80b7ea #dceeff",
  ],
  differing: [
    "#eceff3 #f3d9c4 #e5a981 #cc6d42 #96371d #4f140c",
    "#1d242e #46281d #853c20 #c2603a #eb9d73 #ffe2d2",
  ],
  diverging: [
    "#153d72 #3f7fc0 #a9cae8 #eceff3 #f2bf94 #df7a21 #8a3b05",
    "#b5d9fb #4d97dc #214a75 #1d242e #6b3d17 #db7a2a #ffd9b0",
  ],
  weights: [
    "#440154 #472d7b #3b528b #2c728e #21918c #28ae80 #5ec962 #addc30 #fde725",
    "#440154 #472d7b #3b528b #2c728e #21918c #28ae80 #5ec962 #addc30 #fde725",
  ],
};
const TOKENS = {
  back: "--card", ink: "--ink", muted: "--muted", line: "--line", edge: "--strong-line",
  accent: "--accent", bad: "--bad", sunken: "--sunken",
};

const system = matchMedia("(prefers-color-scheme: dark)");

/** Whether the page is dark now. */
export function dark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : system.matches;
}

/** Call after each change of theme; returns the end of it. */
export function onTheme(listener) {
  themes.add(listener);
  return () => themes.delete(listener);
}
const themes = new Set();
const changed = () => themes.forEach((listener) => listener());
system.addEventListener("change", changed);
matchMedia("(forced-colors: active)").addEventListener("change", changed);

const KEPT = "routetrace.theme";

/** Take the theme that was chosen here before, if any. */
export function restoreTheme() {
  try {
    const kept = localStorage.getItem(KEPT);
    if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
  } catch {
    // A browser without storage follows the system.
  }
}

/** Switch between light and dark; the system's own choice is followed again once it is the same. */
export function switchTheme() {
  const next = dark() ? "light" : "dark";
  const own = system.matches === (next === "dark");
  if (own) delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    if (own) localStorage.removeItem(KEPT);
    else localStorage.setItem(KEPT, next);
  } catch {
    // Not kept.
  }
  changed();
  return next;
}

const now = (pair) => pair[dark() ? 1 : 0];
export const reasonColour = (name) => now(MISSING[name] ?? ["#6b7280", "#9ca3af"]);
export const presentColour = (cached) => now(cached ? CACHED : PRESENT);
/** Colour of an agent by its index; one below 0 is not known. */
export const sourceColour = (index) =>
  (index < 0 ? reasonColour("") : now(SOURCES[index % SOURCES.length]));

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;

const ramps = new Map();

/** 256 colours [r, g, b] of a ramp in the theme of now. */
function ramp(name) {
  const text = now(RAMPS[name]);
  if (!ramps.has(text)) {
    const stops = text.split(" ").map(rgb);
    ramps.set(text, Array.from({ length: 256 }, (_, i) => {
      const at = (i / 255) * (stops.length - 1);
      const k = Math.min(stops.length - 2, Math.floor(at));
      return stops[k].map((v, c) => Math.round(v + (stops[k + 1][c] - v) * (at - k)));
    }));
  }
  return ramps.get(text);
}

/** Colour of the weights at `rank` of `count`, the oldest darkest. */
export function weightColour(rank, count) {
  if (rank < 0) return presentColour(false);
  return css(ramp("weights")[Math.round(20 + (215 * rank) / Math.max(1, count - 1))]);
}

/** What a canvas draws with, as the style sheet and the theme are now. */
export function palette(element) {
  const computed = getComputedStyle(element);
  const probe = h("i", { class: "unseen", "aria-hidden": "true" });
  element.append(probe);
  const tokens = Object.fromEntries(Object.entries(TOKENS).map(([name, variable]) => {
    style(probe, "color", `var(${variable})`);
    return [name, getComputedStyle(probe).color];
  }));
  probe.remove();
  return {
    ...tokens,
    sans: computed.getPropertyValue("--sans"),
    mono: computed.getPropertyValue("--mono"),
    differing: lookup("differing"),
    diverging: lookup("diverging"),
    // Of values in tiles; 3 % of what differs has to be seen.
    values: { changed: lookup("changed"), differing: lookup("differing", Math.sqrt) },
  };
}

const STOPS = [0, 42, 85, 127, 170, 212, 255];

/** Colours of a ramp of shares at a few places, as CSS. */
export const rampStops = (name) => STOPS.map((i) => css(ramp(name)[i]));

/** ABGR words for the bytes of a tile: 0..254 a share, 255 no cell, which stays clear. */
function lookup(name, scale = (share) => share) {
  const colours = ramp(name);
  const words = new Uint32Array(256);
  for (let i = 0; i < 255; i += 1) {
    const [r, g, b] = colours[Math.round(255 * scale(i / 254))];
    words[i] = ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
  }
  return words;
}

/** Whether text on a colour, of CSS or an ABGR word, should be dark. */
export function wantsDarkInk(colour) {
  const [r, g, b] = typeof colour === "number"
    ? [colour & 255, (colour >> 8) & 255, (colour >> 16) & 255]
    : colour.startsWith("#") ? rgb(colour) : colour.match(/[\d.]+/g).map(Number);
  const light = [r, g, b].map((v) => (v <= 10 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  // Above it, contrast with the dark ink is larger than with the light one.
  return 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2] > 0.189;
}
