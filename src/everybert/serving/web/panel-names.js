// Names: entities, highlighted where they stand.
import { ask, h, marked, panel, percent, shell, unable } from "./kit.js";

export default function names(root, context) {
  const { info } = context;
  const title = "Names";
  const lead = "A tagger marks the stretches of a text that are people, places, organisations, or whatever it was trained to find.";
  if (!info.tasks.includes("tag"))
    return unable(root, context, { title, lead, lacks: "was not fine-tuned to tag words", remedy: ["Make one from examples, a word and its tag a line:", "everybert finetune tag --model MODEL --train train.conll --dev dev.conll --out names\neverybert serve --model names"], task: "tag" });
  return panel(root, context, {
    title,
    lead,
    fields: [{ name: "text", label: "Text", value: "John Smith lives in New York and works for Acme.", rows: 2 }],
    examples: [
      { words: "a sentence", values: { text: "John Smith lives in New York and works for Acme." } },
      { words: "a biography", values: { text: "Marie Curie was born in Warsaw and moved to Paris, where she taught at the Sorbonne." } },
      { words: "the news", values: { text: "Reuters says that Siemens will build trains for Egypt in its plant in Krefeld." } },
    ],
    request: ({ text }, signal) => ask("tag", { model: info.name, text: [text] }, signal),
    show(data, { text }, out) {
      const spans = data.results[0];
      const kinds = [...new Set(spans.map((span) => span.label))].sort();
      const hue = (label) => `k${kinds.indexOf(label) % 4}`;
      out.append(
        h("p", { class: "passage", dir: "auto" }, marked(text, spans.map((span) => ({ start: span.start, end: span.end, class: hue(span.label), title: percent(span.score), after: h("span", { class: "tag" }, span.label) })))),
      );
      if (!spans.length) return out.append(h("p", { class: "quiet" }, "The model finds nothing to mark in this text."));
      out.append(
        h(
          "div",
          { class: "scroll", tabindex: 0, role: "region", "aria-label": "Spans" },
          h(
            "table",
            {},
            h("thead", {}, h("tr", {}, ["span", "label", "characters", "probability"].map((name) => h("th", { scope: "col" }, name)))),
            h("tbody", {}, spans.slice(0, 200).map((span) => h("tr", {}, h("td", { dir: "auto" }, span.text), h("td", {}, span.label), h("td", { class: "number" }, `${span.start}–${span.end}`), h("td", { class: "number" }, percent(span.score))))),
          ),
        ),
      );
    },
    code: ({ text }) => [`tag ${shell.quoted(text)}`, `model.tag(${shell.python(text)})`],
  });
}
