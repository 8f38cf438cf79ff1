// The engines of a run as a table.

import { stateMark } from "./marks.js";
import { LATE, lostRows, REWOUND, worstDrop } from "./notices.js";
import { spark } from "./series.js";
import { fmt, plain } from "./text.js";
import { attr, h, put, rows } from "./ui.js";

const HEADS = ["Engine", "State", "Lag", "Rows/s, 2 min", "In flight", "Queued", "Dropped",
  "Weights", "Agent", "Host", "Last seen"];
const RIGHT = new Set([2, 4, 5, 6, 7, 10]);

/** The card of engines; `set(engines, href)` fills it, with href(query) of the list of traces. */
export function enginesCard() {
  const count = h("span", { class: "muted" });
  const body = h("tbody");
  const table = h("div", { class: "sideways", tabindex: 0, role: "region",
    "aria-label": "Engines" },
  h("table", null, h("thead", null, h("tr", null, HEADS.map((text, i) =>
    h("th", { scope: "col", class: RIGHT.has(i) ? "right" : null }, text)))), body));
  const element = h("section", { class: "card engines", "aria-label": "Engines" },
    h("header", null, h("h2", null, "Engines"), count), table);
  return {
    element,
    focus() {
      table.focus();
      table.scrollIntoView({ block: "nearest" });
    },
    set(engines, href) {
      const [live, closed] = ["live", "closed"].map((state) =>
        engines.filter((one) => one.state === state).length);
      const open = engines.length - closed;
      put(count, [open === 0 ? "none is connected" : `${fmt.int(live)} of ${fmt.int(open)} on time`,
        ...(closed > 0 ? [`${fmt.int(closed)} closed`] : [])].join(", "));
      table.hidden = engines.length === 0;
      rows(body, engines, (one) => one.engine, make, (row, one) => fill(row, one, href));
    },
  };
}

function make() {
  const link = h("a", null, h("bdi"));
  const shards = h("span", { class: "muted small" });
  const gone = h("span", { class: "lost-rows small" });
  const state = stateMark();
  const line = spark();
  const rate = h("span", { class: "small" });
  const row = h("tr", null,
    h("td", null, link, " ", shards, " ", gone), h("td", null, state.element),
    h("td", { class: "right" }),
    h("td", null, h("span", { class: "rate" }, line.element, rate)), h("td", { class: "right" }),
    h("td", { class: "right" }), h("td", { class: "right" }), h("td", { class: "right" }),
    h("td", { class: "muted" }), h("td", { class: "muted" }), h("td", { class: "right muted" }));
  row.parts = { link, shards, gone, state, line, rate };
  return row;
}

function fill(row, one, href) {
  const { link, shards, gone, state, line, rate } = row.parts;
  const [, , lag, , flight, queued, dropped, weights, agent, host, seen] = row.children;
  attr(link, "href", href({ engine: one.engine }));
  put(link.firstChild, plain(one.engine));
  const closed = one.state === "closed" ? "" : names(one.shards_closed);
  put(shards, [names(one.shards), closed && `(closed: ${closed})`].filter(Boolean).join(" "));
  const missing = names(one.shards_gone);
  put(gone, missing && `without ${missing}`);
  state.set(one.state);
  attr(row, "data-engine", one.state);
  attr(lag, "class", one.lag > LATE ? "right lost-rows" : "right");
  put(lag, one.lag > 0 ? fmt.duration(one.lag) : "–");
  line.set(one.series);
  put(rate, fmt.si(one.rows_per_second));
  put(flight, one.in_flight > 0 ? fmt.si(one.in_flight) : "–");
  put(queued, bytes(one.queued_bytes, one.spilled_bytes));
  const lost = lostRows(one.dropped);
  const rewound = one.dropped[REWOUND] ?? 0;
  put(dropped, lost > 0 ? `${fmt.si(lost)} ${worstDrop(one.dropped).name.replaceAll("_", " ")}`
    : rewound > 0 ? `${fmt.si(rewound)} rewound` : "–");
  attr(dropped, "class", lost > 0 ? "right lost-rows" : "right muted");
  attr(dropped, "title", lost > 0 ? whole(one.dropped)
    : rewound > 0 ? "Drafts that the engine took back: nothing is lost" : null);
  const behind = one.weight_version_lag;
  put(weights, one.weight_version === null ? "–"
    : behind > 0 ? `${one.weight_version}, ${fmt.int(behind)} behind` : one.weight_version);
  attr(weights, "class", behind > 0 ? "right warn" : "right");
  put(agent, plain(one.agent) || "–");
  put(host, plain(one.host) || "–");
  put(seen, one.last_seen === null ? "–" : one.last_seen < 2 ? "now"
    : `${fmt.duration(one.last_seen)} ago`);
}

const names = (shards) => shards.filter(Boolean).map(plain).join(" ");

const bytes = (memory, disk) => [memory > 0 || disk === 0 ? fmt.bytes(memory) : "",
  disk > 0 ? `${fmt.bytes(disk)} on disk` : ""].filter(Boolean).join(", ");

const whole = (dropped) => Object.entries(dropped)
  .map(([name, n]) => `${fmt.int(n)} ${name.replaceAll("_", " ")}`).join(", ");
