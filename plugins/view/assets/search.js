// Search in all texts: group after group, in slices that leave the page usable, and to be stopped at any time.

import { count } from "./dom.js";

const SLICE = 25; // milliseconds

export class TextSearch {
  constructor(run) {
    this.run = run;
    this.found = null;
    this.turn = 0;
  }

  stop() {
    this.turn++;
    this.found = null;
  }

  /** Episodes among `rows` with a text that holds `words`; false where another search took its place. */
  async over(words, rows, say) {
    const turn = ++this.turn;
    this.found = null;
    if (!words) return (say(""), true);
    const wanted = words.toLowerCase();
    const { run } = this;
    const groups = new Set(rows.map((e) => run.group[e]).filter((g) => run.withTexts.has(g)));
    const found = new Set();
    let done = 0;
    let begun = performance.now();
    for (const g of groups) {
      const texts = await run.loadTexts(g).catch(() => null);
      if (turn !== this.turn) return false;
      if (texts === null) return (say("the run has gone on: search again"), false);
      const hits = texts.values.map((text) => text.toLowerCase().includes(wanted));
      let i = 0;
      for (const e of run.members[g]) {
        for (let t = 0; t < run.counts[e]; t++, i++) {
          if (hits[texts.response[i]] || hits[texts.observation[i]] || hits[texts.prompt[i]]) found.add(e);
        }
      }
      done++;
      if (performance.now() - begun > SLICE) {
        say(`searched ${count(done)} of ${count(groups.size)} groups`);
        await new Promise((resolve) => setTimeout(resolve));
        begun = performance.now();
        if (turn !== this.turn) return false;
      }
    }
    this.found = found;
    const without = new Set(rows.map((e) => run.group[e])).size - groups.size;
    say(`found in ${count(found.size)} episodes${without ? `; ${count(without)} groups have no texts here` : ""}`);
    return true;
  }
}
