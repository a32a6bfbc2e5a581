// Training data: a text as the examples of a pre-training run, with the masks of two epochs.
import { ask, h, panel, shell } from "./kit.js";

const TEXT = `The man went to the store. He bought a gallon of milk. Then he walked home and made a cake.

Penguins are flightless birds. They live in the south. A penguin can swim very fast.

New York is a large city. Many people live in New York. The trains run all night.

Birds build their nests in trees. Some of them fly south in the autumn. In spring they come back.

The children painted a boat. It was blue and very large. After lunch they took it to the lake.`;
const CHOICES = {
  kind: ["Kind", { pairs: "sentence pairs", order: "pairs in order or swapped", full: "running text", document: "running text of one document" }],
  strategy: ["Masks", { token: "single tokens", word: "whole words", span: "spans", pmi: "collocations" }],
  rate: ["Rate", { 0.15: "15 %", 0.3: "30 %", 0.5: "50 %" }],
  length: ["At most", { 16: "16 tokens", 32: "32 tokens", 64: "64 tokens", 128: "128 tokens" }],
  static: ["Epochs", { "": "new masks in each (dynamic)", true: "the same masks in each (static)" }],
};
const USUAL = { kind: "pairs", strategy: "token", rate: "0.15", length: "32", static: "", seed: "3" };
const RECIPES = [
  ["BERT", { static: "true" }],
  ["RoBERTa", { kind: "full" }],
  ["ALBERT", { kind: "order" }],
  ["whole words", { strategy: "word" }],
  ["SpanBERT", { kind: "document", strategy: "span" }],
  ["collocations", { kind: "full", strategy: "pmi", rate: "0.3" }, "New York, gallon of milk"],
];
const MEANING = { mask: "masked", random: "replaced by a random token", kept: "kept" };

export default function examples(root, context) {
  const { info, params } = context;
  const given = (name) => (CHOICES[name] && !((params.get(name) ?? "") in CHOICES[name][1]) ? null : params.get(name)); // not a choice of the panel
  const state = Object.fromEntries(Object.entries(USUAL).map(([name, usual]) => [name, given(name) ?? usual]));
  const pickers = {};
  const set = (change) => {
    Object.assign(state, change);
    for (const [name, picker] of Object.entries(pickers)) picker.value = state[name];
  };
  const controls = Object.entries(CHOICES).map(([name, [words, options]]) => {
    pickers[name] = h("select", { "aria-label": words, onchange: () => (set({ [name]: pickers[name].value }), own.run()) }, Object.entries(options).map(([value, shown]) => h("option", { value }, shown)));
    return h("label", {}, words, pickers[name]);
  });
  controls.push(h("button", { type: "button", class: "quiet-button", onclick: () => (set({ seed: String(Number(state.seed) + 1) }), own.run()) }, "Draw again"));
  set({});
  const body = ({ text, collocations }) => ({
    ...{ text, kind: state.kind, strategy: state.strategy, rate: Number(state.rate), static: state.static === "true" },
    ...{ length: Number(state.length), seed: Number(state.seed), collocations: collocations.split(",").map((words) => words.trim()).filter(Boolean) },
  });
  const own = panel(root, { ...context, remember: (values) => context.remember({ ...values, ...Object.fromEntries(Object.entries(state).filter(([name, value]) => value !== USUAL[name])) }) }, {
    title: "Training data",
    lead: "What a model learns from: a text cut into examples, and in each example some tokens to predict. Blank lines separate documents.",
    wait: 700,
    fields: [
      { name: "text", label: "Text", value: TEXT, rows: 5 },
      { name: "collocations", label: "Collocations, separated by commas", more: "Name collocations", value: "", optional: true, kind: "line" },
    ],
    controls,
    examples: RECIPES.map(([words, change, collocations = ""]) => ({ words, values: { collocations }, then: () => set({ ...USUAL, ...change }) })),
    request: (values, signal) => ask("playground/examples", { model: info.name, ...body(values) }, signal),
    show({ examples: shown }, values, out) {
      const first = shown.filter((one) => one.epoch === 0);
      const hows = shown.flatMap((one) => one.how);
      const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)));
      const labels = [...new Set(first.map((one) => one.label))].filter(Boolean).sort();
      out.append(
        h("dl", { class: "facts" }, fact("examples", first.length), labels.map((label) => fact(label, first.filter((one) => one.label === label).length)), fact("packs", new Set(first.map((one) => one.pack)).size)),
        h("p", { class: "legend" }, Object.entries(MEANING).map(([how, words]) => h("span", {}, h("i", { class: how }), `${words}: ${hows.filter((one) => one === how).length}`))),
        ...first.map((one) => example(one, shown.filter((other) => other.example === one.example))),
        h("p", { class: "caption" }, "The first eight examples, one of each pack in turn. Of a corpus on disk: ", h("code", {}, "everybert corpus show CORPUS --recipe bert-base")),
      );
    },
    code: (values) => [null, python(body(values))],
  });
  return own;
}

/** An example: its label, and for each epoch a line per segment. */
function example(one, epochs) {
  const segments = [...new Set(one.segments)];
  return h(
    "section",
    { class: "card", "aria-label": `Example ${one.example}` },
    h("h2", {}, `Example ${one.example}${one.label ? `: ${one.label}` : ""} `, h("span", { class: "small quiet" }, `pack ${one.pack}`)),
    epochs.map((epoch) => h("div", { class: "example" }, h("h3", {}, `Epoch ${epoch.epoch}`), segments.map((segment) => [h("b", { class: "quiet", title: `segment ${segment}` }, "AB"[segment]), h("div", { class: "pieces" }, units(epoch, segment))]))),
  );
}

/** The tokens of a segment; those that are masked together in one frame. */
function units(epoch, segment) {
  const at = new Map(epoch.predicted.map((position, i) => [position, i]));
  const piece = (position) => {
    const token = epoch.tokens[position];
    const i = at.get(position);
    const kinds = ["piece", segment === 1 && "b", /^(\[(CLS|SEP)\]|<\/?s>)$/.test(token) && "special", i !== undefined && epoch.how[i]];
    return h("span", { class: kinds.filter(Boolean).join(" "), title: i === undefined ? `position ${position}` : `position ${position}: ${MEANING[epoch.how[i]]}, to predict: ${epoch.was[i]}` }, h("b", { dir: "auto" }, token), h("small", { dir: "auto" }, i === undefined ? "\u00a0" : epoch.was[i]));
  };
  const inside = new Map(epoch.units.filter(([start, end]) => end - start > 1).map((unit) => [unit[0], unit[1]]));
  const out = [];
  for (let position = 0; position < epoch.tokens.length; position++) {
    if (epoch.segments[position] !== segment) continue;
    const end = inside.get(position) ?? position + 1;
    const pieces = Array.from({ length: end - position }, (_, k) => piece(position + k));
    out.push(pieces.length > 1 ? h("span", { class: "unit", title: "masked together" }, pieces) : pieces[0]);
    position = end - 1;
  }
  return out;
}

const python = ({ text, kind, strategy, rate, static: fixed, length, collocations, seed }) => `from everybert.corpus.show import text_examples
text_examples(${shell.python(text)}, model.tokenizer, ${shell.python(kind)}, ${shell.python(strategy)}, rate=${rate}, static=${fixed ? "True" : "False"}, length=${length}, collocations=${shell.python(collocations)}, seed=${seed})`;
