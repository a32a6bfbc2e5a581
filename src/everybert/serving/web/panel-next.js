// Next sentence: how likely B follows A, and A follows B.
import { ask, bars, h, panel, percent, shell, unable } from "./kit.js";

export default function next(root, context) {
  const { info } = context;
  const title = "Next sentence";
  const lead = "BERT was also trained to say whether one sentence follows another in a text, or comes from somewhere else.";
  if (!info.tasks.includes("next"))
    return unable(root, context, { title, lead, lacks: "has no next-sentence head", remedy: ["RoBERTa, DistilBERT and sentence encoders have none; a BERT that was pre-trained on sentence pairs has:", "everybert pretrain bert-base --corpus corpus --out run\neverybert serve --model run/model"], task: "next" });
  return panel(root, context, {
    title,
    lead,
    fields: [
      { name: "first", label: "Sentence A", value: "The man went to the store." },
      { name: "second", label: "Sentence B", value: "He bought a gallon of milk." },
    ],
    examples: [
      { words: "follows", values: { first: "The man went to the store.", second: "He bought a gallon of milk." } },
      { words: "does not", values: { first: "The man went to the store.", second: "Penguins are flightless birds." } },
      { words: "an order (hard: both ways are likely)", values: { first: "First, boil the water in a large pot.", second: "Then add the pasta and stir." } },
    ],
    request: async ({ first, second }, signal) => {
      const [forward, back] = await Promise.all([ask("next", { model: info.name, first, second }, signal), ask("next", { model: info.name, first: second, second: first }, signal)]);
      return { forward: forward.probability, back: back.probability };
    },
    show({ forward, back }, values, out) {
      out.append(
        h("div", {}, h("p", { class: "big" }, percent(forward)), h("p", { class: "quiet" }, "that B follows A")),
        h("div", { class: "card" }, bars([{ name: "A, then B", value: forward, chosen: true }, { name: "B, then A", value: back }])),
      );
    },
    code: ({ first, second }) => [`next ${shell.quoted(first)} ${shell.quoted(second)}`, `model.next_sentence(${shell.python(first)}, ${shell.python(second)})`],
  });
}
