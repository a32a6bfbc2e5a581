// Similar: lines against lines, as a heat map.
import { Problem, ask, bars, h, panel, shell } from "./kit.js";

const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);
const MOST = 50;
const START = "A man is playing a guitar.\nSomeone makes music on a string instrument.\nThe soup needs salt.\nThe cook tastes the broth.\nStocks fell sharply on Monday.\nShares lost value at the start of the week.";

export default function similar(root, context) {
  const { info } = context;
  return panel(root, context, {
    title: "Similar",
    lead: "Every line becomes one vector; the cosine between two says how alike they are to this model.",
    wait: 600,
    fields: [{ name: "texts", label: `Lines to compare, up to ${MOST}`, value: START, rows: 6 }],
    examples: [{ words: "six sentences", values: { texts: START } }, { words: "questions", values: { texts: "How do I reset my password?\nI forgot my login details.\nWhere is my parcel?\nTrack my order\nCan I pay by card?" } }, { words: "one word, two meanings", values: { texts: "He sat on the bank of the river.\nThe bank raised its interest rates.\nThe stream runs between green hills.\nShe asked for a loan." } }],
    async request({ texts }, signal) {
      const given = lines(texts);
      if (given.length < 2) throw new Problem("Give at least two lines: they are compared with each other.");
      if (given.length > MOST) throw new Problem(`${given.length} lines are more than the ${MOST} that this page compares at once.`);
      const vectors = await ask("embed", { model: info.name, inputs: given }, signal); // of length 1
      return { texts: given, cosine: vectors.map((a) => vectors.map((b) => a.reduce((sum, x, i) => sum + x * b[i], 0))) };
    },
    show({ texts, cosine }, values, out) {
      const n = texts.length;
      const pairs = [];
      for (let i = 0; i < n; i++) for (let j = i + 1; j < n; j++) pairs.push([i, j, cosine[i][j]]);
      pairs.sort((a, b) => b[2] - a[2]);
      const [low, high] = [Math.min(...pairs.map((p) => p[2])), pairs[0][2]];
      const shade = (v) => Math.round(6 + 62 * Math.max(0, Math.min(1, (v - low) / Math.max(high - low, 1e-6))));
      out.append(
        h(
          "div",
          { class: "scroll", tabindex: 0, role: "region", "aria-label": "Heat map of cosines" },
          h(
            "table",
            { class: "heat" },
            h("thead", {}, h("tr", {}, h("td", {}), texts.map((_, j) => h("th", { scope: "col", class: "number" }, String(j + 1))))),
            h(
              "tbody",
              {},
              cosine.map((row, i) =>
                h("tr", {}, h("th", { scope: "row", title: texts[i] }, `${i + 1}  `, h("bdi", {}, texts[i])), row.map((v, j) => h("td", { title: `${i + 1} and ${j + 1}: ${v.toFixed(4)}`, style: { background: i === j ? "var(--sunken)" : `color-mix(in srgb, var(--accent) ${shade(v) * 0.55}%, transparent)` } }, n <= 16 ? (i === j ? "1" : v.toFixed(2).replace("-", "−")) : ""))),
              ),
            ),
          ),
        ),
        h("section", {}, h("h2", {}, "Closest"), h("div", { class: "card", style: { "margin-top": ".6rem" } }, bars(pairs.slice(0, 5).map(([i, j, v]) => ({ name: [i, j].map((k) => h("span", {}, `${k + 1}  `, h("bdi", {}, texts[k]))), value: Math.max(0, v), shown: v.toFixed(3).replace("-", "−") })), { kind: "two" }))),
      );
    },
    code: ({ texts }) => [`embed ${lines(texts).map(shell.quoted).join(" ")} --normalize --out vectors.npy`, `vectors = model.embed([${lines(texts).map(shell.python).join(", ")}], normalize=True)\nvectors @ vectors.T`],
  });
}
