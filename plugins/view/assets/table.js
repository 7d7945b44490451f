// A table of any length: rows have one height, and only those in view are there.

import { announce, clear, h } from "./dom.js";

/** A short table. `columns`: heading and class of each; `more`: text below the rows. */
export function plainTable(columns, rows, { tag = "table.plain", more = null } = {}) {
  const heads = columns.map(([name, kind = null]) => h("th", { scope: "col", class: kind }, name));
  const foot = more && h("tfoot", h("tr", h("td", { colspan: columns.length }, more)));
  return h(tag, h("thead", h("tr", heads)), h("tbody", rows), foot);
}

const ROW = 38;

/**
 * @param columns `{ key, label, className, cell(row), title }`; those with a key sort
 * @param rows what stands in the rows, in order
 * @param sort the key sorted by, with a minus for downwards
 */
export class Table {
  constructor({ columns, label, sort, onsort, onopen, opened = () => "" }) {
    Object.assign(this, { columns, sort, onsort, onopen, opened, rows: [], chosen: -1, drawn: "" });
    this.body = h("tbody");
    this.head = h("tr", { "aria-rowindex": 1 });
    this.table = h("table.rows", { "aria-label": label }, h("thead", this.head), this.body);
    this.box = h(
      "div.scroll",
      { tabindex: 0, role: "region", "aria-label": label, onscroll: () => this.draw() },
      this.table,
    );
    this.headings();
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  headings() {
    clear(
      this.head,
      this.columns.map(({ key, label, className, title }) => {
        const [name, down] = [this.sort?.replace(/^-/, ""), this.sort?.startsWith("-")];
        const mine = key && name === key;
        const order = mine ? (down ? "descending" : "ascending") : key ? "none" : null;
        const next = mine && down ? key : mine ? `-${key}` : key;
        const mark = h("span.order", { "aria-hidden": "true" }, mine ? (down ? " ↓" : " ↑") : "");
        const content = key
          ? h("button.sort", { title: title ?? null, onclick: () => this.onsort(next) }, label, mark)
          : label;
        return h("th", { scope: "col", class: className ?? null, "aria-sort": order }, content);
      }),
    );
  }

  show(rows, chosen = -1) {
    this.rows = rows;
    this.chosen = Math.min(chosen, rows.length - 1);
    this.table.setAttribute("aria-rowcount", rows.length + 1);
    this.drawn = "";
    this.draw();
  }

  draw() {
    const visible = Math.ceil((this.box.clientHeight || 800) / ROW) + 1;
    const first = Math.max(0, Math.min(Math.floor(this.box.scrollTop / ROW) - 4, this.rows.length - visible));
    const end = Math.min(this.rows.length, first + visible + 8);
    const state = `${first} ${end} ${this.chosen}`;
    if (state === this.drawn) return;
    this.drawn = state;
    clear(this.body, this.space(first), ...this.made(first, end), this.space(this.rows.length - end));
  }

  made(first, end) {
    const rows = [];
    for (let i = first; i < end; i++) {
      const row = this.rows[i];
      const open = () => this.onopen(row);
      const chosen = i === this.chosen;
      const at = { "aria-rowindex": i + 2, class: chosen ? "chosen" : null, "aria-current": chosen ? "true" : null };
      rows.push(
        h(
          "tr",
          { ...at, onclick: open },
          this.columns.map(({ className, cell }) => h("td", { class: className ?? null }, cell(row))),
        ),
      );
    }
    return rows;
  }

  space(rows) {
    const row = h("tr.space", { "aria-hidden": "true" }, h("td"));
    row.style.height = `${rows * ROW}px`;
    return rows > 0 ? row : null;
  }

  /** Choose the row `by` further down. */
  move(by) {
    if (!this.rows.length) return;
    this.chosen = Math.max(0, Math.min(this.rows.length - 1, this.chosen + by));
    const top = this.chosen * ROW;
    const room = this.box.clientHeight - 2 * ROW;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top > this.box.scrollTop + room) this.box.scrollTop = top - room;
    this.draw();
    announce(this.opened(this.rows[this.chosen]));
  }

  open() {
    if (this.chosen >= 0) this.onopen(this.rows[this.chosen]);
  }
}
