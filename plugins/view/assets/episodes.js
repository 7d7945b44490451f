// All episodes in a table: filtered, sorted, walked through with keys.

import { announce, clear, count, h, number, save, short, told } from "./dom.js";
import { jsonLines } from "./export.js";
import { histogram } from "./histogram.js";
import { go, link, parse, replace } from "./route.js";
import { TextSearch } from "./search.js";
import { Table } from "./table.js";
import { bars, badge } from "./tone.js";
import { branchColumn, counted } from "./ways.js";

export const OUTCOMES = { solved: "✓ solved", unsolved: "✗ not solved", failed: "! failed" };

export function outcome(run, e) {
  const kind = run.outcome(e);
  return h("span", { class: `outcome ${kind}` }, OUTCOMES[kind]);
}

/** "12", "10-20", "10-" or "-20" as the lowest and the highest number; null of anything else. */
function span(text) {
  const [, from, to, one] = /^\s*(?:(\d*)\s*[-–]\s*(\d*)|(\d+))\s*$/.exec(text ?? "") ?? [];
  if (one) return [Number(one), Number(one)];
  return from || to ? [Number(from || 0), to ? Number(to) : Infinity] : null;
}

/** The episodes that fit the filter of a link, in its order. */
export function chosen(run, part, params, found = null) {
  const { worst, best, invalid } = run.summary(part);
  const given = (name) => params.get(name) || null;
  const [step, task, result, kind, split] = ["step", "task", "outcome", "kind", "split"].map(given);
  const [low, high] = (given("credit") ?? ",").split(",").map((text) => (text === "" ? null : Number(text)));
  const length = span(given("turns"));
  const query = (given("q") ?? "").toLowerCase();
  const rows = [];
  for (let e = 0; e < run.size; e++) {
    if (step !== null && String(run.episodes.global_step[e]) !== step) continue;
    if (split !== null && (run.episodes.validation[e] ? "validation" : "training") !== split) continue;
    if (task !== null && run.of("task", e) !== task) continue;
    if (result !== null && run.outcome(e) !== result) continue;
    if (length && !(run.episodes.turns[e] >= length[0] && run.episodes.turns[e] <= length[1])) continue;
    if (kind !== null && (run.outcome(e) !== "failed" || (run.of("failed_kind", e) ?? "other") !== kind)) continue;
    if (low !== null && (best[e] === null || best[e] < low)) continue;
    if (high !== null && (worst[e] === null || worst[e] > high)) continue;
    if (
      query &&
      !`${run.of("task", e)} ${run.of("seed", e)} ${run.of("episode", e)} ${run.of("env", e)}`
        .toLowerCase()
        .includes(query)
    )
      continue;
    if (found && !found.has(e)) continue;
    rows.push(e);
  }
  const sort = given("sort") ?? "";
  if (!sort) rows.sort((a, b) => (best[a] === null) - (best[b] === null) || a - b); // those with credit first
  const key = sort.replace(/^-/, "");
  const kinds = Object.keys(OUTCOMES);
  const values = { worst, best, invalid, outcome: null }[key] ?? run.episodes[key];
  if (key === "outcome" || values)
    sorted(
      rows,
      key === "outcome"
        ? (e) => -kinds.indexOf(run.outcome(e))
        : values.codes
          ? (e) => run.of(key, e)
          : (e) => values[e],
      sort.startsWith("-"),
    );
  return rows;
}

/** What is missing stands at the end in both directions. */
function sorted(rows, value, down) {
  const sign = down ? -1 : 1;
  rows.sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === null || y === null) return (x === null) - (y === null) || a - b;
    return x < y ? -sign : x > y ? sign : a - b;
  });
}

