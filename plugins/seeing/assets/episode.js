// One episode as a conversation: every turn with its credit, what it is made of, and what was compared with what.

import { count, h, number, passage, short, told } from "./dom.js";
import { OUTCOMES, outcome } from "./episodes.js";
import { go, link, replace } from "./route.js";
import { badge, glyph, tone } from "./tone.js";

const PER_PAGE = 200;

/** The episode of a key, or null. */
export async function conversation({ run, part, params, key, turn = Number(params.get("turn") ?? 0), side = false }) {
  const e = run.byKey.get(key);
  if (e === undefined) return unknown(key);
  const group = await run.load(run.group[e]);
  const start = group.start.get(e);
  const turns = run.counts[e];
  const page = Math.floor(Math.min(turn, Math.max(0, turns - 1)) / PER_PAGE);
  const [from, to] = [page * PER_PAGE, Math.min(turns, (page + 1) * PER_PAGE)];
  const seen = states(group);
  const articles = [];
  for (let t = from; t < to; t++) articles.push(article({ run, part, group, e, t, i: start + t, seen }));
  const list = h("div", { class: "turns" }, articles);
  const jump = (t) => {
    if (t < from || t >= to) return go(link("episode", key, { turn: t }));
    if (!side) replace({ turn: t });
    strip.childNodes.forEach((button, i) => button.toggleAttribute("data-current", i === t));
    settle(articles[t - from]);
    return undefined;
  };
  const strip = h("nav", { class: "turnstrip", "aria-label": "turns" });
  for (let t = 0; t < turns; t++) {
    const value = run.credit(part, run.first[e] + t);
    strip.append(h("button", { class: tone(value, run.full), title: `turn ${t}: ${number(value, true)}`, onclick: () => jump(t) }, glyph(value, run.full)));
  }
  const members = run.members[run.group[e]];
  const place = members.indexOf(e);
  const beside = (by) => members[place + by] !== undefined && go(link("episode", run.of("episode", members[place + by])));
  const pages = turns > PER_PAGE ? h("p", { class: "pages" }, `turns ${from} to ${to - 1} of ${turns} `,
    from ? h("button", { onclick: () => jump(from - PER_PAGE) }, "earlier") : null,
    to < turns ? h("button", { onclick: () => jump(to) }, "later") : null) : null;
  const node = h("div", { class: side ? "column" : "page" },
    head(run, e, side ? null : beside, place, members), strip, gaps(run, group, e), pages, list, ending(run, e));
  let current = turn;
  const step = (by) => {
    current = Math.max(0, Math.min(turns - 1, current + by));
    jump(current);
  };
  return {
    title: short(run.of("task", e) ?? key, 60),
    node,
    ready: () => params.has("turn") && !side && turns && jump(Math.min(turn, turns - 1)),
    keys: { j: () => step(1), k: () => step(-1), n: () => beside(1), p: () => beside(-1), g: () => go(link("group", run.groups[run.group[e]])), Escape: () => history.back() },
  };
}

/** Scroll to a turn: those above it get their height only as they come into view, so once is not enough. */
function settle(turn, times = 4) {
  turn.scrollIntoView({ block: "start", behavior: "instant" });
  turn.focus({ preventScroll: true });
  if (times) requestAnimationFrame(() => settle(turn, times - 1));
}

export function unknown(key) {
  return { title: "not here", node: h("div", { class: "page" }, h("h1", {}, "Not here"), h("p", {}, "This page has no such key: ", told(short(key, 80)))) };
}

