// A turn: its credit, what it is made of, what was compared with what, the texts, the rewards.

import { calls, promptChat, section, spoken } from "./chat.js";
import { count, definitions, h, number, passage, short, told } from "./dom.js";
import { outcome } from "./episodes.js";
import { link } from "./route.js";
import { badge, tone } from "./tone.js";
import { shaded } from "./tokens.js";
import { named } from "./ways.js";

/** State -> turns of the group that were in it; one that branches share is there once. */
export function states(group) {
  const found = new Map();
  for (let i = 0; i < group.rows; i++) {
    const state = group.at("anchor", i);
    if (state === null || group.owner(i) !== null) continue;
    if (!found.has(state)) found.set(state, []);
    found.get(state).push(i);
  }
  return found;
}

/** Turn `t` of episode `e`, which is turn `i` of its group. */
export function article({ run, part, group, e, t, i, seen }) {
  const all = run.first[e] + t;
  const value = run.credit(part, all);
  const action = group.at("action", i);
  const valid = run.columns.valid.values[all] === 1;
  const said = group.text("response", i);
  const answer = group.text("observation", i);
  const prompt = group.text("prompt", i);
  const note = group.at("parse_note", i);
  const called = calls(action);
  const trained = group.at("trained_by", i);
  const others = JSON.parse(group.text("opponents", i) ?? "[]");
  return h(
    "article",
    { class: `turn ${tone(value, run.full)}`, tabindex: -1, "aria-label": `turn ${t}` },
    h(
      "header",
      h("span.which", t),
      h(
        "h2.action",
        action === null ? h("i", "no action") : told(short(action, 300)),
        valid ? null : h("span.invalid", "invalid"),
      ),
      value === null ? h("span.why", run.reason(all) || "no value in this part") : badge(value, run.full),
    ),
    value === null ? null : parts(run, group, all, i),
    trained === null ? null : h("p.hint.shared", "Shared, trained once: in ", otherWay(run, trained, t), "."),
    note ? h("p.note", "The parser: ", told(note)) : null,
    others.filter((other) => other.before).map(ofOther),
    prompt && t === 0 ? promptChat(prompt, run.templates) : null,
    prompt && t > 0 ? h("details", h("summary", "end of the prompt"), h("div.said.prompt", passage(prompt))) : null,
    drawn(group.pictures(i)),
    said === null ? null : section("response", "response", said, shaded(said, group.tokens(i)) ?? spoken(said, run.thoughts)),
    called,
    others.filter((other) => !other.before).map(ofOther),
    answer === null ? null : section("observation", called ? "tool results" : "environment", answer, passage(answer)),
    rewards(group, i),
    compared(run, part, group, i, seen),
  );
}

/** A turn of a role that the policy does not play. */
function ofOther({ role, by, response, invalid }) {
  return section("opponent", `opponent ${role} (${by})${invalid ? `, invalid: ${invalid}` : ""}`, response);
}

/** Thumbnails, which a click enlarges; the names of pictures that are not here. */
function drawn(pictures) {
  if (!pictures.length) return null;
  const made = pictures.map(([name, url]) => {
    const [size, digest] = name.split("-");
    const label = `picture ${size} ${digest.slice(0, 6)}`;
    if (url === null) return h("span.hint", `[${label}]`);
    const toggle = ({ currentTarget: button }) =>
      button.setAttribute("aria-expanded", String(button.getAttribute("aria-expanded") !== "true"));
    const look = { class: "picture", title: label, "aria-expanded": "false", onclick: toggle };
    return h("button", look, h("img", { src: url, alt: label }));
  });
  return h("div.pictures", made);
}

/** A link to the turn in another way through the same rollout. */
function otherWay(run, key, t) {
  const name = named(run, run.byKey.get(key));
  return name === null ? "an episode that is not here" : h("a", { href: link("episode", key, { turn: t }) }, name);
}

