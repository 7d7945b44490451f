// A group: its episodes, the graph of their states with the credit of actions, and the same as a table.

import { clear, count, h, number, short, told } from "./dom.js";
import { unknown } from "./episode.js";
import { outcome } from "./episodes.js";
import { picture } from "./graph.js";
import { go, link, parse, replace } from "./route.js";
import { partings, readable, stateGraph, visible } from "./states.js";
import { plainTable } from "./table.js";
import { badge, bars } from "./tone.js";
import { turnList } from "./turn.js";
import { counted, named } from "./ways.js";

/** The group of a key; without one, the first with mixed outcomes. */
export async function groupPage({ run, part, params, key }) {
  const g = key ? run.byGroup.get(key) : telling(run);
  if (g === undefined) return unknown(key);
  const group = await run.load(g);
  const members = run.members[g];
  const solved = members.filter((e) => run.outcome(e) === "solved").length;
  const first = members[0];
  const body = group.known
    ? graphPart(run, part, group, params)
    : [h("p.notes", "The exact numbers of this group are not in this file, which would be too large with them.")];
  const others = [...new Set(run.group)];
  const turn = (by) =>
    others[others.indexOf(g) + by] !== undefined && go(link("group", run.groups[others[others.indexOf(g) + by]]));
  return {
    title: `group: ${short(run.of("task", first) ?? "", 50)}`,
    node: h(
      "div.page.full",
      h(
        "header.head",
        h(
          "div",
          h(
            "p.crumbs",
            h(
              "a",
              { href: link("episodes", "", { step: run.of("global_step", first) }) },
              `Step ${number(run.of("global_step", first))}`,
            ),
            ` / group ${others.indexOf(g) + 1} of ${count(others.length)}`,
          ),
          h("h1", told(short(run.of("task", first) ?? "group", 160))),
          h("p.sub", `${counted(run, members)} of seed ${run.of("seed", first) ?? "–"}, ${solved} solved`),
        ),
        h(
          "p.besides",
          h("button", { onclick: () => turn(-1) }, "← previous"),
          h("button", { onclick: () => turn(1) }, "next →"),
        ),
      ),
      body,
      h("h2", "Episodes"),
      memberTable(run, part, members),
    ),
    keys: { n: () => turn(1), p: () => turn(-1), Escape: () => history.back() },
  };
}

/** The newest group to train in which some episodes solved the task and some did not. */
function telling(run) {
  const mixed = run.members.findLastIndex(
    (members) =>
      !run.episodes.validation[members[0]] && new Set(members.map((e) => run.outcome(e) === "solved")).size > 1,
  );
  return mixed >= 0 ? mixed : run.members.length ? 0 : undefined;
}

function memberTable(run, part, members) {
  const rows = members.map((e) =>
    h(
      "tr",
      h("td", h("a", { href: link("episode", run.of("episode", e)) }, named(run, e))),
      h("td", outcome(run, e)),
      h("td.num", number(run.of("turns", e))),
      h("td.num", number(run.of("env_return", e))),
      h("td.far", bars(run, part, e, 300, 26)),
    ),
  );
  const columns = [[""], ["outcome"], ["turns", "num"], ["env return", "num"], ["credit by turn", "far"]];
  return h("div.sideways", plainTable(columns, rows));
}

