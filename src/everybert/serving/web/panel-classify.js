// Classify: labels with bars, and the pieces of text that speak for the first.
import { ask, bars, h, panel, shaded, shell, signed, unable } from "./kit.js";

export default function classify(root, context) {
  const { info } = context;
  const title = info.regression ? "Predict a number" : "Classify";
  const lead = "A text, or a pair of texts, in; a label out. Below it: which pieces of the text the answer rests on.";
  if (!info.tasks.includes("classify") && !info.regression)
    return unable(root, context, { title, lead, lacks: "was not fine-tuned to label texts", remedy: ["Make one from examples, a text and its label a line:", "everybert finetune classify --model MODEL --train train.tsv --dev dev.tsv --out labels\neverybert serve --model labels"], task: "classify" });
  const own = panel(root, context, {
    title,
    lead,
    fields: [
      { name: "text", label: "Text", value: "What a wonderful film, I loved every minute of it." },
      { name: "pair", label: "Second text", more: "Add a second text, if the model compares two", value: "", optional: true, kind: "line" },
    ],
    examples: [
      { words: "praise", values: { text: "What a wonderful film, I loved every minute of it.", pair: "" } },
      { words: "a complaint", values: { text: "The food was cold and the waiter was rude.", pair: "" } },
      { words: "not bad (hard)", values: { text: "It was not bad at all, though a little long.", pair: "" } },
    ],
    async request({ text, pair }, signal) {
      const { results } = await ask("classify", { model: info.name, text: [pair ? [text, pair] : text] }, signal);
      const asked = { model: info.name, text, pair: pair || null };
      const why = await ask("playground/attribution", asked, signal).catch((error) => {
        if (error.name === "AbortError") throw error;
        return { error: error.message };
      });
      return { prediction: results[0], why };
    },
    show({ prediction, why }, { text, pair }, out) {
      if (prediction.value !== undefined && prediction.value !== null) out.append(h("p", { class: "big" }, prediction.value.toFixed(3)));
      else {
        const order = Object.entries(prediction.scores).sort((a, b) => b[1] - a[1]);
        const given = prediction.labels?.length ? prediction.labels : [prediction.label];
        out.append(h("div", { class: "card" }, bars(order.slice(0, 12).map(([name, value]) => ({ name, value, chosen: given.includes(name) })))));
      }
      out.append(reasons(why, text, pair));
    },
    code: ({ text, pair }) =>
      info.regression
        ? [`regress ${shell.quoted(text)}${pair ? ` --pair ${shell.quoted(pair)}` : ""}`, `model.regress([${one(text, pair)}])`]
        : [`classify ${shell.quoted(text)}${pair ? ` --pair ${shell.quoted(pair)}` : ""} --scores`, `model.classify([${one(text, pair)}])\nmodel.attribution(${shell.python(text)}${pair ? `, pair=${shell.python(pair)}` : ""})`],
  });
  return own;
}

const one = (text, pair) => (pair ? `(${shell.python(text)}, ${shell.python(pair)})` : shell.python(text));

/** The text shaded by how each piece speaks for the prediction. */
export function reasons(why, text, pair) {
  if (why.error) return h("p", { class: "quiet small" }, `Why: ${why.error}`);
  const tokens = (number) => why.tokens.map((_, i) => ({ start: why.offsets[i][0], end: why.offsets[i][1], score: why.scores[i], text: why.texts[i] })).filter((t) => t.text === number);
  const total = why.scores.reduce((sum, score) => sum + score, 0);
  return h(
    "section",
    { class: "why" },
    h("h2", {}, `What speaks for it: ${why.target}`),
    h("p", { class: "passage", dir: "auto", style: { "margin-top": ".5rem" } }, shaded(text, tokens(0))),
    pair ? h("p", { class: "passage", dir: "auto" }, shaded(pair, tokens(1))) : null,
    h("p", { class: "legend" }, h("span", {}, h("i", { style: { background: "var(--accent)" } }), "speaks for"), h("span", {}, h("i", { style: { background: "var(--second)" } }), "speaks against")),
    h(
      "p",
      { class: "caption number" },
      `The score of the text is ${signed(why.value)}; with every word masked it is ${signed(why.baseline)}. The tokens explain ${signed(total)} of the difference of ${signed(why.value - why.baseline)}.`,
    ),
  );
}
