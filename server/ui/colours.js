// Which colour a drafter has, here and in plots: the same whoever is seen first.
const KNOWN = { lookup: "d0", model: "d1", eagle: "d2", grammar: "d3" };
const others = [];

export function colourOf(drafter) {
  if (drafter in KNOWN) return KNOWN[drafter];
  if (!others.includes(drafter)) others.push(drafter);
  return `d${4 + (others.indexOf(drafter) % 2)}`;
}
