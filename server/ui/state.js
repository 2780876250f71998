// The state view: what the planner does and why, what that rests on, and how full the server is.
import { colourOf } from "./colours.js";
import { place, plot, short } from "./plots.js";

const $ = (id) => document.getElementById(id);
const SECONDS = 2;
const METRICS = [
  "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:generation_tokens_total",
  "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"
];
const ASKED = ["v1/speculation/status", `metrics?${METRICS.map((name) => `name%5B%5D=${name}`).join("&")}`];
const MOST_POINTS = 60; // of what has been so far: two minutes
const WHY = {
  worth_it: "pays",
  not_worth_it: "would not pay",
  guard: "has lost at this size; paused",
  fixed: "fixed, whether it pays or not",
  off: "switched off",
};
let timer = null;
let history = [];

// Polls as long as the view is open and can be seen. `tell` is called with an error, or null.
export function startState(get, tell) {
  stopState();
  const again = async () => {
    if (!document.hidden) {
      try {
        const [status, metrics] = await Promise.all(ASKED.map(get));
        draw(await status.json(), read(await metrics.text()));
        tell(null);
      } catch (error) {
        tell(error);
      }
    }
    if (timer !== null) timer = setTimeout(again, 1000 * SECONDS);
  };
  timer = setTimeout(again, 0);
}

export function stopState() {
  clearTimeout(timer);
  timer = null;
}

// Sums of samples by metric, whatever their labels.
function read(text) {
  const values = new Map();
  for (const line of text.split("\n")) {
    const found = /^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)/.exec(line);
    if (found) values.set(found[1], (values.get(found[1]) ?? 0) + Number(found[2]));
  }
  return (name) => values.get(name) ?? 0;
}

function draw(status, value) {
  place($("state-numbers"), tiles(status, value));
  place($("plots-now"), now(status, value));
  place($("plots-choices"), choices(status));
  place($("plots-acceptance"), acceptance(status));
  place($("plots-costs"), costs(status));
  $("guard").textContent = guarded(status);
  table($("choices"), "What a batch of sequences of typical acceptance would get", ...planned(status));
  table($("recent"), "The newest first", ...requests(status));
}

