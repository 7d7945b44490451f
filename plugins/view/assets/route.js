// The fragment is the whole state: `#/episode/KEY?turn=7&part=part.step_level`. Back, links and copies of them work.

const EVERYWHERE = ["part", "theme", "run"];

export function parse(fragment = location.hash) {
  const [path, query = ""] = fragment.replace(/^#\/?/, "").split("?");
  const [page, ...rest] = path.split("/");
  let key = "";
  try {
    key = decodeURIComponent(rest.join("/"));
  } catch {
    // A link that was cut off: the page says that it does not know the key.
  }
  const words = query.replace("outcome=won", "outcome=solved").replace("outcome=lost", "outcome=unsolved"); // older
  return { page: page || "run", key, params: new URLSearchParams(words) };
}

/** A link to a page; what holds everywhere is taken along. */
export function link(page, key = "", params = {}) {
  const query = new URLSearchParams();
  const now = parse().params;
  for (const name of EVERYWHERE) if (now.has(name)) query.set(name, now.get(name));
  for (const [name, value] of Object.entries(params)) {
    if (value === null || value === undefined || value === "") query.delete(name);
    else query.set(name, String(value));
  }
  const path = key === "" ? page : `${page}/${encodeURIComponent(key)}`;
  return `${query}` ? `#/${path}?${query}` : `#/${path}`;
}

/** Change parameters of the page that is shown, without a step in the history. */
export function replace(changes) {
  const { page, key, params } = parse();
  const all = Object.fromEntries(params);
  history.replaceState(null, "", link(page, key, { ...all, ...changes }));
}

export function go(where) {
  location.hash = where;
}
