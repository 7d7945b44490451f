// What the ways through a rollout are called: the episode, and the branches that forked from it.

import { count, h } from "./dom.js";

/** "episode 2", "episode 2, branch 5": by the number of its rollout in the group; null of none. */
export function named(run, e) {
  if (e === undefined) return null;
  const before = run.members[run.group[e]].filter((each) => each <= e && !run.branch(each));
  return run.branch(e) ? `episode ${before.length}, branch ${run.branch(e)}` : `episode ${before.length}`;
}

/** "branch 5, from branch 2 at turn 3" as a tag; null of what is no branch. */
export function branchTag(run, e) {
  const from = run.origin(e);
  if (from === null) return null;
  const parent = from.branch ? `branch ${from.branch}` : "the first way";
  return h("span.tag", `branch ${run.branch(e)}, from ${parent} at turn ${from.turn}`);
}

/** A column of the table of episodes: "5 ← 2" is branch 5, which goes on from branch 2. */
export const branchColumn = (run) => ({
  key: "branch",
  label: "branch",
  className: "num slim branch",
  title: "branch of its rollout ← the one that it goes on from; 0: the first way through",
  cell: (e) => (run.branch(e) ? `${run.branch(e)} ← ${run.origin(e).branch}` : "0"),
});

/** "40 episodes", or with their branches apart. */
export function counted(run, rows) {
  const branches = rows.filter((e) => run.branch(e)).length;
  return `${count(rows.length - branches)} episodes${branches ? ` and ${count(branches)} branches` : ""}`;
}
