// The state view: what the planner does and why, and how full the server is.
const $ = (id) => document.getElementById(id);
const SECONDS = 2;
let timer = null;

export function startState(get) {
  stopState();
  const again = async () => {
    try {
      const [status, metrics] = await Promise.all([get("v1/speculation/status"), get("metrics")]);
      draw(await status.json(), read(await metrics.text()));
      $("health").textContent = "";
    } catch (error) {
      $("health").textContent = error instanceof TypeError ? "The server cannot be reached." : error.message;
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
  return values;
}

function draw(status, metrics) {
  const value = (name) => metrics.get(name) ?? 0;
  const speedup = status.speedup?.ratio;
  const drafts = value("vllm:spec_decode_num_draft_tokens_total");
  $("state-numbers").textContent = [
    `mode ${status.mode}`,
    `speed-up ${speedup === null || speedup === undefined ? "unknown" : speedup.toFixed(2) + "×"}`,
    `${status.steps} steps`,
    `${value("vllm:num_requests_running")} running, ${value("vllm:num_requests_waiting")} waiting`,
    `K/V pages ${(100 * value("vllm:kv_cache_usage_perc")).toFixed(1)} % in use`,
    drafts ? `${value("vllm:spec_decode_num_accepted_tokens_total")} of ${drafts} draft tokens kept` : "nothing drafted yet",
  ].join(" · ");
  const plots = [];
  for (const [drafter, choices] of Object.entries(status.choices))
    plots.push(bars(`Draft tokens of ${drafter} by sequences in the batch`, choices.map((c) => [c.batch, c.draft_tokens])));
  if (status.cost_model)
    plots.push(line("Milliseconds of a pass by tokens in it", Object.entries(status.cost_model.pass_ms_by_tokens).map(([n, ms]) => [Number(n), ms])));
  for (const [drafter, found] of Object.entries(status.acceptance))
    plots.push(bars(`Acceptance of ${drafter}, ${Math.round(found.judged_tokens)} tokens judged`,
      [["all", found.acceptance], ...Object.entries(found.by_bucket)], 1));
  $("plots").replaceChildren(...plots);
  table(status.choices);
}

function table(choices) {
  const rows = [["Drafter", "Batch", "Draft tokens", "Why", "Tokens expected", "ms expected", "ms plain", "Speed-up expected"]];
  for (const [drafter, entries] of Object.entries(choices))
    for (const c of entries)
      rows.push([drafter, c.batch, c.draft_tokens, c.why.replaceAll("_", " "), c.expected_tokens.toFixed(1), c.expected_ms.toFixed(1),
        c.plain_ms.toFixed(1), c.expected_speedup === null ? "unknown" : c.expected_speedup.toFixed(2)]);
  const made = rows.map((cells, at) => {
    const row = document.createElement("tr");
    for (const [column, cell] of cells.entries()) {
      const made = document.createElement(at ? "td" : "th");
      if (!at) made.scope = "col";
      if (column === 3) made.className = "words";
      made.textContent = cell;
      row.append(made);
    }
    return row;
  });
  $("choices").replaceChildren(...made);
}

// -- plots ----------------------------------------------------------------------------------

const WIDTH = 320, HEIGHT = 150, LEFT = 34, BOTTOM = 18, TOP = 8;

function shape(kind, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function figure(caption, points, most, marks) {
  const words = points.map(([x, y]) => `${x}: ${Number(y.toPrecision(3))}`).join(", ");
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${caption}. ${words}` });
  const base = HEIGHT - BOTTOM;
  svg.append(shape("line", { x1: LEFT, y1: base, x2: WIDTH, y2: base, class: "axis" }));
  svg.append(shape("text", { x: LEFT - 4, y: TOP + 8, "text-anchor": "end" }, Number(most.toPrecision(2))));
  svg.append(shape("text", { x: LEFT - 4, y: base, "text-anchor": "end" }, "0"), ...marks);
  const made = document.createElement("figure");
  const title = document.createElement("figcaption");
  title.textContent = caption;
  made.append(title, svg);
  return made;
}

function places(points, most) {
  const step = (WIDTH - LEFT) / points.length, high = HEIGHT - BOTTOM - TOP;
  return points.map(([label, value], at) => ({ label, left: LEFT + at * step, width: step, height: (high * value) / most }));
}

function label(place) {
  return shape("text", { x: place.left + place.width / 2, y: HEIGHT - 5, "text-anchor": "middle" }, place.label);
}

function bars(caption, points, top) {
  const most = top ?? Math.max(1, ...points.map(([, y]) => y)), base = HEIGHT - BOTTOM;
  const marks = places(points, most).flatMap((p) => [
    shape("rect", { x: p.left + p.width * 0.15, y: base - p.height, width: p.width * 0.7, height: p.height, class: "bar" }), label(p)]);
  return figure(caption, points, most, marks);
}

function line(caption, points) {
  const most = Math.max(...points.map(([, y]) => y)), base = HEIGHT - BOTTOM;
  const all = places(points, most), middle = (p) => p.left + p.width / 2;
  const path = shape("polyline", { points: all.map((p) => `${middle(p)},${base - p.height}`).join(" "), class: "trace" });
  const dots = all.flatMap((p) => [shape("circle", { cx: middle(p), cy: base - p.height, r: 3, class: "dot" }), label(p)]);
  return figure(caption, points, most, [path, ...dots]);
}
