// The picture of a state graph. Edges to a state that episodes reach later are laid out by dagre; those that lead back
// are arcs drawn over it, for they would tear the order of the states apart.

/* global dagre */
import { h, number, short } from "./dom.js";
import { glyph, level } from "./tone.js";

const NODE = { height: 44, line: 14, character: 6.7, least: 92, most: 190 };
const EDGE = { height: 34, character: 6, most: 150 };

function caption(edge, full) {
  const credit = edge.mean === null ? "" : `${glyph(edge.mean, full)} ${number(edge.mean, true)} · `;
  return [short(edge.action, 24), `${credit}${edge.n}×`];
}

/** SVG of what is visible, and the element of each node and edge; `picked` gets one. */
export function picture({ nodes, edges }, full, picked) {
  const drawn = new dagre.graphlib.Graph({ multigraph: true });
  drawn.setGraph({ rankdir: "TB", nodesep: 26, ranksep: 26, edgesep: 16, marginx: 16, marginy: 16 });
  drawn.setDefaultEdgeLabel(() => ({}));
  for (const node of nodes) {
    const lines = wrapped(node.label);
    const longest = Math.max(...lines.map((line) => line.length));
    const width = Math.max(NODE.least, Math.min(NODE.most, longest * NODE.character + 26));
    drawn.setNode(node.id, { width, height: NODE.height + (lines.length - 1) * NODE.line, lines });
  }
  const rank = new Map(nodes.map((node) => [node.id, node.rank]));
  const forward = (edge) => rank.get(edge.to) > rank.get(edge.from);
  edges.forEach((edge, n) => {
    if (!forward(edge)) return;
    const width = Math.min(EDGE.most, Math.max(...caption(edge, full).map((line) => line.length)) * EDGE.character + 8);
    drawn.setEdge(edge.from, edge.to, { width, height: EDGE.height, labelpos: "c", weight: edge.n }, String(n));
  });
  dagre.layout(drawn);
  const at = new Map(nodes.map((node) => [node.id, drawn.node(node.id)]));
  const lines = edges.map((edge, n) =>
    forward(edge)
      ? straight(edge, drawn.edge(edge.from, edge.to, String(n)), full, picked)
      : back(edge, at, full, picked),
  );
  const boxes = nodes.map((node) => box(node, at.get(node.id), full, picked));
  const { width, height } = drawn.graph();
  const room = edges.some((edge) => !forward(edge)) ? 90 : 0;
  const svg = h(
    "svg.graph",
    {
      viewBox: `0 0 ${width + room} ${height}`,
      width: width + room,
      height,
      role: "group",
      "aria-label": "states and actions",
    },
    markers(),
    lines,
    boxes,
  );
  const start = nodes.reduce((a, b) => (b.rank < a.rank ? b : a), nodes[0]);
  return {
    svg,
    middle: start ? at.get(start.id).x : 0,
    elements: new Map([...edges.map((edge, n) => [edge, lines[n]]), ...nodes.map((node, n) => [node, boxes[n]])]),
  };
}

/** Ends of edges: an arrow for more, a bar for less, a ring for neither. */
function markers() {
  const marker = (id, shape) =>
    h(
      "marker",
      {
        id,
        viewBox: "0 0 10 10",
        refX: 9,
        refY: 5,
        markerWidth: 11,
        markerHeight: 11,
        markerUnits: "userSpaceOnUse",
        orient: "auto",
      },
      shape,
    );
  const shapes = [];
  for (const step of [-3, -2, -1, 0, 1, 2, 3, "none"]) {
    const name = `fill${step}`;
    const shape =
      step > 0
        ? h("path", { class: name, d: "M0 0 L10 5 L0 10 z" })
        : step < 0
          ? h("path", { class: name, d: "M5 0 L9 0 L9 10 L5 10 z" })
          : h("circle", { class: `${name} ring`, cx: 5, cy: 5, r: 3.6 });
    shapes.push(marker(`end${step}`, shape));
  }
  return h("defs", shapes);
}

/** Attributes of a part of the picture that a click or Enter picks. */
function button(label, pick) {
  const onkeydown = (event) => event.key === "Enter" && (event.stopPropagation(), pick());
  return { tabindex: 0, role: "button", "aria-label": label, onclick: () => pick(), onkeydown };
}

