// An answer's text, token by token: every character of it, coloured by its source and set a little
// by its Markdown. Nothing is left out or moved, so what is copied is what the model said.
import { colourOf } from "./colours.js";

const FENCE = /^\s*(?:```|~~~)/;
const HEADING = /^(#{1,6}\s)(.*)/;
const TABLE = /^\s*\|/;
const INLINE = /(`+)([^`]+)\1|(\*\*)([^*]+)\*\*|(?<![*\w])(\*)([^*\s][^*]*)\*(?![*\w])/g;
const LONGEST = 4000; // characters of a line that are drawn anew whenever there is more of it

export function element(kind, text, ...classes) {
  const made = document.createElement(kind);
  made.textContent = text;
  made.classList.add(...classes);
  return made;
}

export class Text {
  constructor(place) {
    Object.assign(this, { place, line: null, runs: [], code: null, dirty: false });
  }

  // One token of a trace, and the guesses that were refused in its place.
  add(token) {
    for (const guess of token.refused ?? []) this.push({ text: guess.replaceAll("\n", "⏎"), wrong: true });
    const kind = token.drafter === null ? null : colourOf(token.drafter);
    const parts = token.text.split("\n");
    for (const [at, part] of parts.entries()) {
      if (part) this.push({ text: part, kind, by: token.drafter });
      if (at < parts.length - 1) this.end(kind);
    }
  }

  // Shows what was added since; called once a frame.
  write() {
    if (this.dirty) this.draw();
    this.dirty = false;
    // The rest of a very long line goes on beside what is there: nobody sees the seam.
    if (this.raw().length > LONGEST) Object.assign(this, { line: null, runs: [] });
  }

  push(run) {
    this.runs.push(run);
    this.dirty = true;
  }

  raw() {
    return this.runs.map((run) => (run.wrong ? "" : run.text)).join("");
  }

  // The line is complete: it is drawn once more, and never again.
  end(kind) {
    const fence = FENCE.test(this.raw());
    const closes = fence && this.code !== null;
    if (fence && !closes) {
      this.line?.remove();
      this.line = null;
      this.code = element("span", "", "block");
      this.place.append(this.code);
    }
    if (closes) this.draw();
    else {
      this.push({ text: "\n", kind });
      this.draw();
    }
    if (closes) {
      this.code = null;
      this.place.append("\n");
    }
    Object.assign(this, { line: null, runs: [], dirty: false });
  }

  draw() {
    if (this.line === null) {
      this.line = element("span", "", "line");
      (this.code ?? this.place).append(this.line);
    }
    const raw = this.raw();
    const marks = this.code !== null ? [] : marksOf(raw);
    this.line.className = this.code === null && TABLE.test(raw) ? "line mono" : "line";
    const nodes = [];
    let at = 0;
    for (const run of this.runs) {
      if (run.wrong) {
        nodes.push(element("s", run.text, "wrong"));
        continue;
      }
      for (const [text, style] of pieces(run.text, at, marks)) {
        if (!run.kind && !style) nodes.push(text);
        else nodes.push(element("span", text, ...(run.kind ? [run.kind] : []), ...(style ? style.split(" ") : [])));
      }
      at += run.text.length;
    }
    this.line.replaceChildren(...nodes);
  }
}

// Parts of a line that look different: [from, to, classes], in order.
function marksOf(raw) {
  const heading = HEADING.exec(raw);
  if (heading) return [[0, heading[1].length, "faint"], [heading[1].length, raw.length, "strong"]];
  const found = [];
  for (const match of raw.matchAll(INLINE)) {
    const mark = match[1] ?? match[3] ?? match[5];
    const style = match[1] ? "mono" : match[3] ? "strong" : "slanted";
    const [from, to] = [match.index, match.index + match[0].length];
    found.push([from, from + mark.length, "faint"], [from + mark.length, to - mark.length, style], [to - mark.length, to, "faint"]);
  }
  return found;
}

// A run, which begins at character `at` of its line, cut where marks begin and end.
function* pieces(text, at, marks) {
  let from = 0;
  for (const [start, end, style] of marks) {
    const [first, last] = [Math.max(start - at, from), Math.min(end - at, text.length)];
    if (last <= first) continue;
    if (first > from) yield [text.slice(from, first), null];
    yield [text.slice(first, last), style];
    from = last;
  }
  if (from < text.length) yield [text.slice(from), null];
}
