// Answer: the span in its passage, where it may begin and end, and what speaks for it.
import { ask, bars, h, marked, panel, shell, unable } from "./kit.js";
import { reasons } from "./panel-classify.js";

export default function answer(root, context) {
  const { info } = context;
  const title = "Answer";
  const lead = "A question about a passage: the model gives every token a chance to begin the answer and a chance to end it.";
  if (!info.tasks.includes("answer"))
    return unable(root, context, { title, lead, lacks: "was not fine-tuned to answer questions", remedy: ["Make one from questions with their answers, in SQuAD’s form:", "everybert finetune answer --model MODEL --train train.json --dev dev.json --out answers\neverybert serve --model answers"], task: "answer" });
  return panel(root, context, {
    title,
    lead,
    fields: [
      { name: "question", label: "Question", kind: "line", value: "Where does Matt live?" },
      { name: "context", label: "Passage", value: "Matt lives in Canada with his two dogs. His sister Mary moved to London in 2019, where she works for a bank.", rows: 4 },
    ],
    examples: [
      { words: "where", values: { question: "Where does Matt live?" } },
      { words: "when", values: { question: "When did Mary move?" } },
      { words: "who", values: { question: "Who works for a bank?" } },
    ],
    async request({ question, context: passage }, signal) {
      const data = await ask("playground/answer", { model: info.name, question, context: passage }, signal);
      const asked = { model: info.name, text: question, pair: passage, task: "answer" };
      const why = await ask("playground/attribution", asked, signal).catch((error) => {
        if (error.name === "AbortError") throw error;
        return { error: error.message };
      });
      return { ...data, why };
    },
    show(data, { question, context: passage }, out) {
      const best = data.answers[0];
      out.append(
        h("p", { class: "big answer", dir: "auto" }, best.text || "No answer in this passage."),
        h("p", { class: "passage", dir: "auto" }, best.text ? marked(passage, [{ start: best.start, end: best.end }]) : passage),
        h("div", { class: "card" }, bars(data.answers.map((one) => ({ name: one.text || "no answer", value: one.score })), { kind: "wide" })),
        ends(data),
        reasons(data.why, question, passage),
      );
    },
    code: ({ question, context: passage }) => [
      `answer ${shell.quoted(question)} --context ${shell.quoted(passage)} --top 3`,
      `model.answer(${shell.python(question)}, ${shell.python(passage)}, top=3)\nmodel.attribution(${shell.python(question)}, ${shell.python(passage)}, task="answer")`,
    ],
  });
}

/** Each token between two bars: the chance that the answer begins here, and that it ends here. */
function ends(data) {
  const most = 400;
  const peak = Math.max(...data.start, ...data.end, 1e-9);
  const bar = (p, kind) => h("i", { class: kind, style: { "--p": Math.max(0.02, p / peak) } });
  return h(
    "section",
    {},
    h("h2", {}, "Where it may begin, and end"),
    h("p", { class: "legend" }, h("span", {}, h("i", { style: { background: "var(--accent)" } }), "begins here"), h("span", {}, h("i", { style: { background: "var(--second)" } }), "ends here")),
    h(
      "div",
      { class: "ends", dir: "auto", style: { "margin-top": ".6rem" } },
      data.tokens.slice(0, most).map((token, i) =>
        h("span", { class: "end", title: `begins ${data.start[i].toFixed(4)}, ends ${data.end[i].toFixed(4)}` }, bar(data.start[i], "start"), h("span", {}, token), bar(data.end[i], "stop")),
      ),
    ),
    data.tokens.length > most ? h("p", { class: "caption" }, `The first ${most} of ${data.tokens.length.toLocaleString("en")} tokens are drawn; the answer is looked for in all.`) : null,
  );
}