/** The credit's parts, which add up to it, and what the update made of it. */
function parts(run, group, all, i) {
  const sum = run.parts.slice(1).map((name) => {
    const value = run.credit(name, all);
    const label = name.replace("part.", "");
    return h(
      "span.part",
      { title: run.meanings[name] ?? null },
      told(label.replaceAll("_", " ")),
      " ",
      h("b", number(value, true)),
    );
  });
  const meant = (name, text) => (run.meanings[name] ? h("span", { title: run.meanings[name] }, told(text)) : text);
  const further = ["value", "value_target", "kl", "progress_advantage", "ratio", "ratio_max", "clip_share", "entropy"].map(
    (name) => [name.replaceAll("_", " "), group.at(name, i)],
  );
  const levels = group
    .family("level.")
    .map((name) => [meant(`level.${name}`, name.replaceAll("_", " ")), group.at(`level.${name}`, i)]);
  const sizes = group
    .family("size.")
    .map((name) => [meant(`size.${name}`, `turns compared, ${name.replaceAll("_", " ")}`), group.at(`size.${name}`, i)]);
  const added = sum.flatMap((each, n) => (n ? [h("span.and", "+"), each] : [each]));
  const numbers = [...levels, ...sizes, ...further]
    .filter(([, value]) => value !== null)
    .map(([name, value]) => [name, number(value)]);
  return h("div.credit", sum.length ? h("p.parts", added) : null, numbers.length ? definitions("dl.numbers", numbers) : null);
}

function rewards(group, i) {
  const total = group.at("composed_reward", i);
  if (total === null) return null;
  const named = group
    .family("composed_reward.")
    .map((name) => [name, group.at(`composed_reward.${name}`, i)])
    .filter(([, value]) => value !== null);
  const terms = named.length > 1 ? ` = ${named.map(([name, value]) => `${number(value)} ${name}`).join(" + ")}` : "";
  const penalty = group.at("penalty", i);
  const cost = [
    ["model", "seconds_model"],
    ["environment", "seconds_env"],
  ]
    .map(([name, column]) => [name, group.at(column, i)])
    .filter(([, value]) => value !== null);
  return h(
    "p.cost",
    h("span", `reward ${number(group.at("reward", i))}`),
    terms || total !== group.at("reward", i)
      ? h(
          "span",
          { title: "the sum of turnkey.rewards, from which credit is computed" },
          `composed reward ${number(total)}`,
          told(terms),
        )
      : null,
    penalty ? h("span", { title: "lowers the credit of this turn, not its reward" }, `penalty ${number(penalty)}`) : null,
    group.at("prompt_tokens", i) === null
      ? null
      : h(
          "span",
          `${count(group.at("prompt_tokens", i))} tokens in${group.at("prompt_cut", i) ? " (cut)" : ""}, ${number(group.at("response_tokens", i))} out`,
        ),
    group.at("extra", i) ? h("span", told(short(group.at("extra", i), 300))) : null,
    cost.length ? h("span", cost.map(([name, value]) => `${name} ${number(value)} s`).join(", ")) : null,
  );
}

/** The other turns of the group that were in the same state. */
function compared(run, part, group, i, seen) {
  const mine = group.owner(i) ?? i;
  const others = (seen.get(group.at("anchor", i)) ?? []).filter((each) => each !== mine);
  if (!others.length) return null;
  const box = h(
    "details.compared",
    h("summary", `${others.length} other ${others.length > 1 ? "turns" : "turn"} of the group in this state`),
  );
  box.addEventListener(
    "toggle",
    () => box.open && box.childElementCount === 1 && box.append(turnList(run, part, group, others)),
    { once: false },
  );
  return box;
}

/** Turns of a group as a table of links. */
export function turnList(run, part, group, rows) {
  const starts = [...group.start].sort((a, b) => a[1] - b[1]);
  const made = rows.slice(0, 200).map((i) => {
    const [e, start] = starts.findLast(([each, first]) => first <= i && run.counts[each]);
    const value = run.credit(part, run.first[e] + i - start);
    return h(
      "tr",
      h(
        "td",
        h("a", { href: link("episode", run.of("episode", e), { turn: i - start }) }, `${named(run, e)}, turn ${i - start}`),
      ),
      h("td", outcome(run, e)),
      h("td", told(short(group.at("action", i) ?? "no action", 80))),
      h("td.num", badge(value, run.full)),
    );
  });
  return h(
    "table.plain",
    h("tbody", made),
    rows.length > 200 ? h("tfoot", h("tr", h("td", { colspan: 4 }, `and ${rows.length - 200} more`))) : null,
  );
}