function head(run, e, beside, place, members) {
  const facts = [
    ["step", number(run.of("global_step", e))],
    ["seed", run.of("seed", e) ?? "–"],
    ["turns", number(run.of("turns", e))],
    ["return", number(run.of("return", e))],
    ["score", number(run.of("score", e))],
    ["weights", run.of("weights_min", e) === run.of("weights_max", e) ? number(run.of("weights_min", e)) : `${run.of("weights_min", e)} – ${run.of("weights_max", e)}`],
  ];
  const env = [run.of("env", e), run.of("kwargs", e), run.of("package", e)].filter(Boolean).join(" · ");
  return h("header", { class: "head" },
    h("div", {},
      h("p", { class: "crumbs" }, h("a", { href: link("episodes") }, "Episodes"), " / ",
        h("a", { href: link("group", run.groups[run.group[e]]) }, `group, ${place + 1} of ${members.length}`)),
      h("h1", {}, told(short(run.of("task", e) ?? "episode", 160))),
      h("p", { class: "sub" }, outcome(run, e), run.episodes.truncated[e] ? ", at a limit" : null, " · ", told(env)),
      run.of("failed", e) ? h("div", { class: "failure" }, passage(run.of("failed", e), 1500)) : null),
    h("div", {},
      h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
      beside ? h("p", { class: "besides" },
        h("button", { disabled: place === 0, onclick: () => beside(-1) }, "← previous"),
        h("button", { disabled: place === members.length - 1, onclick: () => beside(1) }, "next →"),
        h("a", { class: "button", href: link("group", run.groups[run.group[e]]) }, "graph of the group")) : null));
}

/** What this page cannot show of an episode. */
function gaps(run, group, e) {
  const said = [];
  if (!group.known) said.push("The exact numbers of this episode are not in this file, which would be too large with them.");
  if (!group.texts) said.push("The texts of this episode are not in this file.");
  if (!run.counts[e]) said.push("The episode has no turns.");
  return said.length ? h("p", { class: "notes" }, said.join(" ")) : null;
}

function ending(run, e) {
  const result = run.outcome(e);
  return h("p", { class: `end ${result}` }, OUTCOMES[result], run.episodes.truncated[e] ? ", ended by a limit" : "");
}

/** State -> turns of the group that were in it. */
function states(group) {
  const found = new Map();
  for (let i = 0; i < group.rows; i++) {
    const state = group.at("state_key", i);
    if (state === null) continue;
    if (!found.has(state)) found.set(state, []);
    found.get(state).push(i);
  }
  return found;
}

function article({ run, part, group, e, t, i, seen }) {
  const all = run.first[e] + t;
  const value = run.credit(part, all);
  const action = group.at("action", i);
  const valid = run.columns.valid.values[all] === 1;
  const said = group.text("response", i);
  const answer = group.text("observation", i);
  const prompt = group.text("prompt", i);
  const note = group.at("parse_note", i);
  return h("article", { class: `turn ${tone(value, run.full)}`, tabindex: -1, "aria-label": `turn ${t}` },
    h("header", {},
      h("span", { class: "which" }, t),
      h("h2", { class: "action" }, action === null ? h("i", {}, "no action") : told(short(action, 300)),
        valid ? null : h("span", { class: "invalid" }, "invalid")),
      value === null ? h("span", { class: "why" }, run.reason(all) || "no value in this part") : badge(value, run.full)),
    value === null ? null : parts(run, group, all, i),
    note ? h("p", { class: "note" }, "The parser: ", told(note)) : null,
    prompt && t === 0 ? h("section", { class: "said prompt" }, h("h3", {}, "prompt"), passage(prompt, 1500)) : null,
    prompt && t > 0 ? h("details", {}, h("summary", {}, "end of the prompt"), h("div", { class: "said prompt" }, passage(prompt))) : null,
    said === null ? null : h("section", { class: "said response" }, h("h3", {}, "response"), passage(said)),
    answer === null ? null : h("section", { class: "said observation" }, h("h3", {}, "environment"), passage(answer)),
    rewards(group, i), compared(run, part, group, i, seen));
}

function pairs(className, entries) {
  const known = entries.filter(([, value]) => value !== null && value !== undefined);
  return known.length ? h("dl", { class: className }, known.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))) : null;
}

