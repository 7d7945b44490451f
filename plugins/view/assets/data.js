// The blocks of data: in this file as base64, or behind this address when it is served. An index of each run is decoded
// at the start; numbers and texts of a group when they are looked at.

const decoder = new TextDecoder();
export const source = { live: false, version: "" };

async function unpacked(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

/** The element of a block, once the browser has read all of it: the next script follows it then. */
async function written(name) {
  for (;;) {
    const element = document.getElementById(name);
    if (element && (element.nextElementSibling?.localName === "script" || document.readyState !== "loading")) return element;
    if (document.readyState !== "loading") throw new Error(`${name}: not in this file`);
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
}

async function block(name, version) {
  if (source.live) {
    const answer = await fetch(`data/${name}?version=${version}`);
    if (!answer.ok) throw new Error(`${name}: ${answer.status}`);
    return unpacked(await answer.arrayBuffer());
  }
  const text = atob((await written(name)).textContent);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return unpacked(bytes);
}

const json = async (name, version) => JSON.parse(decoder.decode(await block(name, version)));

const ARRAYS = { int16: Int16Array, uint8: Uint8Array };
const MISSING = -32768;
const KEPT = 12;

/** A run: episodes by column, and of all turns their credit. */
export class Run {
  constructor(buffer, version) {
    this.version = version; // numbers of groups change with it
    const length = new DataView(buffer).getUint32(0, true);
    Object.assign(this, JSON.parse(decoder.decode(new Uint8Array(buffer, 4, length))));
    this.columns = {};
    for (const [name, { type, at, length: count, scale }] of Object.entries(this.turns)) {
      this.columns[name] = { values: new ARRAYS[type](buffer, 4 + length + at, count), scale };
    }
    this.size = this.counts.length;
    this.branches = this.episodes.branch.filter((branch) => branch > 0).length;
    this.first = new Uint32Array(this.size + 1);
    this.counts.forEach((count, e) => (this.first[e + 1] = this.first[e] + count));
    this.byKey = new Map(this.episodes.episode.map((key, e) => [key, e]));
    this.byGroup = new Map(this.groups.map((key, g) => [key, g]));
    this.members = this.groups.map(() => []);
    this.group.forEach((g, e) => this.members[g].push(e));
    this.withNumbers = new Set(this.numbers);
    this.withTexts = new Set(this.texts);
    this.summaries = {};
    this.cache = new Map();
  }

  /** What an episode has in a column. */
  of(name, e) {
    const column = this.episodes[name];
    return column.codes ? (column.values[column.codes[e]] ?? null) : column[e];
  }

  /** Which branch of its rollout it is; 0: the first way through. */
  branch(e) {
    return this.episodes.branch[e] ?? 0;
  }

  /** Whether another branch trains turn `t` (of all): such turns count there. */
  shared(t) {
    return this.columns.shared.values[t] === 1;
  }

  /** What a branch goes on from, and the first turn of its own; null of what is none. */
  origin(e) {
    if (!this.branch(e)) return null;
    let turn = 0;
    while (turn < this.counts[e] && this.shared(this.first[e] + turn)) turn++;
    const key = this.of("parent", e);
    return { key, branch: this.branch(this.byKey.get(key)), turn };
  }

  outcome(e) {
    if (this.of("failed", e) !== null) return "failed";
    return this.episodes.success[e] ? "solved" : "unsolved";
  }

  /** Credit of turn `t` (of all), or null. */
  credit(part, t) {
    const { values, scale } = this.columns[part];
    return values[t] === MISSING ? null : values[t] * scale;
  }

  reason(t) {
    return this.reasons[this.columns.reason.values[t]];
  }

  /** Lowest and highest credit and the share of invalid turns of each episode. */
  summary(part) {
    return (this.summaries[part] ??= this.summed(part));
  }

  summed(part) {
    const { values, scale } = this.columns[part];
    const valid = this.columns.valid.values;
    const worst = [],
      best = [],
      invalid = [];
    for (let e = 0; e < this.size; e++) {
      let low = Infinity,
        high = -Infinity,
        bad = 0;
      for (let t = this.first[e]; t < this.first[e + 1]; t++) {
        bad += 1 - valid[t];
        if (values[t] === MISSING) continue;
        low = Math.min(low, values[t]);
        high = Math.max(high, values[t]);
      }
      worst.push(low === Infinity ? null : low * scale);
      best.push(high === -Infinity ? null : high * scale);
      invalid.push(this.counts[e] ? bad / this.counts[e] : null);
    }
    return { worst, best, invalid };
  }

  /** Exact numbers and texts of a group: `numbers` and `texts` are null where the file leaves them out. */
  async load(g) {
    if (!this.cache.has(g)) {
      this.cache.set(g, this.fetched(g));
      if (this.cache.size > KEPT) this.cache.delete(this.cache.keys().next().value);
    }
    return this.cache.get(g);
  }

  async fetched(g) {
    const [numbers, texts] = await Promise.all([
      this.withNumbers.has(g) ? json(`numbers-${this.number}-${g}`, this.version) : null,
      this.withTexts.has(g) ? this.loadTexts(g) : null,
    ]);
    return new Group(this, g, numbers, texts);
  }

  async loadTexts(g) {
    return json(`texts-${this.number}-${g}`, this.version);
  }
}

/** The turns of a group, episode after episode. */
class Group {
  constructor(run, g, numbers, texts) {
    Object.assign(this, { run, g, texts, known: numbers !== null });
    this.columns = numbers?.columns ?? {};
    this.start = new Map();
    let row = 0;
    for (const e of run.members[g]) {
      this.start.set(e, row);
      row += run.counts[e];
    }
    this.rows = row;
  }

  /** Turn `i` of the group in a column; null where there is none. */
  at(name, i) {
    const column = this.columns[name];
    if (!column) return null;
    return column.codes ? (column.values[column.codes[i]] ?? null) : (column[i] ?? null);
  }

  /** The turn that trains turn `i`, which several branches share; null where it is its own. */
  owner(i) {
    const e = this.run.byKey.get(this.at("trained_by", i));
    return e === undefined ? null : this.start.get(e) + this.at("turn", i);
  }

  text(name, i) {
    if (!this.texts) return null;
    return this.texts.values[this.texts[name][i]] ?? null;
  }

  /** The pictures that turn `i` showed, each with its name and as a URL that holds it, null where it is not here. */
  pictures(i) {
    const names = (this.at("images", i) ?? "").split(" ").filter((name) => /^\d+x\d+-[0-9a-f]{16}$/.test(name));
    const held = this.texts?.pictures ?? {};
    return names.map((name) => [name, held[name] ? `data:image/png;base64,${held[name]}` : null]);
  }

  /** Of the tokens of turn `i`: characters that each adds to the response, gap, advantage; null where not known. */
  tokens(i) {
    return this.texts?.tokens[i] ?? null;
  }

  /** Its columns that begin with a prefix, without it. */
  family(prefix) {
    return Object.keys(this.columns)
      .filter((name) => name.startsWith(prefix))
      .map((name) => name.slice(prefix.length));
  }
}

const TRIES = 5;

/** All runs of this page, each with its index. A server has its newest version only: what comes between begins anew. */
export async function open(tries = TRIES) {
  source.live = document.getElementById("page") === null;
  if (!source.live) return opened();
  source.version = await version();
  try {
    return await opened();
  } catch (error) {
    if (!tries || (await version()) === source.version) throw error;
    return open(tries - 1);
  }
}

/** Whether the server has something newer than what is open here. */
export async function outdated() {
  return source.live && (await version()) !== source.version;
}

async function opened() {
  const now = source.version;
  const page = await json("page", now);
  const runs = [];
  for (let i = 0; i < page.runs; i++) runs.push(new Run(await block(`run-${i}`, now), now));
  return { page, runs };
}

/** What the server has now: it changes when a run wrote something. */
export async function version() {
  const answer = await fetch("version", { cache: "no-store" });
  if (!answer.ok) throw new Error(`version: ${answer.status}`);
  return (await answer.text()).trim();
}
