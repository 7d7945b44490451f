// Two sides, each a run at a step: which tasks both solve, only one, or neither; curves and configurations beside.

import { chart } from "./charts.js";
import { count, h, short, told } from "./dom.js";
import { go, link } from "./route.js";
import { plainTable } from "./table.js";
import { badge } from "./tone.js";

const SHOWN = 300;

/** Steps of a run that can be a side: `{ value, label, rows }`, value is run.step.kind. */
function choices(runs) {
  const found = new Map();
  runs.forEach((run, r) => {
    for (let e = 0; e < run.size; e++) {
      if (!run.whole[e] || run.branch(e)) continue; // of its group only failures were logged; branches are no episodes
      const kind = run.episodes.validation[e] ? "v" : "t";
      const value = `${r}.${run.episodes.global_step[e]}.${kind}`;
      if (!found.has(value))
        found.set(value, {
          value,
          run,
          rows: [],
          label: `${runs.length > 1 ? `${short(run.name, 30)}, ` : ""}step ${run.episodes.global_step[e]}${kind === "v" ? ", validation" : ""}`,
        });
      found.get(value).rows.push(e);
    }
  });
  return found;
}

/** First and last validation, else first and last step; of several runs, the last of the first two. */
function usual(runs, found) {
  const all = [...found.values()];
  const ends = (run) => {
    const mine = all.filter((side) => side.run === run);
    const validations = mine.filter((side) => side.value.endsWith("v"));
    return validations.length > (runs.length > 1 ? 0 : 1) ? validations : mine;
  };
  if (runs.length > 1) return [ends(runs[0]).at(-1)?.value, ends(runs[1]).at(-1)?.value];
  return [ends(runs[0])[0]?.value, ends(runs[0]).at(-1)?.value];
}

function tasks({ run, rows }) {
  const found = new Map();
  for (const e of rows) {
    const key = [run.of("env", e), run.of("kwargs", e), run.of("seed", e) ?? run.of("task", e)].join("\n");
    if (!found.has(key)) found.set(key, { task: run.of("task", e), seed: run.of("seed", e), rows: [] });
    found.get(key).rows.push(e);
  }
  for (const each of found.values()) {
    each.solved = each.rows.filter((e) => run.outcome(e) === "solved").length;
    each.share = each.solved / each.rows.length;
  }
  return found;
}

export function compare({ runs, params, dark }) {
  const found = choices(runs);
  const [first, last] = usual(runs, found);
  const sides = [
    ["a", first],
    ["b", last],
  ].map(([name, value]) => found.get(params.get(name) ?? value) ?? found.get(value));
  const picker = (name, i) =>
    h(
      "label",
      h("span", name.toUpperCase()),
      h(
        "select",
        {
          name,
          onchange: (event) =>
            go(
              link("compare", "", {
                ...Object.fromEntries(params),
                a: sides[0].value,
                b: sides[1].value,
                [name]: event.target.value,
              }),
            ),
        },
        [...found.values()].map((side) => h("option", { value: side.value, selected: side === sides[i] }, side.label)),
      ),
    );
  const [a, b] = sides.map(tasks);
  const both = [...a.keys()].filter((key) => b.has(key)).map((key) => ({ a: a.get(key), b: b.get(key) }));
  return {
    title: "Compare",
    node: h(
      "div.page",
      h("h1", "Compare"),
      h("form.filters", { onsubmit: (event) => event.preventDefault() }, picker("a", 0), picker("b", 1)),
      both.length
        ? result(sides, both, params)
        : h(
            "p.notes",
            `No task was played on both sides: ${count(a.size)} only by A, ${count(b.size)} only by B. ` +
              (sides[0].run === sides[1].run
                ? "Validations play the same tasks."
                : "Two runs have tasks in common if they were given the same file of tasks."),
          ),
      runs.length > 1 ? together(runs, dark) : null,
      runs.length > 1 ? differing(sides) : null,
    ),
  };
}

const KINDS = { both: "both solve", a: "only A", b: "only B", neither: "neither" };

/** A side solves a task in at least half of its episodes there. */
function kindOf({ a, b }) {
  const [x, y] = [a.share >= 0.5, b.share >= 0.5];
  return x && y ? "both" : x ? "a" : y ? "b" : "neither";
}

