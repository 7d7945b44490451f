// The frame around the pages: which is shown, keys, theme, and what a server has that is new.

import { dispose } from "./charts.js";
import { compare } from "./compare.js";
import { open, outdated, source } from "./data.js";
import { clear, count, h, short, told } from "./dom.js";
import { beside, conversation } from "./episode.js";
import { episodes } from "./episodes.js";
import { groupPage } from "./group.js";
import { overview } from "./overview.js";
import { go, link, parse, replace } from "./route.js";

const PAGES = { run: overview, episodes, episode: conversation, beside, group: groupPage, compare };
const MENU = [
  ["run", "Run"],
  ["episodes", "Episodes"],
  ["group", "Group"],
  ["compare", "Compare"],
];
const POLL = 5000;
const FOLLOWING = new Set(["run", "episodes", "compare"]);
const KEYS = [
  ["j k", "next, previous row or turn"],
  ["Enter", "open"],
  ["n p", "next, previous episode or group"],
  ["g", "the episode's group"],
  ["x", "mark; two marked stand side by side"],
  ["1 2 3 4", "pages"],
  ["Esc", "back"],
];

const system = matchMedia("(prefers-color-scheme: dark)");
const root = document.documentElement;
const main = h("main", { id: "main", tabindex: -1 });
const bar = h("header.bar");
let loaded = null;
let current = {};
let turn = 0;

function dark(params) {
  const asked = params.get("theme");
  return asked ? asked === "dark" : system.matches;
}

/** Part of credit that is shown: an additive part, or their sum. */
function partOf(run, params) {
  const asked = params.get("part");
  return run.parts.includes(asked) ? asked : run.parts[0];
}

/** The page of the address. `again`: after the run was read anew, because the server had no more of what was open. */
async function show(again = false) {
  const mine = ++turn;
  current.leave?.();
  dispose();
  const route = parse();
  const run = loaded.runs[Number(route.params.get("run"))] ?? loaded.runs[0];
  const isDark = dark(route.params);
  root.dataset.theme = isDark ? "dark" : "light";
  const part = partOf(run, route.params);
  const make = PAGES[route.page] ?? overview;
  let made;
  try {
    made = await make({ ...route, runs: loaded.runs, run, part, dark: isDark });
  } catch (error) {
    if (!again && (await outdated().catch(() => false))) {
      loaded = await open();
      return mine === turn ? show(true) : undefined;
    }
    console.error(error);
    made = {
      title: "error",
      node: h("div.page", h("h1", "This page cannot be shown"), h("p", told(String(error)))),
    };
  }
  if (mine !== turn) return undefined; // another page was asked for while this one was loading
  current = made;
  const held = bar.contains(document.activeElement) ? document.activeElement.name : ""; // what is made anew loses it
  frame(route, run, part, isDark);
  clear(main, banner(run), made.node);
  document.title = `${short(made.title, 80)} · turnkey view`;
  scrollTo(0, 0);
  if (held) bar.querySelector(`[name="${held}"]`)?.focus();
  else if (document.activeElement === document.body && root.dataset.ready) main.focus({ preventScroll: true });
  made.ready?.();
  main.dataset.shown = location.hash;
  return undefined;
}

function frame(route, run, part, isDark) {
  const menu = MENU.map(([page, name]) =>
    h(
      "a",
      {
        href: link(page),
        "aria-current":
          page === route.page || (page === "episodes" && ["episode", "beside"].includes(route.page)) ? "page" : null,
      },
      name,
    ),
  );
  const runs =
    loaded.runs.length > 1
      ? h(
          "select",
          { "aria-label": "run", onchange: (event) => go(link("run", "", { run: event.target.value })) },
          loaded.runs.map((each, i) => h("option", { value: i, selected: each === run }, short(each.name, 40))),
        )
      : null;
  const parts =
    run.parts.length > 1
      ? h(
          "label.part-choice",
          h("span", "credit "),
          h(
            "select",
            {
              "aria-label": "part of the credit",
              name: "part",
              onchange: (event) => {
                replace({ part: event.target.value });
                show();
              },
            },
            run.parts.map((name) =>
              h(
                "option",
                { value: name, selected: name === part },
                name === "advantage" ? "all parts" : name.replace("part.", "").replaceAll("_", " "),
              ),
            ),
          ),
        )
      : null;
  clear(
    bar,
    h(
      "a.skip",
      {
        href: "#/",
        onclick: (event) => {
          event.preventDefault();
          main.focus();
        },
      },
      "to the content",
    ),
    h("span.brand", runs ?? told(short(run.name, 40))),
    h("nav", { "aria-label": "pages" }, menu),
    h("span.grow"),
    parts,
    h(
      "button.quiet",
      {
        name: "theme",
        "aria-label": isDark ? "light theme" : "dark theme",
        onclick: () => {
          replace({ theme: isDark ? "light" : "dark" });
          show();
        },
      },
      isDark ? "☀" : "☾",
    ),
    h("button.quiet", { "aria-label": "keys", onclick: keysShown }, "?"),
  );
}

/** What the file leaves out, on every page. */
function banner(run) {
  const said = [];
  for (const [what, groups, logged] of [
    ["exact numbers", run.withNumbers, run.logged_numbers],
    ["texts", run.withTexts, run.logged_texts],
  ]) {
    const kept = run.members.reduce((sum, members, g) => sum + (groups.has(g) ? members.length : 0), 0);
    const why = logged > groups.size ? "more would exceed its size, --max-mb" : "the log has no others";
    if (kept < run.size) said.push(`${what} of ${count(kept)} of ${count(run.size)} episodes (${why})`);
  }
  return said.length ? h("p.banner", { role: "note" }, `In this page: ${said.join(", ")}.`) : null;
}

function keysShown() {
  const dialog = h(
    "dialog.keys",
    h("h2", "Keys"),
    h(
      "dl",
      KEYS.map(([key, what]) =>
        h(
          "div",
          h(
            "dt",
            key.split(" ").map((each) => h("kbd", each)),
          ),
          h("dd", what),
        ),
      ),
    ),
    h("button", { onclick: () => dialog.close() }, "close"),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog")) return;
  if (["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) return;
  if (event.key === "Enter" && ["A", "BUTTON", "SUMMARY"].includes(event.target.tagName)) return;
  const page = MENU[Number(event.key) - 1];
  const action = event.key === "?" ? keysShown : page ? () => go(link(page[0])) : current.keys?.[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

/** Follow a run that goes on. */
async function follow() {
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, POLL));
    if (document.hidden) continue;
    try {
      const newer = await outdated();
      root.classList.remove("lost");
      if (!newer || document.querySelector("dialog")) continue;
      loaded = await open();
      if (!FOLLOWING.has(parse().page)) continue; // who reads an episode goes on reading it
      const top = scrollY;
      await show();
      scrollTo(0, top);
    } catch {
      root.classList.add("lost"); // the server is gone: what was read stays
    }
  }
}

async function begin() {
  document.body.append(bar, main, h("p.unseen", { id: "said", "aria-live": "polite" }));
  root.dataset.theme = dark(parse().params) ? "dark" : "light";
  loaded = await open();
  addEventListener("hashchange", () => show());
  addEventListener("keydown", pressed);
  system.addEventListener("change", () => show());
  await show();
  document.getElementById("reading").remove();
  performance.mark("usable");
  root.dataset.ready = "yes";
  if (source.live) follow();
}

begin();
