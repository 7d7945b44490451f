// One episode as a conversation, or two side by side.

import { definitions, h, number, passage, short, told } from "./dom.js";
import { OUTCOMES, outcome } from "./episodes.js";
import { go, link, replace } from "./route.js";
import { glyph, tone } from "./tone.js";
import { noteBox, readNotes } from "./notes.js";
import { article, states } from "./turn.js";
import { branchTag, named } from "./ways.js";

const PER_PAGE = 200;
const AT_ONCE = 16; // turns that are made before the browser draws; the others follow

/** The episode of a key, or null. */
export async function conversation({ run, part, params, key, turn = Number(params.get("turn") ?? 0), side = false }) {
  const e = run.byKey.get(key);
  if (e === undefined) return unknown(key);
  const [group, notes] = await Promise.all([run.load(run.group[e]), readNotes(run)]);
  const start = group.start.get(e);
  const turns = run.counts[e];
  const page = Math.floor(Math.min(turn, Math.max(0, turns - 1)) / PER_PAGE);
  const [from, to] = [page * PER_PAGE, Math.min(turns, (page + 1) * PER_PAGE)];
  const seen = states(group);
  const articles = [];
  const list = h("div.turns");
  const make = (end) => {
    for (let t = from + articles.length; t < Math.min(end, to); t++) {
      articles.push(article({ run, part, group, e, t, i: start + t, seen }));
      list.append(articles.at(-1));
    }
  };
  const rest = () => {
    if (!list.isConnected || articles.length === to - from) return;
    make(from + articles.length + AT_ONCE);
    setTimeout(rest);
  };
  make(side ? to : from + AT_ONCE);
  const jump = (t) => {
    if (t < from || t >= to) return go(link("episode", key, { turn: t }));
    make(to);
    if (!side) replace({ turn: t });
    strip.childNodes.forEach((button, i) => button.toggleAttribute("data-current", i === t));
    settle(articles[t - from]);
    return undefined;
  };
  const strip = h("nav.turnstrip", { "aria-label": "turns" });
  for (let t = 0; t < turns; t++) {
    const value = run.credit(part, run.first[e] + t);
    const said = `turn ${t}, ${value === null ? "no credit" : `credit ${number(value, true)}`}`;
    strip.append(
      h(
        "button",
        { class: tone(value, run.full), title: said, "aria-label": said, onclick: () => jump(t) },
        glyph(value, run.full),
      ),
    );
  }
  const members = run.members[run.group[e]];
  const place = members.indexOf(e);
  const beside = (by) =>
    members[place + by] !== undefined && go(link("episode", run.of("episode", members[place + by])));
  const pages =
    turns > PER_PAGE
      ? h(
          "p.pages",
          `turns ${from} to ${to - 1} of ${turns} `,
          from ? h("button", { onclick: () => jump(from - PER_PAGE) }, "earlier") : null,
          to < turns ? h("button", { onclick: () => jump(to) }, "later") : null,
        )
      : null;
  const node = h(
    "div",
    { class: side ? "column" : "page" },
    head(run, e, side ? null : beside, place, members),
    noteBox(run, key, notes),
    strip,
    gaps(run, group, e),
    pages,
    list,
    ending(run, e),
  );
  let current = turn;
  const step = (by) => {
    current = Math.max(0, Math.min(turns - 1, current + by));
    jump(current);
  };
  return {
    title: short(run.of("task", e) ?? key, 60),
    node,
    ready: () => {
      requestAnimationFrame(() => setTimeout(rest));
      if (params.has("turn") && !side && turns) jump(Math.min(turn, turns - 1));
    },
    keys: {
      j: () => step(1),
      k: () => step(-1),
      n: () => beside(1),
      p: () => beside(-1),
      g: () => go(link("group", run.groups[run.group[e]])),
      Escape: () => history.back(),
    },
  };
}

/** Scroll to a turn: those above it get their height only as they come into view, so once is not enough. */
function settle(turn, times = 4) {
  turn.scrollIntoView({ block: "start", behavior: "instant" });
  turn.focus({ preventScroll: true });
  if (times) requestAnimationFrame(() => settle(turn, times - 1));
}