function result(sides, both, params) {
  const byKind = Object.fromEntries(
    Object.keys(KINDS).map((kind) => [kind, both.filter((each) => kindOf(each) === kind)]),
  );
  const wanted = params.get("kind");
  const rows = (KINDS[wanted] ? byKind[wanted] : both).sort((x, y) => y.b.share - y.a.share - (x.b.share - x.a.share));
  const mean = (side) => both.reduce((sum, each) => sum + each[side].share, 0) / both.length;
  const here = Object.fromEntries(params);
  const tiles = Object.entries(KINDS).map(([kind, name]) =>
    h(
      "a",
      {
        class: `tile ${wanted === kind ? "chosen" : ""}`,
        href: link("compare", "", { ...here, a: sides[0].value, b: sides[1].value, kind: wanted === kind ? "" : kind }),
      },
      h("b", count(byKind[kind].length)),
      ` ${name}`,
    ),
  );
  return h(
    "section",
    h("p.lead", `On ${count(both.length)} common tasks A solves ${percent(mean("a"))} and B ${percent(mean("b"))}.`),
    h("div.tiles", tiles),
    h("p.hint", "Solved: in at least half of the task's episodes on that side."),
    h(
      "div.sideways",
      plainTable(
        [["task"], ["seed", "num"], ["A", "num"], ["B", "num"], ["change", "num"]],
        rows.slice(0, SHOWN).map((each) => row(sides, each)),
        { more: rows.length > SHOWN ? `and ${count(rows.length - SHOWN)} more` : null },
      ),
    ),
  );
}

function row(sides, each) {
  const side = (name, i) =>
    h(
      "a",
      {
        href: `${link("group", sides[i].run.groups[sides[i].run.group[each[name].rows[0]]], { run: sides[i].run.number || "" })}`,
      },
      `${each[name].solved} of ${each[name].rows.length}`,
    );
  return h(
    "tr",
    h("td", told(short(each.a.task ?? "–", 90))),
    h("td.num", each.a.seed ?? "–"),
    h("td.num", side("a", 0)),
    h("td.num", side("b", 1)),
    h("td.num", badge(each.b.share - each.a.share, 1)),
  );
}

const percent = (share) => `${Math.round(100 * share)} %`;

/** The curves of all runs, a chart for each that several have. */
function together(runs, dark) {
  const titles = [...new Set(runs.flatMap((run) => run.charts.map((each) => each.title)))];
  const drawn = titles.map((title) => {
    const mine = runs.map((run) => run.charts.find((each) => each.title === title));
    const series = mine.flatMap((each, r) => (each ? [{ ...each.series[0], label: short(runs[r].name, 24) }] : []));
    return { title, unit: mine.find(Boolean).series[0].label, range: mine.find(Boolean).range, series };
  });
  return h(
    "section",
    h("h2", "Curves"),
    h(
      "div.charts",
      drawn.filter((each) => each.series.length > 1).map((each) => chart(each, dark)),
    ),
  );
}

/** The keys of the configurations that differ. */
function differing(sides) {
  const [a, b] = sides.map((side) => flat(side.run.about.config ?? {}));
  const keys = [...new Set([...a.keys(), ...b.keys()])].filter((key) => a.get(key) !== b.get(key)).sort();
  if (!a.size || !b.size) return h("p.hint", "No configuration was logged.");
  const rows = keys.slice(0, SHOWN).map((key) =>
    h(
      "tr",
      h("th", { scope: "row" }, told(key)),
      [a, b].map((side) => h("td", told(short(side.get(key) ?? "–", 80)))),
    ),
  );
  const table = h("div.sideways", plainTable([["key"], ["A"], ["B"]], rows));
  return h("section", h("h2", "What differs"), keys.length ? table : h("p", "The configurations are equal."));
}

function flat(value, prefix = "", found = new Map()) {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) {
    for (const [key, each] of Object.entries(value)) flat(each, prefix ? `${prefix}.${key}` : key, found);
  } else {
    found.set(prefix, typeof value === "string" ? value : JSON.stringify(value));
  }
  return found;
}
