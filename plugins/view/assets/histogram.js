// How credit is distributed over the turns of the episodes shown; drawing over a range filters by it.

import { count, h, number } from "./dom.js";
import { level } from "./tone.js";

const BINS = 61;
const HEIGHT = 44;

/** `range` is "low,high" as in the link; `picked` gets a new one, or "". */
export function histogram(run, part, rows, range, picked) {
  const [low, high] = [-1.25 * run.full, 1.25 * run.full];
  const bins = new Array(BINS).fill(0);
  const { values, scale } = run.columns[part];
  let turns = 0;
  for (const e of rows) {
    for (let t = run.first[e]; t < run.first[e + 1]; t++) {
      if (values[t] === -32768 || run.shared(t)) continue;
      const place = Math.floor(((values[t] * scale - low) / (high - low)) * BINS);
      bins[Math.max(0, Math.min(BINS - 1, place))]++;
      turns++;
    }
  }
  if (!turns) return h("p.hint", "No turn of these has credit.");
  const most = Math.max(...bins);
  const middle = (i) => low + ((i + 0.5) / BINS) * (high - low);
  const tall = (n) => (n ? Math.max(1.5, HEIGHT * Math.sqrt(n / most)) : 0);
  const drawn = bins.map((n, i) =>
    h("rect", {
      class: `fill${level(middle(i), run.full)}`,
      x: i + 0.1,
      y: HEIGHT - tall(n),
      width: 0.8,
      height: tall(n),
    }),
  );
  const mask = h("rect.range", { x: 0, y: 0, width: 0, height: HEIGHT });
  const svg = h(
    "svg",
    { viewBox: `0 0 ${BINS} ${HEIGHT}`, role: "img", "aria-label": `credit of ${count(turns)} turns` },
    drawn,
    mask,
  );
  svg.setAttribute("preserveAspectRatio", "none");
  const show = (a, b) => {
    mask.setAttribute("x", Math.min(a, b));
    mask.setAttribute("width", Math.abs(b - a));
  };
  if (range) {
    const [from, to] = range.split(",").map(Number);
    show(((from - low) / (high - low)) * BINS, ((to - low) / (high - low)) * BINS);
  }
  let start = null;
  const place = (event) => {
    const box = svg.getBoundingClientRect();
    return Math.max(0, Math.min(BINS, ((event.clientX - box.left) / box.width) * BINS));
  };
  svg.addEventListener("pointerdown", (event) => {
    start = place(event);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => start !== null && show(start, place(event)));
  svg.addEventListener("pointerup", (event) => {
    const end = place(event);
    const [from, to] = [Math.min(start, end), Math.max(start, end)];
    start = null;
    const value = (x) => Number((low + (x / BINS) * (high - low)).toPrecision(3));
    // The outer bins hold all that lies beyond.
    picked(to - from < 1 ? "" : `${from < 1 ? -1e9 : value(from)},${to > BINS - 1 ? 1e9 : value(to)}`);
  });
  return h(
    "figure.histogram",
    svg,
    h(
      "figcaption",
      h("span", number(low, true)),
      h("span", `credit of ${count(turns)} turns, drag to filter`),
      h("span", number(high, true)),
    ),
  );
}