function graphPart(run, part, group, params) {
  const box = h("div.canvas.sideways", { tabindex: 0, role: "region", "aria-label": "graph of states" });
  const said = h("p.hint", { "aria-live": "polite" });
  const forked = h("div");
  const turns = h("div.chosen-turns");
  const table = h("div.sideways");
  const visits = h("input", {
    type: "number",
    min: 1,
    max: 99,
    name: "visits",
    oninput: () => draw({ visits: visits.value }),
  });
  const forks = h("input", {
    type: "checkbox",
    name: "forks",
    checked: params.get("forks") === "1",
    onchange: () => draw({ forks: forks.checked ? 1 : "" }),
  });
  const layout = h(
    "select",
    { name: "states", onchange: () => draw({ states: layout.value, visits: "" }) },
    [
      ["", "merged"],
      ["all", "by turn"],
    ].map(([value, name]) => h("option", { value, selected: (params.get("states") ?? "") === value }, name)),
  );

  function draw(changes) {
    if (changes) replace(changes);
    const now = parse().params;
    const graph = stateGraph(run, part, group, { merged: now.get("states") !== "all" });
    const least = Number(now.get("visits")) || readable(graph);
    if (document.activeElement !== visits) visits.value = least;
    const shown = visible(graph, { visits: least, forks: now.get("forks") === "1" });
    const byId = new Map(graph.nodes.map((node) => [node.id, node]));
    const select = (what) => {
      box.querySelector(".chosen")?.classList.remove("chosen");
      elements.get(what)?.classList.add("chosen");
      const name = what.action === undefined ? what.label : `${byId.get(what.from).label} → ${what.action}`;
      clear(turns, h("h3", told(short(name, 120))), turnList(run, part, group, what.turns));
    };
    const { svg, elements, middle } = picture(shown, run.full, select);
    clear(box, shown.nodes.length ? svg : null);
    requestAnimationFrame(() => (box.scrollLeft = middle - box.clientWidth / 2));
    const { left } = shown;
    clear(
      said,
      shown.nodes.length
        ? "Boxes are states, lines are actions. Width: how often. Colour and end: mean credit. Dashed: in no solved episode. " +
            "Thick frame: a fork, where solved and unsolved episodes diverge. ↻: the state stayed. "
        : "Nothing fits these filters. ",
      left.nodes || left.edges ? `Not drawn: ${count(left.nodes)} states and ${count(left.edges)} actions.` : "",
    );
    clear(table, edgeTable(run, graph, byId, select));
    clear(forked, forkList(run, graph, select));
  }

  draw();
  return [
    h(
      "form.filters",
      { onsubmit: (event) => event.preventDefault() },
      h("label", h("span", "states"), layout),
      h("label", h("span", "seen, at least"), visits),
      h("label.check", forks, h("span", "only forks")),
    ),
    forked,
    said,
    box,
    turns,
    h("details.as-table", h("summary", "The graph as a table"), table),
  ];
}

/** The forks in words; a click on an action shows its turns. */
function forkList(run, graph, select) {
  const found = partings(graph);
  if (!found.length) return null;
  const action = (edge) => [
    h("button.quiet", { onclick: () => select(edge) }, told(short(edge.action, 40))),
    ` ${Math.round(100 * edge.solved)} % solved, `,
    badge(edge.mean, run.full),
  ];
  return [
    h("h2", "Where solved and unsolved episodes diverge"),
    h(
      "ul.forks",
      found.map(([node, most, least]) => h("li", told(node.label), " →", action(most), " or ", action(least))),
    ),
  ];
}

function edgeTable(run, graph, byId, select) {
  const edges = [...graph.edges, ...graph.nodes.flatMap((node) => [...node.stays.values()])];
  edges.sort(
    (a, b) => byId.get(a.from).rank - byId.get(b.from).rank || (a.from < b.from ? -1 : a.from > b.from ? 1 : b.n - a.n),
  );
  const rows = edges.slice(0, 500).map((edge, i) => {
    const from = byId.get(edge.from);
    return h(
      "tr",
      { class: edges[i - 1]?.from !== edge.from ? "first" : null },
      h("td", edges[i - 1]?.from === edge.from ? "" : [told(from.label), from.fork ? h("span.tag", "fork") : null]),
      h("td", h("button.quiet", { onclick: () => select(edge) }, told(short(edge.action, 60)))),
      h("td", edge.to === edge.from ? "↻ stays" : told(byId.get(edge.to).label)),
      h("td.num", edge.n),
      h("td.num", `${Math.round(100 * edge.solved)} %`),
      h("td.num", badge(edge.mean, run.full)),
    );
  });
  const columns = [["state"], ["action"], ["leads to"], ["times", "num"], ["solved", "num"], ["mean credit", "num"]];
  const more = edges.length > 500 ? `and ${edges.length - 500} rarer ones` : null;
  return plainTable(columns, rows, { tag: "table.plain.edges", more });
}