function attributes(edge, full, picked) {
  const step = level(edge.mean, full);
  const said = `${edge.action}: ${edge.n} times, mean credit ${number(edge.mean, true)}, ${Math.round(100 * edge.solved)} % of its episodes solved`;
  return {
    step,
    group: { class: `edge ${edge.solved === 0 ? "never-solved" : ""}`, ...button(said, () => picked(edge)) },
    line: (d) => {
      const path = h("path", { class: `line${step}`, d, "marker-end": `url(#end${step})` });
      path.style.strokeWidth = `${Math.min(7, 1 + 1.1 * Math.sqrt(edge.n))}px`;
      return path;
    },
  };
}

function straight(edge, { points, x, y, width }, full, picked) {
  const look = attributes(edge, full, picked);
  const lines = caption(edge, full);
  return h(
    "g",
    look.group,
    look.line(curve(points)),
    h("rect.plate", { x: x - width / 2, y: y - 15, width, height: 30, rx: 4 }),
    h("text.what", { x, y: y - 2, "text-anchor": "middle" }, lines[0]),
    h("text", { class: `much ink${look.step}`, x, y: y + 11, "text-anchor": "middle" }, lines[1]),
  );
}

/** A smooth line through points: quadratic pieces between the middles. */
function curve(points) {
  const [first, ...rest] = points;
  const last = rest.pop();
  let d = `M${first.x} ${first.y}`;
  rest.forEach((point, i) => {
    const next = rest[i + 1] ?? last;
    const [x, y] = i + 1 < rest.length ? [(point.x + next.x) / 2, (point.y + next.y) / 2] : [next.x, next.y];
    d += ` Q${point.x} ${point.y} ${x} ${y}`;
  });
  return rest.length ? d : `${d} L${last.x} ${last.y}`;
}

function back(edge, at, full, picked) {
  const look = attributes(edge, full, picked);
  const [from, to] = [at.get(edge.from), at.get(edge.to)];
  const [x1, y1, x2, y2] = [from.x + from.width / 2, from.y, to.x + to.width / 2, to.y + 8];
  const wide = Math.min(84, 26 + Math.hypot(x1 - x2, y1 - y2) / 8);
  const right = Math.max(x1, x2) + wide;
  const low = from.y + from.height / 2;
  const d =
    Math.abs(from.y - to.y) < 20
      ? `M${from.x} ${low} C${from.x} ${low + 40} ${to.x} ${low + 40} ${to.x} ${to.y + to.height / 2}`
      : `M${x1} ${y1} C${right} ${y1} ${right} ${y2} ${x2} ${y2}`;
  const made = h(
    "g",
    look.group,
    look.line(d),
    h(
      "text.hover",
      { x: (x1 + x2) / 2 + wide / 2, y: (y1 + y2) / 2, "text-anchor": "middle" },
      caption(edge, full).join("  "),
    ),
  );
  made.classList.add("back");
  return made;
}

/** A label in at most two lines. */
function wrapped(label) {
  const most = Math.floor((NODE.most - 26) / NODE.character);
  if (label.length <= most) return [label];
  const cut = label.lastIndexOf(" ", most);
  const first = cut > 8 ? label.slice(0, cut) : label.slice(0, most);
  return [first, short(label.slice(first.length), most)];
}

function box(node, { x, y, width, height, lines }, full, picked) {
  const stays = [...node.stays.values()];
  const idle = stays.reduce((sum, edge) => sum + edge.n, 0);
  const visits =
    node.kind === "state"
      ? `${node.turns.length} ${node.turns.length === 1 ? "visit" : "visits"}`
      : `${node.turns.length}`;
  const second = idle ? `${visits} · ↻ ${idle}` : visits;
  const top = y - height / 2 + 18;
  const said = `${node.label}, ${visits}${node.fork ? ", a fork" : ""}`;
  return h(
    "g",
    { class: `node ${node.kind} ${node.fork ? "fork" : ""}`, ...button(said, () => picked(node)) },
    h("rect", { x: x - width / 2, y: y - height / 2, width, height, rx: node.kind === "state" ? 9 : 22 }),
    lines.map((line, i) => h("text.name", { x, y: top + i * NODE.line, "text-anchor": "middle" }, line)),
    h("text.visits", { x, y: top + lines.length * NODE.line, "text-anchor": "middle" }, second),
  );
}