/** The credit's parts, which add up to it, and what the update made of it. */
function parts(run, group, all, i) {
  const sum = run.parts.slice(1).map((name) => {
    const value = run.credit(name, all);
    const label = name.replace("part.", "");
    return h("span", { class: "part", title: run.meanings[name] ?? null }, told(label.replaceAll("_", " ")), " ", h("b", {}, number(value, true)));
  });
  const meant = (name, text) => (run.meanings[name] ? h("span", { title: run.meanings[name] }, told(text)) : text);
  const further = ["value", "return", "kl", "ratio", "ratio_max", "clip_share", "entropy"].map((name) => [name.replace("_", " "), group.at(name, i)]);
  const levels = group.family("level.").map((name) => [meant(`level.${name}`, name.replaceAll("_", " ")), group.at(`level.${name}`, i)]);
  const sizes = group.family("size.").map((name) => [meant(`size.${name}`, `turns compared, ${name.replaceAll("_", " ")}`), group.at(`size.${name}`, i)]);
  return h("div", { class: "credit" },
    sum.length ? h("p", { class: "parts" }, sum.flatMap((each, n) => (n ? [h("span", { class: "and" }, "+"), each] : [each]))) : null,
    pairs("numbers", [...levels, ...sizes, ...further].map(([name, value]) => [name, value === null ? null : number(value)])));
}

function rewards(group, i) {
  const total = group.at("reward", i);
  if (total === null) return null;
  const named = group.family("reward.").map((name) => [name, group.at(`reward.${name}`, i)]).filter(([, value]) => value !== null);
  const terms = named.length ? ` = ${named.map(([name, value]) => `${number(value)} ${name}`).join(" + ")}` : "";
  const penalty = group.at("penalty", i);
  const cost = [["model", "seconds_model"], ["environment", "seconds_env"]].map(([name, column]) => [name, group.at(column, i)]).filter(([, value]) => value !== null);
  return h("p", { class: "cost" },
    h("span", {}, `reward ${number(total)}`, told(terms)),
    penalty ? h("span", {}, `penalty ${number(penalty)}`) : null,
    group.at("prompt_tokens", i) === null ? null : h("span", {}, `${count(group.at("prompt_tokens", i))} tokens in${group.at("prompt_cut", i) ? " (cut)" : ""}, ${number(group.at("response_tokens", i))} out`),
    group.at("extra", i) ? h("span", {}, told(short(group.at("extra", i), 300))) : null,
    cost.length ? h("span", {}, cost.map(([name, value]) => `${name} ${number(value)} s`).join(", ")) : null);
}

/** The other turns of the group that were in the same state. */
function compared(run, part, group, i, seen) {
  const others = (seen.get(group.at("state_key", i)) ?? []).filter((each) => each !== i);
  if (!others.length) return null;
  const box = h("details", { class: "compared" }, h("summary", {}, `${others.length} other ${others.length > 1 ? "turns" : "turn"} of the group in this state`));
  box.addEventListener("toggle", () => box.open && box.childElementCount === 1 && box.append(turnList(run, part, group, others)), { once: false });
  return box;
}

/** Turns of a group as a table of links. */
export function turnList(run, part, group, rows) {
  const starts = [...group.start].sort((a, b) => a[1] - b[1]);
  const made = rows.slice(0, 200).map((i) => {
    const [e, start] = starts.findLast(([each, first]) => first <= i && run.counts[each]);
    const value = run.credit(part, run.first[e] + i - start);
    return h("tr", {},
      h("td", {}, h("a", { href: link("episode", run.of("episode", e), { turn: i - start }) }, `episode ${run.members[group.g].indexOf(e) + 1}, turn ${i - start}`)),
      h("td", {}, outcome(run, e)), h("td", {}, told(short(group.at("action", i) ?? "no action", 80))), h("td", { class: "num" }, badge(value, run.full)));
  });
  return h("table", { class: "plain" }, h("tbody", {}, made), rows.length > 200 ? h("tfoot", {}, h("tr", {}, h("td", { colspan: 4 }, `and ${rows.length - 200} more`))) : null);
}

/** Two episodes in columns. */
export async function beside(context) {
  const keys = context.key.split(" ");
  const sides = await Promise.all(keys.map((key) => conversation({ ...context, key, turn: 0, side: true })));
  return { title: "side by side", node: h("div", { class: "page full beside" }, sides.map((side) => side.node)), keys: { Escape: () => history.back() } };
}

