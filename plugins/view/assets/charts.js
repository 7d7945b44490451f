// Curves by step, with one cursor for all of them.

/* global uPlot */
import { h } from "./dom.js";
import { palette } from "./tone.js";

const LINES = [
  { light: "#0072B2", dark: "#56B4E9", dash: [] },
  { light: "#D55E00", dark: "#E69F00", dash: [7, 3] },
  { light: "#007A5A", dark: "#2CC295", dash: [2, 3] },
  { light: "#A8588A", dark: "#CC79A7", dash: [10, 3, 2, 3] },
  { light: "#6B6B6B", dark: "#B0B0B0", dash: [4, 2] },
  { light: "#8C6D00", dark: "#F0E442", dash: [1, 2] },
];
const HEIGHT = 168;
const watched = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    const drawn = target.drawn;
    if (drawn && contentRect.width > 0) drawn.setSize({ width: Math.floor(contentRect.width), height: HEIGHT });
  }
});

const shown = new Set();

/** Give up all charts: they listen to the window and to each other until they are told not to. */
export function dispose() {
  watched.disconnect();
  for (const drawn of shown) drawn.destroy();
  shown.clear();
}

/** The values of several series at the union of their steps. */
function aligned(series) {
  const steps = [...new Set(series.flatMap((each) => each.x))].sort((a, b) => a - b);
  const rows = series.map((each) => {
    const known = new Map(each.x.map((x, i) => [x, each.y[i]]));
    return steps.map((x) => known.get(x) ?? null);
  });
  return [steps, ...rows];
}

/** Fixed ends where they are given; otherwise 0 is always in view, and a little room beyond the numbers. */
function limits(range, least, most) {
  const [low, high] = range ?? [0, null];
  return [Math.min(low, 1.08 * least), Math.max(high ?? (most > 0 || least >= 0 ? 1.08 * most || 1 : 0), most)];
}

/** A line at zero, where values lie on both sides of it. */
function zero(colour) {
  return (u) => {
    if (u.scales.y.min >= 0) return;
    const { left, width } = u.bbox;
    const y = Math.round(u.valToPos(0, "y", true));
    u.ctx.fillStyle = colour;
    u.ctx.fillRect(left, y, width, Math.round(devicePixelRatio));
  };
}

function tidy(value) {
  return value === null || value === undefined
    ? "–"
    : Math.abs(value) >= 1000
      ? value.toFixed(0)
      : String(Number(value.toPrecision(3)));
}

/** A line across a chart at a step. */
function marked(step, colour) {
  return (u) => {
    const { left, top, width, height } = u.bbox;
    const x = Math.round(u.valToPos(step, "x", true)); // on whole pixels: a sharp line
    if (x < left || x > left + width) return;
    u.ctx.save();
    u.ctx.strokeStyle = colour;
    u.ctx.lineWidth = 2 * Math.round(devicePixelRatio);
    u.ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    u.ctx.beginPath();
    u.ctx.moveTo(x, top);
    u.ctx.lineTo(x, top + height);
    u.ctx.stroke();
    u.ctx.restore();
  };
}

/** A chart in a card. `picked` is called with the step of a click; `mark` is a step with a line across. */
export function chart({ title, unit, series, range }, dark, picked = null, mark = null) {
  const plot = h("div.plot");
  const card = h(
    "section.card.chart",
    { "aria-label": `${title} by step` },
    h("h3", title, unit ? h("small", unit) : null),
    plot,
  );
  const colour = palette();
  const axis = {
    stroke: colour.soft,
    font: "11px system-ui, sans-serif",
    grid: { stroke: colour.line, width: 1 },
    ticks: { show: false },
    gap: 4,
  };
  const last = (u, value, s, i) => {
    const values = u.data[s];
    return tidy(i === null ? values.findLast((each) => each !== null) : value);
  };
  const options = {
    width: 320,
    height: HEIGHT,
    cursor: { sync: { key: "step" }, points: { size: 6 }, y: false },
    legend: { live: true },
    hooks: { drawClear: [zero(colour.soft), ...(mark === null ? [] : [marked(mark, colour.warn)])] },
    scales: { x: { time: false }, y: { range: (u, low, high) => limits(range, low, high) } },
    axes: [
      { ...axis, size: 26, grid: { show: false }, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000] },
      { ...axis, size: 44, space: 28, values: (u, ticks) => ticks.map(tidy) },
    ],
    series: [
      { label: "step", value: (u, value, s, i) => (i === null ? "last" : tidy(value)) },
      ...series.map((each, i) => {
        const line = LINES[i % LINES.length];
        return {
          label: each.label,
          stroke: dark ? line.dark : line.light,
          dash: line.dash,
          width: 1.75,
          spanGaps: true,
          points: { show: each.x.length < 25, size: 4 },
          value: last,
        };
      }),
    ],
  };
  const drawn = new uPlot(options, aligned(series), plot);
  plot.drawn = drawn;
  shown.add(drawn);
  watched.observe(plot);
  if (picked) {
    drawn.over.classList.add("picks");
    drawn.over.addEventListener("click", () => drawn.cursor.idx !== null && picked(drawn.data[0][drawn.cursor.idx]));
  }
  return card;
}
