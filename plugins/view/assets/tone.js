// How credit looks: blue and pointing up, vermilion and pointing down, never by colour alone. Seven steps about 0, on one
// scale for all episodes of a run.

import { h, number } from "./dom.js";

const GLYPHS = { none: "◌", 0: "○", 1: "▲", 2: "▲", 3: "▲", "-1": "▼", "-2": "▼", "-3": "▼" };

/** -3 to 3, or "none". `full` is the credit from which on the colour is full. */
export function level(value, full) {
  if (value === null || value === undefined) return "none";
  const share = Math.max(-1, Math.min(1, value / full));
  const step = Math.ceil(Math.abs(share) * 3 - 0.1);
  return String(share < 0 ? -step || 0 : step);
}

export function glyph(value, full) {
  return GLYPHS[level(value, full)];
}

/** Class name of the tint. */
export function tone(value, full) {
  const step = level(value, full);
  return step === "none" ? "tone none" : `tone ${step < 0 ? "minus" : step > 0 ? "plus" : "zero"}${Math.abs(step)}`;
}

export function badge(value, full) {
  return h(
    "span",
    { class: `badge ${tone(value, full)}` },
    h("span", { "aria-hidden": "true" }, glyph(value, full)),
    ` ${number(value, true)}`,
  );
}

/** The credit of an episode's turns as bars, up for more and down for less, a ring for none. */
export function bars(run, part, e, width = 220, height = 26) {
  const canvas = h("canvas.bars", { role: "img", "aria-label": "credit by turn" });
  const ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  const colour = palette();
  pen.scale(ratio, ratio);
  const [start, end] = [run.first[e], run.first[e + 1]];
  const step = Math.min(9, width / Math.max(1, end - start));
  const middle = height / 2;
  for (let t = start; t < end; t++) {
    const value = run.credit(part, t);
    const x = (t - start) * step;
    const wide = Math.max(1, step - (step > 3 ? 1.5 : 0.3));
    if (value === null) {
      pen.fillStyle = colour.faint;
      pen.fillRect(x, middle - 0.5, wide, 1);
      continue;
    }
    const share = Math.max(-1, Math.min(1, value / run.full));
    const tall = Math.max(1.5, Math.abs(share) * (middle - 1));
    pen.fillStyle = share > 0.03 ? colour.plus : share < -0.03 ? colour.minus : colour.zero;
    pen.fillRect(x, share > 0 ? middle - tall : middle, wide, tall);
  }
  return canvas;
}

/** The theme's colours, for what is drawn and not styled. */
export function palette() {
  const style = getComputedStyle(document.documentElement);
  const names = ["plus", "minus", "zero", "faint", "line", "ink", "soft", "surface", "warn"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}
