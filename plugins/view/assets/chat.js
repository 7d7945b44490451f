// Texts of a conversation: a prompt by its roles, thoughts folded, a little Markdown. Every character of a text stays in
// its place: marks are made pale, not taken away, so that what is read and copied is what the log has.

import { copyButton, h, passage, plain, short } from "./dom.js";

const STYLED = 200000; // characters; longer texts are shown as they are
const FENCE = /^```[^\n]*$/gm;
const INLINE = /`[^`\n]{1,300}`|\*\*[^*\n]{1,300}\*\*|^#{1,6} [^\n]{1,300}$/gm;

/** A section: who speaks, a button that copies, and the text. */
export function section(kind, label, text, node = spoken(text)) {
  return h("section", { class: `said ${kind}` }, h("h3", label, copyButton(text, label)), node);
}

/** A text with thoughts folded and Markdown styled; `thoughts` are pairs of marks. */
export function spoken(text, thoughts = []) {
  const [before, thought, rest] = parted(text, thoughts);
  if (!thought) return passage(text, undefined, styled);
  return h(
    "div",
    before ? passage(before, undefined, styled) : null,
    h("details.thoughts", h("summary", "thoughts"), passage(thought)),
    rest ? passage(rest, undefined, styled) : null,
  );
}

/** What comes before the thoughts, the thoughts with their marks, and the rest; no thoughts where they never end. */
function parted(text, thoughts) {
  for (const [begin, end, alone] of thoughts) {
    const close = text.indexOf(end);
    if (close < 0) continue;
    const open = text.lastIndexOf(begin, close);
    if (open < 0 && !alone) continue; // else the prompt opened them
    const from = Math.max(0, open);
    const line = /^\n*/.exec(text.slice(close + end.length))[0];
    const to = close + end.length + line.length;
    return [text.slice(0, from), text.slice(from, to), text.slice(to)];
  }
  return [text, "", ""];
}

/** Nodes of a text in a small part of Markdown: blocks of code, code, bold, headings. */
function styled(text) {
  if (text.length > STYLED) return [plain(text)];
  const nodes = [];
  const fences = [...text.matchAll(FENCE)];
  let end = 0;
  for (let i = 0; i + 1 < fences.length; i += 2) {
    const close = fences[i + 1].index + fences[i + 1][0].length;
    nodes.push(...inline(text.slice(end, fences[i].index)));
    nodes.push(h("code.block", plain(text.slice(fences[i].index, close))));
    end = close;
  }
  return [...nodes, ...inline(text.slice(end))];
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    nodes.push(plain(text.slice(end, match.index)), emphasis(match[0]));
    end = match.index + match[0].length;
  }
  return [...nodes, plain(text.slice(end))];
}

function emphasis(text) {
  const [, mark, body, after] = /^(`|\*\*|#{1,6} )([\s\S]*?)(\1?)$/.exec(text);
  const pale = (marks) => (marks ? h("span.pale", marks) : null);
  return h(mark === "`" ? "code" : "strong", {}, pale(mark), plain(body), pale(after));
}

/** The messages of a prompt by the markup of its chat template; null where that does not account for all of it. */
export function messages(prompt, templates) {
  for (const [begin, end] of templates) {
    const [start, stop] = [new RegExp(begin, "y"), new RegExp(end, "g")];
    const made = [];
    let at = 0;
    for (;;) {
      start.lastIndex = at;
      const role = start.exec(prompt);
      stop.lastIndex = start.lastIndex;
      const close = role && stop.exec(prompt);
      if (!close) {
        const last = role && ["assistant", "model"].includes(role[1]);
        if (made.length && (last || at === prompt.length)) return made;
        break;
      }
      made.push({ role: role[1], content: prompt.slice(start.lastIndex, close.index) });
      at = stop.lastIndex;
    }
  }
  return null;
}

/** A prompt as a chat, its system message folded and its tokens one click away; as it is where no template fits. */
export function promptChat(prompt, templates) {
  const made = messages(prompt, templates);
  if (!made) return section("prompt", "prompt", prompt, passage(prompt, 1500));
  return h(
    "div.prompt",
    made.map(({ role, content }) =>
      role === "system"
        ? h("details.system", h("summary", "system"), section("prompt", "system", content))
        : section("prompt", short(role, 40), content, passage(content, 1500, styled)),
    ),
    h("details", h("summary", "prompt with its special tokens"), section("prompt", "prompt", prompt, passage(prompt, 1500))),
  );
}

/** The calls of tools in an action, a block each; null where it has none. */
export function calls(action) {
  if (!action?.startsWith('{"calls"')) return null;
  let made;
  try {
    made = JSON.parse(action).calls;
    if (!Array.isArray(made) || !made.every((call) => call && typeof call === "object")) return null;
    made = made.map((call) => [String(call.name ?? "no name"), JSON.stringify(call.arguments ?? {}, null, 2)]);
  } catch {
    return null; // nested too deep, or a name that is no text
  }
  return h(
    "ul.calls",
    { "aria-label": "tool calls" },
    made.map(([name, text]) => h("li", h("b", short(name, 100)), copyButton(text, "the arguments"), passage(text, 1500))),
  );
}
