// Fill: click words to blank them; candidates from both sides, from either alone, and of served one-way models.
import { ask, bars, h, panel, percent, shell, unable } from "./kit.js";

const MASK = "[MASK]";
const EXAMPLES = [
  ["nests", `Birds build their ${MASK} in trees.`, ["nests"]],
  ["a capital", `Paris is the capital of ${MASK}.`, ["France"]],
  ["two blanks", `He opened the ${MASK} with his ${MASK}.`, ["door", "key"]],
  ["a ticket (hard)", `If you don't ${MASK} at the sign, you will get a ticket.`, ["stop"]],
];

/** A text as words, blanks and what is between. */
function cut(text) {
  const words = new Intl.Segmenter("en", { granularity: "word" });
  return text.split(/(\[MASK\])/).flatMap((part) => (part === MASK ? [{ blank: true, text: part }] : [...words.segment(part)].map(({ segment, isWordLike }) => ({ text: segment, word: isWordLike || /\p{Extended_Pictographic}/u.test(segment) }))));
}

export default function fill(root, context) {
  const title = "Fill in the blank";
  const lead = "A masked language model reads the words on both sides of a blank and says what may stand there. Click a word to blank it.";
  if (!context.info.tasks.includes("fill"))
    return unable(root, context, { title, lead, lacks: "has no masked-word head, so it cannot fill blanks", remedy: ["Any BERT folder with its masked-word head does; the quickstart makes a small one in two minutes:", "everybert quickstart\neverybert serve --model quickstart/pretrained/model"], task: "fill" });

  let originals = [];
  try {
    originals = JSON.parse(context.params.get("were") ?? "null") ?? (context.params.has("text") ? [] : EXAMPLES[0][2]);
  } catch {
    originals = [];
  }
  const line = h("div", { class: "line", dir: "auto", role: "group", "aria-label": "The sentence: click a word to blank it, a blank to restore it" });
  const remembering = { ...context, remember: (values) => context.remember({ ...values, were: originals.some(Boolean) ? JSON.stringify(originals) : "" }) };
  const own = panel(root, remembering, {
    title,
    lead,
    fields: [
      { name: "text", label: "Sentence", value: EXAMPLES[0][1] },
      { name: "pair", label: "Second sentence", more: "Add a second sentence", value: "", optional: true, kind: "line" },
    ],
    examples: EXAMPLES.map(([words, text, were]) => ({ words, values: { text, pair: "" }, then: () => (originals = [...were]) })),
    request: async ({ text, pair }, signal) => {
      const blanks = `${text} ${pair}`.split(MASK).length - 1;
      if (originals.length !== blanks) originals = Array(blanks).fill(null); // edited by hand: what stood there is not known
      drawLine();
      if (!blanks) return null;
      const both = context.info.causal ? null : ask("playground/fill", { model: context.info.name, text, pair: pair || null, originals, top: 8 }, signal);
      const others = context.models.filter((model) => model.causal && !model.adapter && model.tasks.includes("fill"));
      const ways = await Promise.all((context.info.causal ? [context.info] : others).map((model) => oneWay(model, pair ? `${text} ${pair}` : text, signal)));
      return { blanks: (await both)?.blanks ?? [], ways };
    },
    show(data, { text, pair }, out) {
      out.append(line);
      if (!data) return out.append(h("p", { class: "quiet" }, "Click a word above to blank it, or write [MASK]."));
      const whole = pair ? `${text} ${pair}` : text;
      const parts = whole.split(MASK);
      data.blanks.forEach((blank, number) => {
        const before = parts.slice(0, number + 1).join("__").trim();
        const after = parts.slice(number + 1).join("__").trim();
        const top = Math.max(...[blank.left, blank.both, blank.right].map((guesses) => guesses[0].score));
        const column = (heading, words, guesses, kind) =>
          h(
            "div",
            { class: kind },
            h("h3", {}, heading),
            h("p", { class: "context", dir: "auto" }, words),
            bars(guesses.map((guess) => ({ name: guess.token, value: guess.score, chosen: guess.token.toLowerCase() === blank.original?.word.toLowerCase(), label: `Put in ${guess.token}, ${percent(guess.score)}`, click: () => put(number, guess.token) })), { top }),
          );
        out.append(
          h(
            "section",
            { class: "card", "aria-label": `Blank ${number + 1}` },
            h("h2", {}, data.blanks.length > 1 ? `Blank ${number + 1}` : "What may stand there"),
            blank.original ? h("p", { class: "small quiet original" }, was(blank.original)) : null,
            h(
              "div",
              { class: "three" },
              column("From the left alone", `${before} ___`, blank.left, "aside"),
              column("From both sides", `${tail(before)} ___ ${head(after)}`, blank.both, "both"),
              column("From the right alone", `___ ${after}`, blank.right, "aside"),
            ),
          ),
        );
      });
      for (const { name, words, read, guesses } of data.ways)
        out.append(
          h("section", { class: "card one-way", "aria-label": words }, h("h2", {}, `A ${words} model would say`), h("p", { class: "small quiet", dir: "auto" }, `${name} reads: ${read}`), bars(guesses.map((guess) => ({ name: guess.token, value: guess.score })))),
        );
    },
    code: ({ text, pair }) => context.info.causal ? [`fill ${shell.quoted(reach(context.info, text))} --top 8`, `model.fill(${shell.python(reach(context.info, text))}, top=8)`] : [
      `fill ${shell.quoted(text)}${pair ? ` --pair ${shell.quoted(pair)}` : ""} --top 8`,
      `model.fill(${shell.python(text)}, top=8${pair ? `, pair=${shell.python(pair)}` : ""})`,
    ],
  });

  /** The part of a text that a model reads at a blank. */
  const reach = ({ causal }, whole) => (causal === "reverse" ? MASK + whole.slice(whole.lastIndexOf(MASK) + MASK.length) : causal ? whole.slice(0, whole.indexOf(MASK)) + MASK : whole);

  /** What a model that reads one way says of the first blank (of one that reads from the right, of the last). */
  async function oneWay(model, whole, signal) {
    const read = reach(model, whole);
    const { results } = await ask("fill", { model: model.name, text: read, top: 8 }, signal);
    return { name: model.name, words: model.causal === "reverse" ? "right-to-left" : "left-to-right", read: read.replace(MASK, "___"), guesses: results[0][0] };
  }

  const was = ({ word, pieces, score, rank, seen }) =>
    ["“", h("bdi", {}, word), score === null ? `” stood here: ${pieces.length} pieces (${pieces.join(" ")}), which one blank cannot hold.` : `” stood here: ${percent(score)}, ${rank === 1 ? "the first guess" : `guess number ${rank.toLocaleString("en")}`}. Not hidden, it would get ${percent(seen)}: a model that reads both sides sees the word itself, so words are masked.`];
  const tail = (words) => words.split(" ").slice(-3).join(" ");
  const head = (words) => words.split(" ").slice(0, 3).join(" ");

  function drawLine() {
    let number = -1;
    const piece = (field) => (part, index) => {
      if (part.blank) {
        const mine = ++number;
        const name = originals[mine];
        return h("button", { type: "button", class: "word blank", "aria-label": name ? `Blank ${mine + 1}: restore ${name}` : `Blank ${mine + 1}`, onclick: () => restore(mine) }, name ? ["___ ", h("bdi", {}, `${name}?`)] : "___");
      }
      if (!part.word) return part.text;
      return h("button", { type: "button", class: "word", "aria-label": `Blank out ${part.text}`, onclick: () => blank(field, index) }, part.text);
    };
    const { text, pair } = own.values;
    line.replaceChildren(...cut(text).map(piece("text")), ...(pair ? [h("br"), ...cut(pair).map(piece("pair"))] : []));
  }

  function blank(field, index) {
    const parts = cut(own.values[field]);
    const earlier = field === "pair" ? own.values.text.split(MASK).length - 1 : 0;
    originals.splice(earlier + parts.slice(0, index).filter((part) => part.blank).length, 0, parts[index].text);
    parts[index].text = MASK;
    own.fill({ [field]: parts.map((part) => part.text).join("") });
    own.run();
  }

  function put(number, word) {
    const inText = own.values.text.split(MASK).length - 1;
    const field = number < inText ? "text" : "pair";
    let left = number < inText ? number : number - inText;
    const filled = own.values[field].replace(/\s?\[MASK\]/g, (found) => (left-- !== 0 ? found : word.startsWith("##") ? word.slice(2) : found.replace(MASK, word)));
    originals.splice(number, 1);
    own.fill({ [field]: filled });
    own.run();
  }

  const restore = (number) => put(number, originals[number] ?? "…");
  return own;
}
