// A note of the reader on an episode: the server keeps it beside the log, where that folder is writable.

import { source } from "./data.js";
import { announce, clear, h, passage } from "./dom.js";

/** The notes of a run, and whether this page can write them. */
export async function readNotes(run) {
  if (!source.live) return { notes: run.comments, writable: false };
  const answer = await fetch(`notes/${run.number}`, { cache: "no-store" }).catch(() => null);
  return answer?.ok ? answer.json() : { notes: {}, writable: false }; // without a server what was read stays
}

/** The note on an episode, with a field for it if it can be written; null where there is neither. */
export function noteBox(run, key, { notes, writable }) {
  const note = Object.hasOwn(notes, key) ? notes[key] : "";
  if (!writable) return note ? h("section.own.note-box", h("h3", "note"), passage(note)) : null;
  const field = h("textarea", { name: "note", "aria-label": "note on this episode", placeholder: "a note on this episode" }, note);
  const state = h("span.hint", { "aria-live": "polite" });
  const write = async () => {
    const sent = JSON.stringify({ episode: key, note: field.value });
    const answer = await fetch(`notes/${run.number}`, { method: "POST", body: sent }).catch(() => null);
    const said = answer?.ok ? "saved" : `not saved: ${answer ? (await answer.text()) || answer.status : "the server is gone"}`;
    clear(state, said);
    announce(said);
  };
  const box = h("details.note-box", { open: note !== "" }, h("summary", "note"), field);
  box.append(h("p", h("button", { name: "save-note", onclick: write }, "save"), " ", state));
  return box;
}
