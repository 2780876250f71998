// The page at /: chat, race, state. Talks to the same server's API and to nobody else.
import { Stream } from "./stream.js";
import { startState, stopState } from "./state.js";

const $ = (id) => document.getElementById(id);
const colours = new Map(); // drafter -> class
let messages = [];
let running = []; // streams that can be stopped
let retry = null;

export function headers() {
  const key = $("key").value || sessionStorage.getItem("specserve-key") || "";
  return key ? { Authorization: `Bearer ${key}` } : {};
}

export async function get(path) {
  const response = await fetch(path, { headers: headers() });
  if (response.status === 401) $("key-form").hidden = false;
  if (!response.ok) throw new Error(await explain(response));
  return response;
}

async function explain(response) {
  try {
    const body = await response.json();
    return body.error?.message ?? body.status ?? response.statusText;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

// -- what a request asks for ----------------------------------------------------------------

function options(speculation = {}) {
  const asked = { trace: true, ...speculation };
  if ($("drafter").value && asked.enabled !== false) asked.drafter = $("drafter").value;
  if ($("max-draft").value && asked.enabled !== false) asked.num_speculative_tokens = Number($("max-draft").value);
  const body = { max_tokens: Number($("max-tokens").value) || 256, speculation: asked };
  body.temperature = Number($("temperature").value) || 0;
  return body;
}

function open(body) {
  const stream = new Stream("v1/chat/completions", headers(), body);
  running.push(stream);
  return stream;
}

// -- text with its sources ------------------------------------------------------------------

function colourOf(drafter) {
  if (!colours.has(drafter)) {
    colours.set(drafter, `d${colours.size % 6}`);
    showLegend();
  }
  return colours.get(drafter);
}

function showLegend() {
  const parts = [...colours].map(([name, kind]) => element("span", `drafted by ${name}`, kind));
  $("legend").replaceChildren(...(parts.length ? [...parts, element("span", "not marked: said by the model itself")] : []));
}

function element(kind, text, ...classes) {
  const made = document.createElement(kind);
  made.textContent = text;
  made.classList.add(...classes);
  return made;
}

// Once a frame: each look at the height of what was added makes the browser lay it all out.
class Writer {
  constructor(place, target, line, stream) {
    Object.assign(this, { place, target, line, stream, waiting: document.createDocumentFragment(), frame: null });
  }

  add(chunk) {
    for (const token of chunk.tokens) {
      for (const guess of token.refused ?? []) this.waiting.append(element("s", guess, "wrong"));
      if (token.drafter === null) this.waiting.append(token.text);
      else this.waiting.append(element("span", token.text, colourOf(token.drafter)));
    }
    this.frame ??= requestAnimationFrame(() => this.write(null));
  }

  write(speculation) {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    const near = this.place.scrollHeight - this.place.scrollTop - this.place.clientHeight < 40;
    this.target.append(this.waiting);
    this.line.textContent = numbers(this.stream.stats, speculation);
    if (near) this.place.scrollTop = this.place.scrollHeight;
  }
}

function numbers(stats, speculation) {
  const parts = [];
  const say = (value, words) => value !== null && value !== undefined && parts.push(`${value} ${words}`);
  say(stats.rate?.toFixed(1), "tokens/s");
  say(stats.first?.toFixed(2), "s to the first token");
  say(stats.tokens, "tokens");
  if (stats.drafted) say(`${stats.accepted} of ${stats.drafted}`, "guesses kept");
  if (speculation) {
    say(speculation.tokens_per_pass?.toFixed(2), "tokens a pass");
    parts.push(`speed-up ${speculation.speedup === null ? "unknown" : speculation.speedup.toFixed(2) + "×"}`);
  }
  return parts.join(" · ");
}

async function follow(stream, place, target, line) {
  const writer = new Writer(place, target, line, stream);
  try {
    for await (const chunk of stream) writer.add(chunk);
  } finally {
    writer.write(stream.speculation);
  }
}

// -- chat -----------------------------------------------------------------------------------

function addTurn(role, text) {
  const turn = element("div", "", "turn");
  const body = element("div", text);
  turn.append(element("b", role), body);
  $("log").append(turn);
  $("log").scrollTop = $("log").scrollHeight;
  return body;
}

async function send(event) {
  event.preventDefault();
  const text = $("message").value.trim();
  if (!text || running.length) return;
  $("message").value = "";
  messages.push({ role: "user", content: text });
  addTurn("You", text);
  const body = addTurn("Model", "");
  busy(true);
  const stream = open({ ...options(), messages });
  try {
    await follow(stream, $("log"), body, $("chat-numbers"));
  } catch (error) {
    body.append(element("p", say(error), "error"));
  } finally {
    if (stream.text) messages.push({ role: "assistant", content: stream.text });
    else messages.pop();
    busy(false);
    $("message").focus();
  }
}

function say(error) {
  if (error instanceof TypeError) return "The server cannot be reached.";
  return error.message;
}

function busy(on) {
  if (!on) running = [];
  for (const id of ["send", "race-start", "clear"]) $(id).disabled = on;
  for (const id of ["stop", "race-stop"]) $(id).disabled = !on;
}

// -- race -----------------------------------------------------------------------------------

async function race(event) {
  event.preventDefault();
  const prompt = $("race-prompt").value.trim();
  if (!prompt || running.length) return;
  const question = [{ role: "user", content: prompt }];
  const seed = Math.floor(Math.random() * 2 ** 31);
  busy(true);
  $("race-result").textContent = "";
  const lanes = [["on", {}], ["off", { enabled: false }]].map(([name, asked]) => {
    const place = $(`race-${name}`);
    place.replaceChildren();
    const stream = open({ ...options(asked), messages: question, seed });
    return { stream, done: follow(stream, place, place, $(`race-${name}-numbers`)) };
  });
  const ends = await Promise.allSettled(lanes.map((lane) => lane.done));
  busy(false);
  const failed = ends.find((end) => end.status === "rejected");
  if (failed) $("race-result").textContent = say(failed.reason);
  else $("race-result").textContent = verdict(lanes[0].stream, lanes[1].stream);
}

function verdict(on, off) {
  if (on.stopped || off.stopped) return "Stopped.";
  const same = on.text === off.text ? "the same text, letter by letter" : "the texts differ";
  const [fast, plain] = [on.stats.seconds, off.stats.seconds];
  return `Done after ${fast.toFixed(2)} s with speculation and ${plain.toFixed(2)} s without, side by side: ${(plain / fast).toFixed(2)} times as fast; ${same}.`;
}

// -- the frame ------------------------------------------------------------------------------

const views = ["chat", "race", "state"];

function show(name) {
  for (const view of views) {
    $(view).hidden = view !== name;
    $(`tab-${view}`).setAttribute("aria-selected", String(view === name));
    $(`tab-${view}`).tabIndex = view === name ? 0 : -1;
  }
  $("settings").hidden = $("legend").hidden = name === "state";
  if (name === "state") startState(get);
  else stopState();
}

function marks() {
  for (const place of ["log", "race-on", "race-off", "legend"]) {
    $(place).classList.toggle("coloured", $("colour").checked);
    $(place).classList.toggle("refused", $("refused").checked);
  }
}

async function learn() {
  try {
    const [{ data }, status] = await Promise.all(["v1/models", "v1/speculation/status"].map(async (p) => (await get(p)).json()));
    $("model").textContent = data[0].id;
    const known = [...$("drafter").options].map((option) => option.value);
    for (const name of [...status.drafters, "none"])
      if (!known.includes(name)) $("drafter").append(new Option(name, name));
    $("health").textContent = "";
  } catch (error) {
    $("health").textContent = say(error);
    clearTimeout(retry);
    retry = setTimeout(learn, 3000);
  }
}

for (const [at, view] of views.entries()) {
  $(`tab-${view}`).addEventListener("click", () => show(view));
  $(`tab-${view}`).addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = views[(at + step + views.length) % views.length];
    show(next);
    $(`tab-${next}`).focus();
  });
}
$("chat-form").addEventListener("submit", send);
$("race-form").addEventListener("submit", race);
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
for (const id of ["stop", "race-stop"]) $(id).addEventListener("click", () => running.forEach((stream) => stream.stop()));
$("clear").addEventListener("click", () => {
  messages = [];
  $("log").replaceChildren();
  $("chat-numbers").textContent = "";
});
for (const id of ["colour", "refused"]) $(id).addEventListener("change", marks);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("specserve-key", $("key").value);
  $("key-form").hidden = true;
  learn();
});
marks();
learn();
