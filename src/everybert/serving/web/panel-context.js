// Context: one word in several sentences; its vectors layer by layer, and the words they come to lie near.
import { ask, h, panel, shell } from "./kit.js";

const EXAMPLES = [
  ["python", "I love my pet Python\nI love coding in Python"],
  ["bank", "He sat on the bank of the river.\nShe put her money in the bank.\nThe bank raised its interest rates."],
  ["bat", "A bat flew out of the cave.\nHe swung the bat and hit the ball."],
];
const minus = (v) => v.toFixed(2).replace("-", "−");
const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

export default function context(root, context) {
  const { info } = context;
  return panel(root, context, {
    title: "A word in context",
    lead: "A static embedding gives a word one vector for all its meanings. A BERT starts there and, layer by layer, lets the sentence in.",
    wait: 700,
    fields: [
      { name: "word", label: "Word", kind: "line", value: EXAMPLES[0][0] },
      { name: "texts", label: "Sentences that hold it, one a line", value: EXAMPLES[0][1], rows: 3 },
    ],
    examples: EXAMPLES.map(([word, texts]) => ({ words: word, values: { word, texts } })),
    request: ({ word, texts }, signal) => ask("playground/context", { model: info.name, word, texts: lines(texts) }, signal),
    show(data, values, out) {
      const count = data.occurrences.length;
      const name = (k) => {
        const { text, start, end } = data.occurrences[k];
        const letters = [...data.texts[text]];
        const left = letters.slice(Math.max(0, start - 24), start).join("");
        return [start > 24 ? "…" : "", left, h("b", {}, letters.slice(start, end).join("")), letters.slice(end, end + 24).join(""), letters.length > end + 24 ? "…" : ""];
      };
      const last = data.similarity.length - 1;
      if (count > 1) {
        const value = data.similarity[last][0][1];
        out.append(
          h("p", {}, "In the static table “", h("bdi", {}, data.word), `” is one vector (cosine ${minus(data.similarity[0][0][1])}); after the last layer it is ${count}, ${count > 2 ? "the first two " : ""}with a cosine of ${minus(value)}.`),
          h("figure", { class: "card" }, chart(data), h("figcaption", { class: "caption" }, "Cosine between the word’s vectors, from the static table to the last layer.")),
        );
      }
      out.append(
        h(
          "section",
          {},
          h("h2", {}, "Nearest words at each layer"),
          h(
            "div",
            { class: "scroll", tabindex: 0, role: "region", "aria-label": "Nearest words", style: { "margin-top": ".6rem" } },
            h(
              "table",
              {},
              h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "level"), data.occurrences.map((_, k) => h("th", { scope: "col", dir: "auto" }, count > 2 ? `${k + 1}  ` : "", name(k))))),
              h(
                "tbody",
                {},
                data.levels.map((level, l) => h("tr", {}, h("th", { scope: "row" }, level), data.nearest[l].map((near) => h("td", {}, near.map((n, i) => [i ? ", " : "", h("bdi", { title: n.cosine.toFixed(3) }, n.word)]))))),
              ),
            ),
          ),
        ),
      );
      if (count > 2) out.append(grids(data));
    },
    code: ({ word, texts }) => [
      `neighbours ${shell.quoted(word)} ${lines(texts).map(shell.quoted).join(" ")}`,
      `model.neighbours(${shell.python(word)}, [${lines(texts).map(shell.python).join(", ")}])`,
    ],
  });
}

/** Lines over levels, one for each pair of occurrences. */
function chart(data) {
  const narrow = innerWidth < 700; // the picture is scaled to its place; its letters must stay readable
  const [width, height, left, bottom, top] = narrow ? [360, 220, 36, 34, 14] : [720, 240, 44, 34, 14];
  const svg = (tag, attributes, ...children) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const count = data.occurrences.length;
  const pairs = [];
  for (let i = 0; i < count; i++) for (let j = i + 1; j < count && pairs.length < 6; j++) pairs.push([i, j]);
  const all = pairs.flatMap(([i, j]) => data.similarity.map((level) => level[i][j]));
  const low = Math.min(0.5, Math.floor(Math.min(...all) * 10) / 10);
  const right = count > 2 ? 34 : 0; // for the names of the lines
  const x = (l) => left + 24 + (l * (width - left - right - 48)) / Math.max(1, data.levels.length - 1);
  const y = (v) => top + ((1 - v) / (1 - low)) * (height - top - bottom);
  const out = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": `Cosine by level: ${data.levels.map((level, l) => `${level} ${data.similarity[l][0][1].toFixed(2)}`).join(", ")}` });
  for (const v of [low, (1 + low) / 2, 1]) out.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: y(v), y2: y(v) }), svg("text", { x: left - 8, y: y(v) + 4, "text-anchor": "end" }, minus(v)));
  const skip = Math.ceil(data.levels.length / (narrow ? 5 : 10));
  data.levels.forEach((level, l) => (l % skip === 0 || l === data.levels.length - 1) && out.append(svg("text", { x: x(l), y: height - 10, "text-anchor": "middle" }, level.replace("layer ", "").replace("embeddings", "emb."))));
  pairs.forEach(([i, j], k) => {
    out.append(svg("path", { d: data.similarity.map((level, l) => `${l ? "L" : "M"}${x(l)} ${y(level[i][j])}`).join(""), opacity: 1 - 0.13 * k }));
    if (k === 0) data.similarity.forEach((level, l) => out.append(svg("circle", { cx: x(l), cy: y(level[i][j]), r: 3.5 })));
  });
  if (count > 2) {
    const last = data.similarity.at(-1);
    const ends = pairs.map(([i, j]) => [y(last[i][j]), `${i + 1}–${j + 1}`]).sort((a, b) => a[0] - b[0]);
    ends.forEach((end, k) => k && (end[0] = Math.max(end[0], ends[k - 1][0] + 14))); // names must not lie on each other
    for (const [at, name] of ends) out.append(svg("text", { x: width, y: at + 4, "text-anchor": "end" }, name));
  }
  return out;
}

/** For three and more: a small table of cosines, first and last level. */
function grids(data) {
  const grid = (l) =>
    h(
      "div",
      {},
      h("h3", { class: "small quiet" }, data.levels[l]),
      h(
        "table",
        { class: "heat" },
        h("tbody", {}, data.similarity[l].map((row, i) => h("tr", {}, h("th", { scope: "row" }, String(i + 1)), row.map((v) => h("td", { style: { background: `color-mix(in srgb, var(--${v < 0 ? "second" : "accent"}) ${Math.round(Math.abs(v) * 45)}%, transparent)` } }, minus(v)))))),
      ),
    );
  return h("section", {}, h("h2", {}, "Every occurrence against every other"), h("div", { class: "row", style: { "align-items": "start", "margin-top": ".6rem" } }, [0, Math.floor(data.levels.length / 2), data.levels.length - 1].map(grid)));
}
