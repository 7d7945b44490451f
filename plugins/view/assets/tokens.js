// The response token by token: how much likelier a teacher finds each, by tint and line, and what credit it has of its own.

import { h, number, plain } from "./dom.js";
import { tone } from "./tone.js";

const FULL = 1; // of the gap, whose unit is the natural logarithm: the token is e times as likely, or a fraction of 1/e
const MOST = 5000;

/** A response as shaded tokens; null where they are not known, or too many. */
export function shaded(text, tokens) {
  if (!tokens || tokens.gap.length > MOST) return null;
  const characters = Array.from(text); // Python's: those beyond 16 bits count once
  let end = 0;
  const spans = tokens.lengths.map((length, n) => {
    const part = characters.slice(end, (end += length)).join("");
    if (!part) return null;
    const credit = tokens.advantage ? `, credit ${number(tokens.advantage[n], true)}` : "";
    const title = `gap ${number(tokens.gap[n], true)}${credit}`;
    return h("span", { class: `token ${tone(tokens.gap[n], FULL)}`, title }, plain(part));
  });
  return h(
    "div.passage",
    h("bdi", { dir: "auto" }, spans),
    h("p.hint", "shaded by the teacher's gap: ", key("plus3", "likelier"), " with its text, ", key("minus3", "less likely")),
  );
}

function key(name, text) {
  return h("span", { class: `token tone ${name}` }, text);
}
