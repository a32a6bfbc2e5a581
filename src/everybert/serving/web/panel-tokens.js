// Tokens: the text as pieces, with ids, segments, positions; case; what is unknown; other models' pieces.
import { ask, h, notice, panel, shell } from "./kit.js";

const chips = (data, other) =>
  h(
    "div",
    { class: "pieces", role: "list", "aria-label": "Pieces" },
    data.tokens.map((token, i) => {
      const kinds = ["piece", data.special[i] && "special", data.unknown[i] && "unknown", data.texts[i] === 1 && "b", other && !data.special[i] && !other.has(token) && "changed"];
      return h(
        "span",
        { class: kinds.filter(Boolean).join(" "), role: "listitem", title: `position ${i}, id ${data.ids[i]}, segment ${data.segments[i]}` },
        h("b", { dir: "auto" }, token),
        h("small", {}, String(data.ids[i])),
      );
    }),
  );

const KINDS = { wordpiece: "WordPiece", bpe: "byte-level BPE", unigram: "Unigram" };

/** What a comparison of tokenizers counts; words are what spaces separate. */
function count(data, text) {
  const plain = data.special.filter((special) => !special).length;
  const words = text.split(/\s+/).filter(Boolean).length;
  return { plain, unknown: data.unknown.filter(Boolean).length, perWord: words ? (plain / words).toFixed(2) : "–" };
}

/** The tokenizers of all served models in one table. */
function sides(all, text) {
  const rows = all.map((one) => ({ one, counted: count(one, text) }));
  const columns = ["model", "kind", "case", "vocabulary", "tokens", "unknown", "tokens per word"];
  const cells = ({ one, counted }) => [one.name, KINDS[one.kind], one.lowercase ? "uncased" : "cased", one.vocabulary.toLocaleString("en"), counted.plain, counted.unknown, counted.perWord];
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": "Tokenizers side by side" },
    h("table", {}, h("thead", {}, h("tr", {}, columns.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows.map((row) => h("tr", {}, cells(row).map((cell) => h("td", {}, String(cell))))))),
  );
}

export default function tokens(root, context) {
  const { info } = context;
  return panel(root, context, {
    title: "Tokens",
    lead: `What the model reads instead of letters: pieces from a vocabulary of ${info.vocabulary.toLocaleString("en")}, each a number.`,
    fields: [
      { name: "text", label: "Text", value: "I love my pet Python, unbelievably so! 🐍" },
      { name: "pair", label: "Second text", more: "Add a second text", value: "", optional: true, kind: "line" },
    ],
    examples: [
      { words: "long words", values: { text: "Antidisestablishmentarianism is pseudoscientific.", pair: "" } },
      { words: "a pair", values: { text: "Where does Matt live?", pair: "Matt lives in Canada." } },
      { words: "other scripts", values: { text: "Ğaziantep naïve 東京 שלום مرحبا 🎉", pair: "" } },
    ],
    request: ({ text, pair }, signal) => ask("playground/tokens", { model: info.name, text, pair: pair || null }, signal),
    show(data, { text, pair }, out) {
      const n = data.tokens.length;
      const counted = count(data, `${text} ${pair}`);
      const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
      out.append(
        h("dl", { class: "facts" }, fact("tokens", `${n} of ${info.window.toLocaleString("en")}`), fact("special", String(n - counted.plain)), fact("unknown", String(counted.unknown)), fact("tokens per word", counted.perWord), fact("kind", KINDS[data.kind])),
        chips(data),
      );
      if (n > info.window) out.append(notice(h("p", {}, `This is longer than the ${info.window.toLocaleString("en")} tokens the model reads at once: tasks read it in overlapping windows.`)));
      if (counted.unknown) out.append(h("p", { class: "small" }, `${counted.unknown === 1 ? "One piece is" : `${counted.unknown} pieces are`} unknown to this vocabulary: the model sees only that something stood there.`));
      const mine = new Set(data.tokens);
      const compare = h("section", {}, h("h2", {}, "Cased against uncased"));
      if (data.lowercase) compare.append(h("p", { class: "caption" }, "This model lower-cases what it reads: “Python” and “python” are the same to it."));
      else compare.append(h("p", { class: "caption" }, "This model minds case. The same text lower-cased (changed pieces are marked):"), h("div", { style: { "margin-top": ".6rem" } }, chips(data.lowered, mine)));
      if (data.others.length) compare.append(h("h2", {}, "Side by side"), sides([{ ...data, name: info.name }, ...data.others], `${text} ${pair}`));
      for (const other of data.others) compare.append(h("p", { class: "caption" }, other.name), h("div", { style: { "margin-top": ".4rem" } }, chips(other, mine)));
      out.append(compare, table(data));
    },
    code: ({ text, pair }) => [`tokens ${shell.quoted(text)}${pair ? ` --pair ${shell.quoted(pair)}` : ""}`, pair ? `model.tokens(${shell.python(text)}, pair=${shell.python(pair)})` : `model.tokens(${shell.python(text)})`],
  });
}

function table(data) {
  const columns = ["position", "token", "id", "segment", "characters"];
  return h(
    "details",
    {},
    h("summary", {}, "As a table"),
    h(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of tokens" },
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, columns.map((name) => h("th", { scope: "col" }, name)))),
        h(
          "tbody",
          {},
          data.tokens.map((token, i) => h("tr", {}, h("td", {}, String(i)), h("td", { class: "mono", dir: "auto" }, token), h("td", {}, String(data.ids[i])), h("td", {}, String(data.segments[i])), h("td", {}, data.special[i] ? "–" : data.offsets[i].join("–")))),
        ),
      ),
    ),
  );
}
