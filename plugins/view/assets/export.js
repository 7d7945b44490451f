// Episodes as JSON lines, in the form of `turnkey view --export`.

import { messages } from "./chat.js";

/** A line per episode of `rows`: all in one text may be longer than a text can be. */
export async function jsonLines(run, rows) {
  const lines = [];
  for (const e of rows) lines.push(JSON.stringify(record(run, e, await run.load(run.group[e]))) + "\n");
  return lines;
}

function record(run, e, group) {
  const start = group.start.get(e);
  const rows = Array.from({ length: run.counts[e] }, (_, t) => start + t);
  const whole = rows.length === (run.of("turns", e) ?? rows.length);
  const complete = whole && rows.every((i) => group.text("response", i) !== null);
  const turns = rows.map((i, t) => {
    const turn = known(Object.keys(group.columns), (name) => group.at(name, i));
    if (turn.advantage === undefined) turn.no_credit = run.reason(run.first[e] + t);
    const prompt = group.text("prompt", i);
    return prompt === null ? turn : { ...turn, prompt_tail: prompt };
  });
  // The page has the name of a task in place of its description.
  const { task: task_name, ...episode } = known(Object.keys(run.episodes), (name) => run.of(name, e));
  const of = { run: run.name, task_name, ...episode, group: run.groups[run.group[e]], outcome: run.outcome(e) };
  return { ...of, messages: complete ? spoken(run, group, rows) : null, turns };
}

function spoken(run, group, rows) {
  const prompt = rows.length ? (group.text("prompt", rows[0]) ?? "") : "";
  const first = messages(prompt, run.templates) ?? (prompt ? [{ role: "user", content: prompt }] : []);
  const turns = rows.flatMap((i) => [
    { role: "assistant", content: group.text("response", i) },
    {
      role: group.at("action", i)?.startsWith('{"calls"') ? "tool" : "user",
      content: group.text("observation", i) ?? "",
    },
  ]);
  return [...first, ...turns];
}

function known(names, value) {
  return Object.fromEntries(names.map((name) => [name, value(name)]).filter(([, of]) => of !== null && of !== undefined));
}
