// The page at /: chat, race, state. Talks to the same server's API and to nobody else.
import { colourOf } from "./colours.js";
import { startState, stopState } from "./state.js";
import { Refusal, refusalOf, Stream } from "./stream.js";
import { element, Text } from "./text.js";

const $ = (id) => document.getElementById(id);
const KEY = "specserve-key"; // in this tab's own storage, as long as the tab is open
const CHAT = "specserve-chat";
const RETRY_MS = 3000;
let messages = [];
let running = []; // streams that can be stopped
let retry = null;
const seen = new Set(); // drafters whose guesses are on the page

function headers() {
  const key = sessionStorage.getItem(KEY) ?? "";
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function get(path) {
  const response = await fetch(path, { headers: headers() });
  if (!response.ok) throw await refusalOf(response);
  return response;
}

function say(error) {
  if (error instanceof Refusal && error.status === 401) $("key-form").hidden = false;
  return error instanceof TypeError ? "The server cannot be reached." : error.message;
}

// -- what a request asks for ----------------------------------------------------------------

function number(id) {
  return $(id).value === "" ? null : Number($(id).value);
}

function options(speculation = {}) {
  const asked = { trace: true, ...speculation };
  if ($("drafter").value && asked.enabled !== false) asked.drafter = $("drafter").value;
  if (number("max-draft") !== null && asked.enabled !== false) asked.num_speculative_tokens = number("max-draft");
  const body = { max_tokens: number("max-tokens") ?? 256, temperature: number("temperature") ?? 0, speculation: asked };
  if (number("top-p") !== null) body.top_p = number("top-p");
  if (number("seed") !== null) body.seed = number("seed");
  return body;
}

function conversation(turns) {
  const system = $("system").value.trim();
  return system ? [{ role: "system", content: system }, ...turns] : turns;
}

function open(body) {
  const stream = new Stream("v1/chat/completions", headers(), body);
  running.push(stream);
  return stream;
}

// -- text with its sources ------------------------------------------------------------------

function showLegend(stream) {
  const names = [...seen];
  const parts = names.map((name) => element("span", `guessed by ${name}`, colourOf(name)));
  if (names.length) parts.push(element("span", "not marked: said by the model itself"));
  if (!stream.traced) parts.push(element("span", "this server does not tell whose guesses its tokens are"));
  $("legend").replaceChildren(...parts);
}

// Once a frame: each look at the height of what was added makes the browser lay it all out.
class Writer {
  constructor(scroller, target, line, stream, progress = null) {
    Object.assign(this, { scroller, text: new Text(target), line, stream, progress, frame: null });
  }

  add(trace) {
    for (const token of trace.tokens) {
      this.text.add(token);
      if (token.drafter === null || seen.has(token.drafter)) continue;
      seen.add(token.drafter);
      showLegend(this.stream);
    }
    this.frame ??= requestAnimationFrame(() => this.write(null));
  }

  write(speculation) {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    const { scroller } = this;
    const near = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 40;
    this.text.write();
    this.line.replaceChildren(...numbers(this.stream, speculation));
    if (this.progress) this.progress.value = this.stream.stats.tokens;
    if (near) scroller.scrollTop = scroller.scrollHeight;
  }
}

function numbers({ stats, traced, body }, speculation) {
  const parts = [];
  const add = (value, words) => {
    const part = element("span", ` ${words}`, "number");
    part.prepend(element("b", value));
    parts.push(part);
  };
  const known = (value, digits) => (value === null || value === undefined ? null : value.toFixed(digits));
  if (stats.first === null) return parts;
  if (stats.rate !== null) add(known(stats.rate, 1), "tokens/s");
  const perPass = speculation ? speculation.tokens_per_pass : stats.own ? stats.tokens / stats.own : null;
  if (perPass !== null) add(known(perPass, 2), "tokens a pass");
  const speedup = speculation ? speculation.speedup : stats.speedup;
  if (body.speculation.enabled !== false) add(speedup === null ? "unknown" : `${known(speedup, 2)}×`, "speed-up");
  add(known(stats.first, 2), "s to the first token");
  add(stats.tokens, "tokens");
  if (traced && stats.drafted) add(`${stats.accepted} of ${stats.drafted}`, "guesses kept");
  return parts;
}

async function follow(stream, writer) {
  try {
    for await (const trace of stream) writer.add(trace);
  } finally {
    writer.write(stream.speculation);
    if (!stream.traced) showLegend(stream);
  }
}

// -- chat -----------------------------------------------------------------------------------

function addTurn(role, text) {
  const turn = element("div", "", "turn");
  const body = element("div", text, "text");
  turn.append(element("b", role), body);
  $("log").append(turn);
  $("log").scrollTop = $("log").scrollHeight;
  return body;
}

function keep() {
  try {
    sessionStorage.setItem(CHAT, JSON.stringify(messages));
  } catch {
    sessionStorage.removeItem(CHAT); // too long for the browser: then it does not outlast a reload
  }
}

function restore() {
  messages = JSON.parse(sessionStorage.getItem(CHAT) ?? "[]");
  for (const { role, content } of messages) {
    const body = addTurn(role === "user" ? "You" : "Model", role === "user" ? content : "");
    if (role === "user") continue;
    const text = new Text(body);
    text.add({ text: content, drafter: null });
    text.write();
  }
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
  const stream = open({ ...options(), messages: conversation(messages) });
  try {
    await follow(stream, new Writer($("log"), body, $("chat-numbers"), stream));
    const note = ending(stream);
    if (note) body.after(element("p", note, "note"));
  } catch (error) {
    body.after(element("p", say(error), "error"));
    if (error instanceof TypeError || error.status === 401) learn();
  } finally {
    if (stream.text) messages.push({ role: "assistant", content: stream.text });
    else if (messages.pop() && !$("message").value) $("message").value = text; // to be sent again
    keep();
    busy(false);
    $("log").scrollTop = $("log").scrollHeight;
    $("message").focus();
  }
}

function ending(stream) {
  if (stream.stopped) return "Stopped.";
  if (stream.finish === "length") return `Cut off after ${stream.stats.tokens} tokens.`;
  return stream.text ? null : "The model said nothing.";
}

function busy(on) {
  if (!on) running = [];
  for (const id of ["send", "race-start", "clear"]) $(id).disabled = on;
  for (const id of ["stop", "race-stop"]) $(id).disabled = !on;
  // Readers of the screen are told the answer when it is complete, and not word by word.
  $("log").setAttribute("aria-busy", String(on));
}

function stop() {
  for (const stream of running) stream.stop();
}

// -- race -----------------------------------------------------------------------------------

async function race(event) {
  event.preventDefault();
  const prompt = $("race-prompt").value.trim();
  if (!prompt || running.length) return;
  const question = conversation([{ role: "user", content: prompt }]);
  const seed = number("seed") ?? Math.floor(Math.random() * 2 ** 31);
  busy(true);
  $("race-result").textContent = "";
  const lanes = [["on", {}], ["off", { enabled: false }]].map(([name, asked]) => {
    const [place, progress] = [$(`race-${name}`), $(`race-${name}-progress`)];
    place.replaceChildren();
    const stream = open({ ...options(asked), messages: question, seed });
    Object.assign(progress, { max: stream.body.max_tokens, value: 0 });
    const done = follow(stream, new Writer(place, place, $(`race-${name}-numbers`), stream, progress));
    return { stream, done: done.then(() => (progress.value = progress.max)) };
  });
  const ends = await Promise.allSettled(lanes.map((lane) => lane.done));
  busy(false);
  const failed = ends.find((end) => end.status === "rejected");
  $("race-result").classList.toggle("error", Boolean(failed));
  if (!failed) $("race-result").textContent = verdict(lanes[0].stream, lanes[1].stream);
  else $("race-result").textContent = say(failed.reason);
  if (failed?.reason instanceof TypeError) learn();
}

function verdict(on, off) {
  if (on.stopped || off.stopped) return "Stopped.";
  const same = on.text === off.text ? "the same text, letter by letter" : "the texts differ";
  const [fast, plain] = [on.stats.seconds, off.stats.seconds];
  return `${(plain / fast).toFixed(2)} times as fast: done after ${fast.toFixed(2)} s with speculation and ${plain.toFixed(2)} s without, side by side; ${same}.`;
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
  if (name === "state") startState(get, (error) => ($("health").textContent = error ? say(error) : ""));
  else stopState();
}

function marks() {
  for (const place of ["log", "race-on", "race-off", "legend"]) {
    $(place).classList.toggle("coloured", $("colour").checked);
    $(place).classList.toggle("refused", $("refused").checked);
  }
}

function offer(drafters) {
  const chosen = $("drafter").value;
  const named = [...drafters, "none"].map((name) => new Option(name, name));
  $("drafter").replaceChildren(new Option("server's choice", ""), ...named);
  $("drafter").value = [...drafters, "none"].includes(chosen) ? chosen : "";
}

// Asks who is there, again and again until there is an answer; but never twice with a wrong key.
async function learn() {
  clearTimeout(retry);
  try {
    const asked = ["v1/models", "v1/speculation/status"].map(async (path) => (await get(path)).json());
    const [{ data }, status] = await Promise.all(asked);
    $("model").textContent = data[0].id;
    offer(status.drafters);
    $("health").textContent = "";
    $("key-form").hidden = true;
  } catch (error) {
    $("health").textContent = say(error);
    if (error.status !== 401) retry = setTimeout(learn, RETRY_MS);
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
for (const id of ["stop", "race-stop"]) $(id).addEventListener("click", stop);
document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
$("clear").addEventListener("click", () => {
  messages = [];
  keep();
  $("log").replaceChildren();
  $("chat-numbers").textContent = "";
  $("message").focus();
});
for (const id of ["colour", "refused"]) $(id).addEventListener("change", marks);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  learn();
});
marks();
restore();
learn();
