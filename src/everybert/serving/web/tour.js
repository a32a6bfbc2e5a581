// A tour of five minutes for a class: ten stops, each a panel with an example and what to look at.
import { h } from "./kit.js";

const STOPS = [
  ["tokens", { text: "I love my pet Python, unbelievably so!" }, "Tokens", "BERT reads tokens: whole words if they are frequent, pieces marked ## if they are rare. Each has a number. [CLS] and [SEP] mark the ends."],
  ["steps", { text: "The dog [MASK] in the garden.", step: 1 }, "Embeddings", "Every token becomes a vector, which the first layer reads. In BERT it is the sum of three: one for the token, one for its position, one for its segment."],
  ["steps", { text: "The dog [MASK] in the garden.", step: 4 }, "Scores", "One head compares the query of each token with the key of each other token. Click a number: it is a sum of products, one per dimension."],
  ["attention", {}, "Attention", "After the softmax the scores are weights. Here is the head in which “she” reads most from “friend”. Click other heads: some read the next token, some the whole sentence."],
  ["context", { word: "python", texts: "I love my pet Python\nI love coding in Python" }, "Words in context", "Both start with the same vector. Layer by layer they move apart: one towards pets, one towards programs."],
  ["fill", { text: "Birds build their [MASK] in trees.", were: '["nests"]' }, "Masked words", "BERT was trained on this game: hide 15 % of the tokens and guess them from both sides. Compare with what either side alone would say."],
  ["next", { first: "The man went to the store.", second: "He bought a gallon of milk." }, "Next sentence", "The second game of the paper: does B follow A? Replace B by any other sentence and watch the probability."],
  ["classify", { text: "What a wonderful film, I loved every minute of it." }, "Fine-tuning: a label", "The same network with a small new head, trained on labelled texts. The colours show which tokens speak for the label."],
  ["answer", { question: "When did Mary move?" }, "Fine-tuning: an answer", "A head with two outputs: where the answer begins and where it ends. Nothing else changes."],
  ["similar", {}, "Sentence vectors", "The mean of the token vectors stands for the whole text. Similar meanings have a high cosine, whatever the words."],
];

/** Show the stops one after the other; `visit(panel, values)` opens one. */
export function tour(visit) {
  document.querySelector(".tour")?.remove();
  const card = h("aside", { class: "tour", role: "dialog", "aria-label": "Tour", tabindex: -1 });
  let at = 0;
  function show(number) {
    at = number;
    const [panel, values, title, words] = STOPS[at];
    visit(panel, values);
    const move = (by, words) => h("button", { type: "button", class: "button", onclick: () => show(at + by) }, words);
    card.replaceChildren(
      h("h2", {}, title),
      h("p", {}, words),
      h(
        "div",
        { class: "row" },
        h("span", {}, `${at + 1} of ${STOPS.length}`),
        at > 0 ? move(-1, "Back") : null,
        at < STOPS.length - 1 ? move(1, "Next") : null,
        h("button", { type: "button", class: "quiet-button", onclick: () => card.remove() }, "End"),
      ),
    );
    card.querySelector("button.button")?.focus({ preventScroll: true });
  }
  document.body.append(card);
  show(0);
}