export function episodes({ run, part, params }) {
  let marked = [];
  const search = new TextSearch(run);
  const open = (e) => go(link("episode", run.of("episode", e), { turn: null }));
  const worth = (value) => (value === null ? "–" : badge(value, run.full));
  const share = (value) => (value === null ? "–" : value ? `${Math.round(100 * value)} %` : "0");
  const numeric = (key, label, look, title, cell) => ({ key, label, className: `num ${look}`, title, cell });
  const { worst, best, invalid } = run.summary(part);
  const table = new Table({
    label: "episodes",
    sort: params.get("sort"),
    onsort: (sort) => update({ sort }),
    onopen: open,
    opened: (e) => `${run.of("task", e)}, seed ${run.of("seed", e)}, ${OUTCOMES[run.outcome(e)]}`,
    columns: [
      numeric("global_step", "step", "slim", null, (e) => [
        marked.includes(e) ? "● " : "",
        number(run.of("global_step", e)),
      ]),
      {
        key: "task",
        label: "task",
        className: "task",
        cell: (e) =>
          h(
            "a",
            { href: link("episode", run.of("episode", e)) },
            told(short(run.of("task", e) ?? run.of("env", e) ?? "–", 90)),
          ),
      },
      ...(run.branches ? [branchColumn(run)] : []),
      numeric("seed", "seed", "mid seed", null, (e) => run.of("seed", e) ?? "–"),
      { key: "outcome", label: "outcome", className: "result", cell: (e) => outcome(run, e) },
      numeric("turns", "turns", "slim", null, (e) => number(run.of("turns", e))),
      numeric("env_return", "env return", "mid", "sum of the environment's rewards", (e) =>
        number(run.of("env_return", e)),
      ),
      numeric("invalid", "invalid", "slim far", "share of turns without a valid action", (e) => share(invalid[e])),
      numeric("worst", "worst", "mid pill", "lowest credit of a turn", (e) => worth(worst[e])),
      numeric("best", "best", "mid pill", "highest credit of a turn", (e) => worth(best[e])),
      { key: null, label: "credit by turn", className: "strip far", cell: (e) => bars(run, part, e) },
    ],
  });
  const sum = h("p.counted", { "aria-live": "polite" });
  const distribution = h("div.distribution");
  const filters = h("form.filters", { onsubmit: (event) => event.preventDefault() });
  const searched = h("span.hint", { "aria-live": "polite" });

  function update(changes) {
    replace(changes);
    refresh(parse().params, false);
  }

  function refresh(now, keep = true) {
    const rows = chosen(run, part, now, search.found);
    table.sort = now.get("sort");
    table.headings();
    if (!keep) table.box.scrollTop = 0;
    table.show(rows, keep ? table.chosen : -1);
    const of = run.branches ? `: ${counted(run, rows)}` : " episodes";
    clear(sum, h("b", count(rows.length)), ` of ${count(run.size)}${of}`);
    clear(
      distribution,
      histogram(run, part, rows, now.get("credit"), (credit) => update({ credit })),
    );
  }

  async function inTexts(event) {
    if (event.key !== "Enter") return;
    const words = event.target.value;
    const rows = chosen(run, part, parse().params);
    const finished = await search.over(words, rows, (text) => clear(searched, text));
    if (finished) refresh(parse().params, false);
  }

  const exported = () =>
    jsonLines(run, table.rows)
      .then((lines) => save("episodes.jsonl", lines))
      .catch((error) => clear(searched, `not exported: ${error.message}`));
  const select = (name, label, values, text = String) =>
    h(
      "label",
      h("span", label),
      h(
        "select",
        { name, onchange: (event) => update({ [name]: event.target.value }) },
        h("option", { value: "" }, "all"),
        values.map((value) => h("option", { value, selected: params.get(name) === String(value) }, text(value))),
      ),
    );
  const input = (name, label, more) =>
    h(
      "label",
      h("span", label),
      h("input", { type: "search", name, autocomplete: "off", spellcheck: "false", ...more }),
    );
  const typed = (name, label, placeholder = null) => {
    const oninput = (event) => update({ [name]: event.target.value });
    return input(name, label, { value: params.get(name) ?? "", placeholder, oninput });
  };
  const steps = [...new Set(run.episodes.global_step)].filter((step) => step !== null).sort((a, b) => a - b);
  const kinds = [...new Set(run.episodes.failed_kind.values)].sort();
  const tasks = run.episodes.task.values;
  clear(
    filters,
    select("step", "step", steps),
    run.episodes.validation.some(Boolean) ? select("split", "episodes of", ["training", "validation"]) : null,
    tasks.length < 400 ? select("task", "task", tasks, (task) => short(task, 50)) : null,
    select("outcome", "outcome", Object.keys(OUTCOMES), (kind) => OUTCOMES[kind]),
    kinds.length ? select("kind", "failure", kinds, (kind) => short(kind, 40)) : null,
    typed("turns", "turns", "10-20"),
    typed("q", "task, seed or key"),
    input("texts", "in the texts (Enter)", {
      placeholder: run.texts.length ? "" : "no texts here",
      disabled: !run.texts.length,
      onkeydown: inTexts,
      oninput: (event) => event.target.value === "" && (search.stop(), clear(searched), refresh(parse().params)),
    }),
    h("a.button", { href: link("episodes") }, "clear"),
    h("button", { type: "button", name: "export", title: "these episodes as JSON lines", onclick: exported }, "export"),
  );
  const node = h(
    "div.page.full",
    h("div.over", h("h1", "Episodes"), sum, searched),
    filters,
    distribution,
    table.box,
    h(
      "p.hint.keys",
      h("kbd", "j"),
      " ",
      h("kbd", "k"),
      " move, ",
      h("kbd", "Enter"),
      " opens, ",
      h("kbd", "x"),
      " marks two for side by side, ",
      h("kbd", "?"),
      " lists keys",
    ),
  );
  refresh(params);
  const mark = () => {
    const e = table.rows[table.chosen];
    if (e === undefined) return;
    marked = marked.includes(e) ? marked.filter((each) => each !== e) : [...marked, e].slice(-2);
    table.drawn = "";
    table.draw();
    announce(`${marked.length} marked`);
    if (marked.length === 2) go(link("beside", marked.map((each) => run.of("episode", each)).join(" ")));
  };
  return {
    title: "Episodes",
    node,
    keys: {
      j: () => table.move(1),
      k: () => table.move(-1),
      ArrowDown: () => table.move(1),
      ArrowUp: () => table.move(-1),
      Enter: () => table.open(),
      x: mark,
    },
    leave: () => search.stop(),
  };
}
