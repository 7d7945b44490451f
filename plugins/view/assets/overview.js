// The page of a run: what is wrong with it in words, its curves, its failures.

import { chart } from "./charts.js";
import { count, definitions, h, told } from "./dom.js";
import { go, link } from "./route.js";
import { plainTable } from "./table.js";

export function overview({ run, dark }) {
  const picked = (step) => go(link("episodes", "", { step }));
  const facts = [
    ["episodes", count(run.size - run.branches)],
    ...(run.branches ? [["branches", count(run.branches)]] : []),
    ["turns", count(run.columns.shared.values.reduce((sum, shared) => sum + 1 - shared, 0))],
    ["groups", count(run.groups.length)],
    ["steps", steps(run)],
  ];
  const notes = run.notes.map((note) => h("li", told(note)));
  const mark = run.health.find((found) => found.mark !== null)?.mark;
  const charts = run.charts.map((each) => chart(each, dark, picked, mark));
  return {
    title: run.name,
    node: h(
      "div.page.full",
      h(
        "header.head",
        h("div", h("h1", told(run.name)), h("p.lead", run.headline), h("p.sub", told(told_method(run)))),
        definitions("dl.facts", facts),
      ),
      notes.length ? h("ul.notes", notes) : null,
      health(run),
      h("h2", "Curves"),
      h("div.charts", charts),
      h("p.hint", "A click on a curve opens the episodes of that step."),
      failures(run),
    ),
  };
}

function told_method(run) {
  const { method, params, modify, loss } = run.about;
  if (!method) return "";
  const named = Object.entries(params ?? {})
    .slice(0, 8)
    .map(([key, value]) => `${key}=${value}`);
  const changed = Array.isArray(modify) ? modify.map((each) => each.name) : [];
  return [method, ...named, ...changed, loss ? `loss ${loss}` : null].filter(Boolean).join(" · ");
}

function steps(run) {
  const known = run.episodes.global_step.filter((step) => step !== null);
  if (!known.length) return "–";
  const [first, last] = [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))];
  return first === last ? String(first) : `${first} – ${last}`;
}

function health(run) {
  const { validation, global_step } = run.episodes;
  if (!run.whole.some((whole, e) => whole && !validation[e] && global_step[e] !== null))
    return h("p.hint", "Rules look at training episodes, and there are none here.");
  if (!run.health.length)
    return h("p.fine", h("span", { "aria-hidden": "true" }, "✓ "), "No rule found anything wrong.");
  return h(
    "ul.health",
    { "aria-label": "what is wrong" },
    run.health.map((found) => {
      const query = Object.fromEntries(new URLSearchParams(found.filter));
      const step = found.steps.length ? { step: found.steps.at(-1) } : {};
      const to = link("episodes", "", found.filter ? query : step);
      return h(
        "li",
        h("span.mark", { "aria-hidden": "true" }, "!"),
        h("div", h("p", told(found.message)), h("p.hint", `Rule: ${found.threshold}`), evidence(found.evidence)),
        h("a.button", { href: to }, "see episodes"),
      );
    }),
  );
}

/** What changed while success fell, in the order in which it did: what came before it may be a cause. */
function evidence(rows) {
  if (!rows.length) return null;
  const body = rows.map((row) =>
    h(
      "tr",
      { class: row.fall ? "fall" : null },
      h("td.num", row.step),
      h("th", { scope: "row" }, row.what),
      h("td.num", row.before),
      h("td.num", row.after),
    ),
  );
  const columns = [["from step", "num"], ["what changed"], ["before", "num"], ["after", "num"]];
  return h("div.sideways", plainTable(columns, body, { tag: "table.plain.evidence" }));
}

function failures(run) {
  const kinds = new Map();
  for (let e = 0; e < run.size; e++) {
    if (run.outcome(e) !== "failed") continue;
    const kind = run.of("failed_kind", e) ?? "other";
    kinds.set(kind, (kinds.get(kind) ?? 0) + 1);
  }
  if (!kinds.size) return null;
  const most = Math.max(...kinds.values());
  const rows = [...kinds]
    .sort((a, b) => b[1] - a[1])
    .map(([kind, n]) => {
      const bar = h("span.bar", { "aria-hidden": "true" });
      bar.style.width = `${(100 * n) / most}%`;
      return h(
        "tr",
        h("th", { scope: "row" }, h("a", { href: link("episodes", "", { outcome: "failed", kind }) }, told(kind))),
        h("td", count(n)),
        h("td.wide", bar),
      );
    });
  return h("section", h("h2", "Failed episodes"), h("table.plain", h("tbody", rows)));
}
