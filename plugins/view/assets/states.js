// The episodes of a group as a graph: states that several were in, actions as edges, ends as nodes of their own.

import { plain, short } from "./dom.js";

const WIDE = 52;
const LARGEST = { nodes: 150, edges: 300 };

/**
 * Nodes `{ id, kind, label, turns, rank, stays, fork }` and edges `{ from, to, action, turns, n, solved, mean }`.
 * `stays` are actions that left the state as it was; `turns` are places in the group. A turn that branches share is there
 * once, and all of them count for what it came to.
 */
export function stateGraph(run, part, group, { merged = true } = {}) {
  const nodes = new Map();
  const edges = new Map();
  const node = (id, kind, state = null) => {
    if (!nodes.has(id)) nodes.set(id, { id, kind, state, turns: [], stays: new Map(), first: Infinity, sum: 0 });
    return nodes.get(id);
  };
  const counted = (map, key, made, i, solved, credit) => {
    if (!map.has(key)) map.set(key, { ...made, turns: [], solved: 0, sum: 0, known: 0, episodes: new Set() });
    const edge = map.get(key);
    if (group.owner(i) !== null) return edge;
    edge.turns.push(i);
    if (credit !== null) [edge.sum, edge.known] = [edge.sum + credit, edge.known + 1];
    return edge;
  };
  for (const e of run.members[group.g]) {
    const result = run.outcome(e);
    const start = group.start.get(e);
    const name = (t) => {
      const state = group.at("anchor", start + t);
      return state === null ? `:${group.owner(start + t) ?? start + t}` : merged ? state : `${t}:${state}`;
    };
    for (let t = 0; t < run.counts[e]; t++) {
      const i = start + t;
      const here = node(`s${name(t)}`, "state", group.at("anchor", i));
      if (group.owner(i) === null) {
        here.turns.push(i);
        here.sum += t;
      }
      here.first = Math.min(here.first, t);
      here.text ??= t ? group.text("observation", i - 1) : null;
      const last = t === run.counts[e] - 1;
      const next = last ? node(result, result) : node(`s${name(t + 1)}`, "state", group.at("anchor", i + 1));
      const action = group.at("action", i) ?? "no action";
      const credit = run.credit(part, run.first[e] + t);
      const map = next === here ? here.stays : edges;
      const edge = counted(
        map,
        `${here.id}\n${action}\n${next.id}`,
        { from: here.id, to: next.id, action },
        i,
        result,
        credit,
      );
      edge.episodes.add(e);
      if (last) next.turns.push(i);
    }
  }
  for (const edge of [...edges.values(), ...[...nodes.values()].flatMap((each) => [...each.stays.values()])])
    finish(run, edge);
  const common = new Map();
  for (const each of nodes.values()) {
    each.pieces = pieces(each.text);
    for (const piece of each.pieces) common.set(piece, (common.get(piece) ?? 0) + 1);
  }
  for (const each of nodes.values()) {
    // What is first reached later lies ahead; of those reached at the same time, what is later on average.
    each.rank = each.kind === "state" ? each.first + each.sum / each.turns.length / 1000 : Infinity;
    each.label = label(each, common);
    each.fork = fork([...edges.values()].filter((edge) => edge.from === each.id));
  }
  return { nodes: [...nodes.values()], edges: [...edges.values()] };
}

function finish(run, edge) {
  edge.n = edge.turns.length;
  edge.solved = [...edge.episodes].filter((e) => run.outcome(e) === "solved").length / edge.episodes.size;
  edge.mean = edge.known ? edge.sum / edge.known : null;
  if (edge.known && Math.abs(edge.mean) < run.full / 1000) edge.mean = 0; // what rounding leaves of a sum
}

/** Whether it matters what was done here: the actions' episodes do not end well equally often. */
function fork(out) {
  const ends = parted(out);
  return ends !== null && ends[0].solved - ends[1].solved >= 0.25;
}

/** Of the actions taken more than once, the one after which most was solved, and the one after which least was. */
function parted(out) {
  const known = out.filter((edge) => edge.n > 1).sort((a, b) => b.solved - a.solved || b.n - a.n);
  return known.length > 1 ? [known[0], known.at(-1)] : null;
}

/** Where solved and unsolved episodes diverge: the forks of the largest difference, with best and worst action. */
export function partings({ nodes, edges }, most = 3) {
  return nodes
    .filter((node) => node.fork)
    .map((node) => [node, ...parted(edges.filter((edge) => edge.from === node.id))])
    .sort((a, b) => b[1].solved - b[2].solved - (a[1].solved - a[2].solved) || a[0].rank - b[0].rank)
    .slice(0, most);
}

const NAMES = { solved: "✓ solved", unsolved: "✗ not solved", failed: "! failed" };

/** Sentences and lines of a text. */
function pieces(text) {
  const found = plain(text ?? "")
    .split(/\n+|(?<=[.!?;]) +/)
    .map((piece) => piece.trim());
  return [...new Set(found.filter((piece) => piece.length > 3))].slice(0, 60);
}

/** A state's name: its key where that reads as one, else what the environment says there and least elsewhere. */
function label({ kind, state, pieces: said, first }, common) {
  if (kind !== "state") return NAMES[kind];
  if (state && state.length <= 90 && /\s/.test(state)) return short(state, WIDE);
  if (first === 0) return "start";
  if (!said.length) return state ? short(state, 14) : "unknown state";
  const rarest = Math.min(...said.map((piece) => common.get(piece)));
  return short(said.filter((piece) => common.get(piece) === rarest).join(" "), WIDE);
}

/** What fits on a picture: states and actions that are common enough; `left` counts those that are not. */
export function visible({ nodes, edges }, { visits = 1, forks = false }) {
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const wanted = new Set(
    nodes.filter((node) => node.kind !== "state" || node.turns.length >= visits).map((node) => node.id),
  );
  let kept = edges.filter(
    (edge) => edge.n >= visits && wanted.has(edge.from) && wanted.has(edge.to) && (!forks || byId.get(edge.from).fork),
  );
  kept = kept.sort((a, b) => b.n - a.n).slice(0, LARGEST.edges);
  let used = new Set(kept.flatMap((edge) => [edge.from, edge.to]));
  if (used.size > LARGEST.nodes) {
    used = new Set(
      [...used].sort((a, b) => byId.get(b).turns.length - byId.get(a).turns.length).slice(0, LARGEST.nodes),
    );
    kept = kept.filter((edge) => used.has(edge.from) && used.has(edge.to));
  }
  const shown = nodes.filter((node) => used.has(node.id));
  return { nodes: shown, edges: kept, left: { nodes: nodes.length - shown.length, edges: edges.length - kept.length } };
}

/** How often states and actions must have been seen so that a picture stays readable. */
export function readable(graph) {
  for (let visits = 1; visits < 10; visits++) {
    const { nodes, edges } = visible(graph, { visits });
    if (nodes.length <= 26 && edges.length <= 40) return visits;
  }
  return 10;
}