export function unknown(key) {
  return {
    title: "not here",
    node: h("div.page", h("h1", "Not here"), h("p", "This page has no such key: ", told(short(key, 80)))),
  };
}

const COMPOSED =
  "the sum of turnkey.rewards, from which credit is computed: the penalty of an invalid action lowers the credit of its turn, not this return";

function head(run, e, beside, place, members) {
  const facts = [
    ["step", number(run.of("global_step", e))],
    ["seed", run.of("seed", e) ?? "–"],
    ["turns", number(run.of("turns", e))],
    ["env return", number(run.of("env_return", e)), "the sum of the environment's rewards"],
    ["composed return", number(run.of("composed_return", e)), COMPOSED],
    [
      "weights",
      run.of("weights_min", e) === run.of("weights_max", e)
        ? number(run.of("weights_min", e))
        : `${run.of("weights_min", e)} – ${run.of("weights_max", e)}`,
    ],
  ];
  const env = [run.of("env", e), run.of("kwargs", e), run.of("package", e)].filter(Boolean).join(" · ");
  return h(
    "header.head",
    h(
      "div",
      h(
        "p.crumbs",
        h("a", { href: link("episodes") }, "Episodes"),
        " / ",
        h("a", { href: link("group", run.groups[run.group[e]]) }, `group, ${place + 1} of ${members.length}`),
        run.branches ? ` / ${named(run, e)}` : null,
      ),
      h("h1", told(short(run.of("task", e) ?? "episode", 160))),
      h("p.sub", outcome(run, e), run.episodes.truncated[e] ? ", at a limit" : null, " · ", told(env)),
      forks(run, e),
      run.of("failed", e) ? h("div.failure", passage(run.of("failed", e), 1500)) : null,
    ),
    h(
      "div",
      definitions("dl.facts", facts),
      beside
        ? h(
            "p.besides",
            h("button", { disabled: place === 0, onclick: () => beside(-1) }, "← previous"),
            h("button", { disabled: place === members.length - 1, onclick: () => beside(1) }, "next →"),
            h("a.button", { href: link("group", run.groups[run.group[e]]) }, "graph of the group"),
          )
        : null,
    ),
  );
}

/** Where it comes from if it is a branch, and which branches go on from it. */
function forks(run, e) {
  const key = run.of("episode", e);
  const way = (to, text) => h("a", { href: link("episode", to, { turn: null }) }, text);
  const own = run.origin(e);
  const from = own?.key && run.byKey.has(own.key) ? way(own.key, branchTag(run, e)) : branchTag(run, e);
  const later = run.members[run.group[e]].filter((each) => run.of("parent", each) === key);
  const said = (each) => `turn ${run.origin(each).turn}: branch ${run.branch(each)}`;
  const on = later.map((each) => [" ", way(run.of("episode", each), said(each))]);
  if (!from && !on.length) return null;
  return h("p.sub.ways", from, on.length ? [from ? " · " : null, "forks at", on] : null);
}

/** What this page cannot show of an episode. */
function gaps(run, group, e) {
  const said = [];
  if (!group.known)
    said.push("The exact numbers of this episode are not in this file, which would be too large with them.");
  if (!group.texts) said.push("The texts of this episode are not in this file.");
  if (!run.counts[e]) said.push("The episode has no turns.");
  return said.length ? h("p.notes", said.join(" ")) : null;
}

function ending(run, e) {
  const result = run.outcome(e);
  return h("p", { class: `end ${result}` }, OUTCOMES[result], run.episodes.truncated[e] ? ", ended by a limit" : "");
}

/** Two episodes in columns. */
export async function beside(context) {
  const keys = context.key.split(" ");
  const sides = await Promise.all(keys.map((key) => conversation({ ...context, key, turn: 0, side: true })));
  return {
    title: "side by side",
    node: h(
      "div.page.full.beside",
      sides.map((side) => side.node),
    ),
    keys: { Escape: () => history.back() },
  };
}
