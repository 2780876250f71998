// Plots as SVG: axes with words and units, a few grid lines, and the same numbers as words for
// whoever does not see them.
const WIDTH = 360, HEIGHT = 200, LEFT = 52, RIGHT = 10, TOP = 16, BOTTOM = 36;
const BASE = HEIGHT - BOTTOM, HIGH = BASE - TOP;

function shape(kind, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

export const short = (value) => String(Number(value.toPrecision(3)));
const tick = (value) => (value >= 1000 ? `${short(value / 1000)}k` : short(value));

// A round number that is at least `value`, and how far its grid lines are apart.
function scaleOf(value) {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  const step = [0.2, 0.25, 0.5, 1, 2, 2.5].map((part) => part * power).find((part) => value <= 4 * part) ?? 2.5 * power;
  return { step, most: step * Math.ceil(value / step - 1e-9) || step };
}

// A figure.
//   labels: words below the places of the x axis; series: { name, kind: "bars" or "line", values,
//   colour }, null where there is no value; xTitle, yTitle: what the axes are, with units; top: of
//   the y axis, if it is to stay; rule: a value to draw a line at.
export function plot({ caption, labels, series, xTitle, yTitle, top, rule }) {
  const values = series.flatMap((one) => one.values).filter((value) => value !== null);
  const { step, most } = scaleOf(top ?? (Math.max(rule ?? 0, ...values) || 1));
  const height = (value) => (HIGH * Math.min(value, most)) / most;
  const slot = (WIDTH - LEFT - RIGHT) / labels.length;
  const middle = (at) => LEFT + (at + 0.5) * slot;
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": words(caption, labels, series) });
  for (let value = 0; value <= most * 1.001; value += step) {
    const y = BASE - height(value);
    svg.append(shape("line", { x1: LEFT, y1: y, x2: WIDTH - RIGHT, y2: y, class: value ? "grid" : "axis" }));
    svg.append(shape("text", { x: LEFT - 5, y: y + 4, "text-anchor": "end" }, tick(value)));
  }
  const every = Math.ceil(labels.length / 10);
  for (const [at, label] of labels.entries())
    if (at % every === 0) svg.append(shape("text", { x: middle(at), y: BASE + 14, "text-anchor": "middle" }, label));
  svg.append(shape("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, xTitle));
  svg.append(shape("text", { transform: `translate(10 ${TOP + HIGH / 2}) rotate(-90)`, "text-anchor": "middle" }, yTitle));
  if (rule !== undefined) {
    const y = BASE - height(rule);
    svg.append(shape("line", { x1: LEFT, y1: y, x2: WIDTH - RIGHT, y2: y, class: "rule" }));
  }
  const barred = series.filter((one) => one.kind === "bars");
  for (const one of series) {
    const at = barred.indexOf(one);
    svg.append(...(at < 0 ? lineOf(one, middle, height, series.length === 1) : barsOf(one, at, barred.length, slot, height)));
  }
  return framed(caption, series, svg);
}

function barsOf({ values, colour }, at, count, slot, height) {
  const width = (slot * 0.76) / count;
  return values.flatMap((value, place) => {
    if (value === null) return [];
    const x = LEFT + place * slot + slot * 0.12 + at * width;
    const bar = shape("rect", { x, y: BASE - height(value), width, height: height(value), class: `fill ${colour}` });
    if (values.length * count > 16) return [bar];
    const number = shape("text", { x: x + width / 2, y: BASE - height(value) - 3, "text-anchor": "middle", class: "value" }, tick(value));
    return [bar, number];
  });
}

function lineOf({ values, colour }, middle, height, alone) {
  const points = values.map((value, at) => (value === null ? null : [middle(at), BASE - height(value)])).filter(Boolean);
  const path = shape("polyline", { points: points.map((point) => point.join(",")).join(" "), class: `stroke ${colour}` });
  if (points.length > 16) return [path];
  const dots = points.map(([x, y]) => shape("circle", { cx: x, cy: y, r: 3, class: `fill ${colour}` }));
  if (!alone) return [path, ...dots];
  const known = values.filter((value) => value !== null);
  return [path, ...dots, ...points.map(([x, y], at) => shape("text", { x, y: y - 6, "text-anchor": "middle", class: "value" }, tick(known[at])))];
}

function framed(caption, series, svg) {
  const figure = document.createElement("figure");
  const title = document.createElement("figcaption");
  title.textContent = caption;
  if (series.length > 1 || series.some((one) => one.name)) {
    for (const { name, colour } of series) {
      const key = document.createElement("span");
      key.className = `key ${colour}`;
      key.textContent = name;
      title.append(" ", key);
    }
  }
  figure.append(title, svg);
  return figure;
}

function words(caption, labels, series) {
  const long = labels.length > 16; // what has been so far: its end will do
  const said = series.map(({ name, values }) => {
    const all = values.map((value, at) => `${labels[at]}: ${value === null ? "none" : short(value)}`);
    return `${name ? `${name}: ` : ""}${long ? `now ${short(values.at(-1) ?? 0)}` : all.join(", ")}`;
  });
  return `${caption}. ${said.join(". ")}`;
}

// Puts figures into a place; those that have not changed stay, so that nothing flickers.
export function place(where, figures) {
  const old = [...where.children];
  const next = figures.map((figure, at) => (old[at]?.isEqualNode(figure) ? old[at] : figure));
  if (next.length !== old.length || next.some((figure, at) => figure !== old[at])) where.replaceChildren(...next);
}