function element(kind, text, className = "") {
  const made = document.createElement(kind);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function tiles(status, value) {
  const speedup = status.speedup ?? { ratio: null, low: null };
  const drafts = value("vllm:spec_decode_num_draft_tokens_total");
  const range = speedup.low === null ? "" : ` (${speedup.low.toFixed(2)} to ${speedup.high.toFixed(2)})`;
  return [
    [status.mode, "mode"],
    [speedup.ratio === null ? "unknown" : `${speedup.ratio.toFixed(2)}×`, `speed-up by the clock${range}`],
    [String(status.steps), "steps"],
    [String(value("vllm:num_requests_running")), "running"],
    [String(value("vllm:num_requests_waiting")), "waiting"],
    [`${(100 * value("vllm:kv_cache_usage_perc")).toFixed(1)} %`, "of K/V pages in use"],
    drafts ? [`${value("vllm:spec_decode_num_accepted_tokens_total")} of ${drafts}`, "draft tokens kept"] : ["nothing", "drafted yet"],
  ].map(([number, words]) => {
    const tile = element("span", ` ${words}`, "number");
    tile.prepend(element("b", number));
    return tile;
  });
}

// -- what has been so far -------------------------------------------------------------------

function now(status, value) {
  const point = {
    at: performance.now() / 1000,
    tokens: value("vllm:generation_tokens_total"),
    running: value("vllm:num_requests_running"),
    waiting: value("vllm:num_requests_waiting"),
    pages: 100 * value("vllm:kv_cache_usage_perc"),
  };
  const last = history.at(-1);
  // After a restart counters begin anew; after a pause of the view there is nothing to go on from.
  if (last && (point.tokens < last.tokens || point.at - last.at > 5 * SECONDS)) history = [];
  const before = history.at(-1);
  point.rate = before ? (point.tokens - before.tokens) / (point.at - before.at) : 0;
  history = [...history, point].slice(-MOST_POINTS);
  const labels = history.map(({ at }) => String(Math.round(at - point.at)));
  const line = (name, field, colour) => ({ name, kind: "line", colour, values: history.map((one) => one[field]) });
  const figures = [
    plot({ caption: "Tokens a second, of all requests", labels, xTitle: "seconds from now", yTitle: "tokens/s", series: [line("", "rate", "plain")] }),
    plot({ caption: "Sequences", labels, xTitle: "seconds from now", yTitle: "sequences", series: [line("running", "running", "plain"), line("waiting", "waiting", "d2")] }),
    plot({ caption: "K/V pages in use", labels, xTitle: "seconds from now", yTitle: "% of all pages", top: 100, series: [line("", "pages", "plain")] }),
  ];
  const reasons = Object.entries(status.off_reasons).filter(([, rows]) => rows);
  if (reasons.length) figures.push(listed("Why tokens were decoded without a draft", reasons));
  return figures;
}

// Bars that lie, since their names are long.
function listed(caption, entries) {
  const figure = document.createElement("figure");
  const list = document.createElement("dl");
  list.className = "bars";
  const most = Math.max(...entries.map(([, count]) => count));
  for (const [name, count] of entries.sort((a, b) => b[1] - a[1])) {
    const bar = document.createElement("meter");
    Object.assign(bar, { max: most, value: count });
    bar.setAttribute("aria-hidden", "true"); // the number beside it says the same
    const said = element("dd", short(count));
    said.prepend(bar);
    list.append(element("dt", name.replaceAll("_", " ")), said);
  }
  figure.append(element("figcaption", `${caption} (rows)`), list);
  return figure;
}

// -- the planner ----------------------------------------------------------------------------

function byDrafter(found, kind, values) {
  return Object.entries(found).map(([name, one]) => ({ name, kind, colour: colourOf(name), values: values(one) }));
}

function choices(status) {
  const all = Object.values(status.choices);
  if (!all.length) return [];
  const labels = all[0].map((choice) => String(choice.batch));
  const common = { labels, xTitle: "sequences in the batch" };
  return [
    plot({ ...common, caption: "Draft tokens of each sequence", yTitle: "draft tokens",
      series: byDrafter(status.choices, "bars", (rows) => rows.map((row) => row.draft_tokens)) }),
    plot({ ...common, caption: "Speed-up expected of the best choice", yTitle: "times plain decoding", rule: 1,
      series: byDrafter(status.choices, "line", (rows) => rows.map((row) => row.expected_speedup)) }),
    plot({ ...common, caption: "Milliseconds of a step, with drafts and plain", yTitle: "milliseconds",
      series: [...byDrafter(status.choices, "line", (rows) => rows.map((row) => row.expected_ms)),
        { name: "plain", kind: "line", colour: "plain", values: all[0].map((row) => row.plain_ms) }] }),
  ];
}

function guarded(status) {
  const parts = status.guard.map(({ batch_from: from, trips, paused_steps: steps }) =>
    `${from} to ${2 * from - 1} sequences: lost ${trips} time${trips === 1 ? "" : "s"}${steps ? `, paused for ${steps} more steps` : ", tried again"}`);
  const spent = status.exploration ? ` Spent on trying so far: ${short(status.exploration.spent_seconds)} s.` : "";
  return `${parts.length ? `Batch sizes where drafts have lost: ${parts.join("; ")}.` : "Drafts have lost at no batch size."}${spent}`;
}

function planned(status) {
  const head = ["Drafter", "Sequences", "Draft tokens", "Why", "Best", "Tokens a step", "ms a step", "ms plain", "Speed-up"];
  const rows = Object.entries(status.choices).flatMap(([drafter, entries]) => entries.map((c) => [
    drafter, c.batch, short(c.draft_tokens), WHY[c.why] ?? c.why.replaceAll("_", " "), short(c.best_draft_tokens),
    c.expected_tokens.toFixed(1), c.expected_ms.toFixed(1), c.plain_ms.toFixed(1), c.expected_speedup === null ? "unknown" : c.expected_speedup.toFixed(2)]));
  return [head, rows];
}

// -- what that rests on ---------------------------------------------------------------------

function acceptance(status) {
  const found = Object.entries(status.acceptance);
  if (!found.length) return [];
  const deepest = Math.max(1, ...found.map(([, one]) => one.by_depth.length));
  const labels = Array.from({ length: deepest }, (_, at) => String(at + 1));
  const figures = [
    plot({ caption: "Acceptance by place in the draft, if all before it were right", labels, top: 1, xTitle: "place in the draft", yTitle: "share accepted",
      series: byDrafter(status.acceptance, "line", (one) => labels.map((_, at) => one.by_depth[at] ?? null)) }),
  ];
  for (const [name, one] of found) {
    const buckets = Object.entries(one.by_bucket);
    figures.push(plot({ caption: `Acceptance of ${name}'s first token, ${Math.round(one.judged_tokens)} judged`, top: 1,
      labels: ["all", ...buckets.map(([bucket]) => bucket)], xTitle: "bucket: what the drafter knew", yTitle: "share accepted",
      series: [{ name: "", kind: "bars", colour: colourOf(name), values: [one.acceptance, ...buckets.map(([, share]) => share)] }] }));
  }
  return figures;
}

function costs({ cost_model: model, calibrated }) {
  if (!model) return [];
  const passes = Object.entries(model.pass_ms_by_tokens);
  const batches = Object.keys(model.overhead_ms_by_batch);
  return [
    plot({ caption: `A pass of the model, ${calibrated ? "measured" : "still assumed"} (${model.passes_measured} passes since)`,
      labels: passes.map(([tokens]) => tokens), xTitle: "tokens in the pass", yTitle: "milliseconds",
      series: [{ name: "", kind: "line", colour: "plain", values: passes.map(([, ms]) => ms) }] }),
    plot({ caption: "Drafting as far as it goes, and all else around a pass", labels: batches, xTitle: "sequences in the batch", yTitle: "milliseconds",
      series: [...byDrafter(model.draft_ms_by_batch, "line", (one) => batches.map((batch) => one[batch] ?? null)),
        { name: "all else", kind: "line", colour: "plain", values: batches.map((batch) => model.overhead_ms_by_batch[batch]) }] }),
  ];
}

// -- tables ---------------------------------------------------------------------------------

function requests(status) {
  const head = ["Ended", "Endpoint", "Prompt", "Cached", "Answer", "First token s", "Tokens/s", "Tokens a pass", "Guesses kept", "By", "Speed-up", "End"];
  const known = (value, digits) => (value === null ? "–" : value.toFixed(digits));
  const rows = status.recent.map((r) => [
    new Date(1000 * r.finished).toLocaleTimeString(), r.endpoint.replace("/v1/", "") + (r.stream ? ", stream" : ""),
    r.prompt_tokens, r.cached_tokens, r.generated_tokens, known(r.ttft_seconds, 2), known(r.tokens_per_second, 1), known(r.tokens_per_pass, 2),
    r.drafted ? `${r.accepted} of ${r.drafted}` : "–", Object.keys(r.drafters).join(", ") || "–",
    r.speedup === null ? "unknown" : r.speedup.toFixed(2), r.error ?? Object.keys(r.finish_reasons).join(", ")]);
  return [head, rows];
}

const WORDS = new Set(["Drafter", "Why", "Ended", "Endpoint", "By", "End"]);

function table(where, caption, head, rows) {
  const made = document.createElement("table");
  made.append(element("caption", rows.length ? caption : "None yet"));
  const line = (cells, kind) => {
    const row = document.createElement("tr");
    for (const [at, cell] of cells.entries()) {
      const one = element(kind, String(cell), WORDS.has(head[at]) ? "words" : "");
      if (kind === "th") one.scope = "col";
      row.append(one);
    }
    return row;
  };
  if (rows.length) made.append(line(head, "th"), ...rows.map((row) => line(row, "td")));
  place(where, [...made.children]);
}
