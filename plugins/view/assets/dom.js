// The only place that makes elements. Children are text or nodes and never HTML, attributes are those listed, and links
// lead to fragments of this page: whatever a log holds can then only be shown.

const ATTRIBUTES = new Set(
  (
    "alt autocomplete checked class colspan dir disabled for href id lang list max min name open " +
    "placeholder role scope selected spellcheck src step tabindex title type value " +
    "cx cy d height marker-end markerHeight markerUnits markerWidth orient points r refX refY rx " +
    "text-anchor transform viewBox width x x1 x2 y y1 y2"
  ).split(" "),
);
const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["circle", "defs", "g", "line", "marker", "path", "polygon", "polyline", "rect", "svg", "text"]);

/**
 * An element: `h("p.hint", { title }, child, ...)`; classes and attributes may be left out. `on...` attributes are
 * listeners, `aria-...` are allowed, null and false leave an attribute out.
 */
export function h(tag, ...children) {
  const [type, ...classes] = tag.split(".");
  const made = DRAWN.has(type) ? document.createElementNS(SVG, type) : document.createElement(type);
  if (classes.length) made.setAttribute("class", classes.join(" "));
  const attributes = children[0]?.constructor === Object ? children.shift() : {};
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) {
      made.addEventListener(name.slice(2), value);
    } else if (ATTRIBUTES.has(name) || name.startsWith("aria-") || name.startsWith("data-")) {
      if (name === "href" && !String(value).startsWith("#")) throw new Error(`no link of this page: ${value}`);
      if (name === "src" && !/^data:image\/png;base64,[\w+/=]*$/.test(value))
        throw new Error("no picture of this page");
      made.setAttribute(name, value === true ? "" : String(value));
    } else {
      throw new Error(`attribute ${name} is not listed`);
    }
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    made.append(child instanceof Node ? child : String(child));
  }
  return made;
}

/** Names with their values, `[name, value, title]`, of which the title may be left out. */
export function definitions(tag, entries) {
  const made = entries.map(([name, value, title = null]) => h("div", { title }, h("dt", name), h("dd", value)));
  return h(tag, made);
}

export function clear(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

const NAMES = {
  0x061c: "ALM",
  0x200b: "ZWSP",
  0x200e: "LRM",
  0x200f: "RLM",
  0x202a: "LRE",
  0x202b: "RLE",
  0x202c: "PDF",
  0x202d: "LRO",
  0x202e: "RLO",
  0x2028: "LS",
  0x2029: "PS",
  0x2066: "LRI",
  0x2067: "RLI",
  0x2068: "FSI",
  0x2069: "PDI",
  0xfeff: "BOM",
};
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g;

/** A text of others with control characters as pictures and those that turn the direction as their names. */
export function plain(text) {
  return String(text)
    .replace(/\r\n/g, "\n")
    .replace(HIDDEN, (character) => {
      const code = character.codePointAt(0);
      if (code < 0x20) return String.fromCharCode(0x2400 + code);
      if (code === 0x7f) return "\u2421";
      return `\u27e6${NAMES[code] ?? code.toString(16)}\u27e7`;
    });
}

/** A text of others, whose direction is its own affair. */
export function told(text, className = null) {
  return h("bdi", { dir: "auto", class: className }, plain(text));
}

export function short(text, length) {
  const line = plain(text).replace(/\s+/g, " ").trim();
  return line.length > length ? `${line.slice(0, length - 1)}…` : line;
}

const LONG = 20000;

/** A text as written, of which the beginning is shown until all is asked for. `styled` makes nodes of it. */
export function passage(text, limit = LONG, styled = (part) => [plain(part)]) {
  const box = h("div.passage");
  const whole = () => h("bdi", { dir: "auto" }, styled(text));
  if (text.length <= limit * 1.2) return (clear(box, whole()), box);
  const more = h("button.quiet", { onclick: () => clear(box, whole()) }, `show all ${count(text.length)} characters`);
  clear(box, h("bdi", { dir: "auto" }, styled(text.slice(0, limit))), h("p", "… ", more));
  return box;
}

/** A button that copies a text as the log has it; a page from a file may have no other way than a selection. */
export function copyButton(text, what) {
  const copied = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = h("textarea.unseen");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    announce("copied");
  };
  return h("button.quiet.copy", { "aria-label": `copy ${what}`, title: `copy ${what}`, onclick: copied });
}

/** Hand texts to the reader as a file. */
export function save(name, texts) {
  const link = h("a");
  link.href = URL.createObjectURL(new Blob(texts, { type: "application/jsonl" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

export function count(number) {
  return Math.round(number).toLocaleString("en-US");
}

/** A number for reading: at most three significant digits below 1,000; of credit always with its sign. */
export function number(value, signed = false) {
  if (value === null || value === undefined) return "–";
  if (value === true || value === false) return value ? "yes" : "no";
  const size = Math.abs(value);
  let text;
  if (size >= 1e5) text = size.toExponential(2).replace("+", "");
  else if (size >= 1000) text = count(size);
  else if (size >= 100) text = size.toFixed(0);
  else if (size >= 0.095 || size === 0) text = size.toFixed(2);
  else if (size >= 0.001) text = size.toPrecision(2);
  else text = size.toExponential(1);
  if (!signed && Number.isInteger(size)) text = count(size);
  return value < 0 ? `−${text}` : signed && value > 0 ? `+${text}` : text;
}

/** Says a change to who does not see it. */
export function announce(text) {
  document.getElementById("said").textContent = text;
}
