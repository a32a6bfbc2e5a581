// Attention: all heads as thumbnails, one large; presets that find the head which shows what they promise.
import { attentionView } from "./attention-view.js";
import { ask, bytes, h, panel, shell } from "./kit.js";

const PRESETS = [
  { words: "pronoun → antecedent", text: "My friend told me about this class and I love it so far! She was right.", from: "she", to: "friend" },
  { words: "verb → subject", text: "The keys to the old cabinet are on the table.", from: "are", to: "keys" },
  { words: "object → verb", text: "After lunch the children painted a very large boat.", from: "boat", to: "painted" },
  { words: "across a pair", text: "The cat sleeps on the sofa.", pair: "Where is the cat?", from: "cat", to: "cat", across: true },
];

export default function attention(root, context) {
  const { info, params } = context;
  const number = (name) => (params.has(name) ? Number(params.get(name)) : undefined);
  let state = { layer: number("layer"), head: number("head"), view: params.get("view"), filter: params.get("filter"), special: params.get("special") !== "no" };
  let seek = state.layer === undefined && !params.has("text") ? PRESETS[0] : null;
  let view = null;
  const keeping = {
    ...context,
    remember: (values) => context.remember({ ...values, layer: state.layer, head: state.head, view: state.view === "matrix" ? "matrix" : "", filter: state.filter === "all" ? "" : state.filter, special: state.special ? "" : "no" }),
  };
  const own = panel(root, keeping, {
    title: "Attention",
    lead: "In every layer, each head lets every token draw on the others. A link’s strength is the share that the token on the left takes from the one on the right.",
    wait: 600,
    fields: [
      { name: "text", label: "Text A", value: PRESETS[0].text },
      { name: "pair", label: "Text B", more: "Add a second text", value: "", optional: true, kind: "line" },
    ],
    examples: PRESETS.map((preset) => ({ words: preset.words, values: { text: preset.text, pair: preset.pair ?? "" }, then: () => (seek = preset) })),
    async request({ text, pair }, signal) {
      const asked = { model: info.name, text, pair: pair || null };
      const data = await ask("playground/attention", asked, signal);
      const link = (source, target) => ask("playground/attention/link", { ...asked, source, target }).then((found) => found.weights);
      const head = (layer, number) => ask("playground/attention/head", { ...asked, layer, head: number }).then((found) => new Uint16Array(bytes(found.weights).buffer));
      const off = (heads) => ask("playground/attention/off", { ...asked, heads });
      const source = { ...data, thumbnails: bytes(data.thumbnails), head, link, off };
      const found = seek && ends(source, seek);
      seek = null;
      if (found) {
        const each = await link(...found);
        const best = each.indexOf(Math.max(...each));
        state = { ...state, layer: Math.floor(best / data.heads), head: best % data.heads, filter: found.filter ?? "all" };
        source.found = found;
        keeping.remember(own.values); // the address names the head that was found
      }
      return source;
    },
    show(source, values, out) {
      view?.close();
      const box = h("div");
      out.append(box);
      view = attentionView(box, source, state, (now) => {
        state = { layer: now.layer, head: now.head, view: now.view, filter: now.filter, special: now.special };
        keeping.remember(own.values);
      });
      state = { ...state, layer: view.state.layer, head: view.state.head };
      if (source.found) view.point({ side: "from", token: source.found[0] }, source.found);
    },
    code: ({ text, pair }) => [
      `attention ${shell.quoted(text)}${pair ? ` --pair ${shell.quoted(pair)}` : ""} --out attention.html`,
      `model.attention(${shell.python(text)}${pair ? `, pair=${shell.python(pair)}` : ""})  # draws itself in a notebook; .weights are the numbers`,
    ],
  });
  const close = own.close;
  own.close = () => (view?.close(), close());
  return own;
}

/** The tokens a preset speaks of, in this model's spelling. */
function ends(source, { from, to, across }) {
  const plain = source.tokens.map((token) => token.replace(/^(##|Ġ|▁)/, "").toLowerCase());
  const first = plain.findIndex((token, i) => token === from && (!across || source.texts[i] === 1));
  const last = plain.findIndex((token, i) => token === to && (!across || source.texts[i] === 0));
  return first < 0 || last < 0 ? null : Object.assign([first, last], { filter: across ? "ba" : undefined });
}
