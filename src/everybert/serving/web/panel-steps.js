// Step through: the forward pass, one step at a time, with a map, the equation, the shapes and the numbers.
import { Problem, ask, bars, floats, h, panel, shell, signed } from "./kit.js";

const range = (n) => [...Array(n).keys()];

export default function steps(root, context) {
  const { info, params } = context;
  const state = { step: Number(params.get("step") ?? 0) || 0, layer: Math.min(info.layers - 1, Number(params.get("layer") ?? 0) || 0), head: Math.min(info.heads - 1, Number(params.get("head") ?? 0) || 0), token: 1 };
  let steps = 1;
  const keeping = { ...context, remember: (values) => context.remember({ ...values, step: state.step || "", layer: state.layer || "", head: state.head || "" }) };
  const own = panel(root, keeping, {
    title: "Step through",
    lead: "From text to prediction, one step after the other: the equation, in words, and the real numbers.",
    wait: 600,
    fields: [
      { name: "text", label: "Text", value: info.tasks.includes("fill") ? "The dog [MASK] in the garden." : "I love my pet Python" },
      { name: "pair", label: "Second text", more: "Add a second text", value: "", optional: true, kind: "line" },
    ],
    examples: [
      ...(info.tasks.includes("fill") ? [{ words: "a masked word", values: { text: "The dog [MASK] in the garden.", pair: "" } }] : []),
      { words: "one word, twice", values: { text: "I love my pet Python, not coding in Python.", pair: "" } },
      { words: "a pair", values: { text: "Where does Matt live?", pair: "He lives in Canada." } },
    ],
    request: ({ text, pair }, signal) => step({ text, pair }, state.step, signal),
    show(data, values, out) {
      steps = data.titles.length;
      state.step = Math.min(state.step, steps - 1);
      state.token = Math.min(state.token, data.tokens.length - 1);
      const move = (by) => h("button", { type: "button", class: "button", disabled: state.step + by < 0 || state.step + by >= steps, onclick: () => go(state.step + by) }, by < 0 ? "← Back" : "Next →");
      const list = h("ol", { class: "steps", "aria-label": "Steps" }, data.titles.map(([group, title], i) => [
        group === data.titles[i - 1]?.[0] ? null : h("li", { class: "group" }, group),
        h("li", {}, h("button", { type: "button", "aria-current": i === state.step ? "step" : null, onclick: () => go(i) }, title)),
      ]));
      const body = h("article", { "aria-live": "polite" });
      const product = h("section", { class: "part" });
      const draw = () => {
        body.replaceChildren(
          h("h2", {}, `${state.step + 1}. ${data.title}`),
          h("p", { class: "equation" }, data.equation),
          h("p", {}, data.words),
          ...(data.parts.length ? data.parts.map((part) => drawn(part, data, state, draw, data.parts[0].name.endsWith("scores") ? (i, j) => multiply(i, j) : null)) : [pieces(data)]),
          product,
          h("p", { class: "caption" }, `This pass keeps every number. It differs from the fast path by ${data.gap.toExponential(1)} at most.`),
          h("div", { class: "row", style: { "margin-top": "1.25rem" } }, move(-1), move(1)),
        );
      };
      /** One score as the sum of its products, dimension by dimension. */
      async function multiply(i, j) {
        const [q, k] = (await step(values, state.step - 1)).parts.map((part) => ({ row: (n) => floats(part.data).subarray(n * part.shape[1], (n + 1) * part.shape[1]) }));
        const scale = Math.sqrt(q.row(i).length);
        const terms = [...q.row(i)].map((x, d) => (x * k.row(j)[d]) / scale);
        const top = Math.max(...terms.map(Math.abs));
        product.replaceChildren(
          h("header", {}, h("b", {}, "q of “", h("bdi", {}, data.tokens[i]), "” · k of “", h("bdi", {}, data.tokens[j]), `” / √${terms.length} = ${signed(terms.reduce((a, b) => a + b, 0), 2)}`)),
          h(
            "div",
            { class: "terms", role: "img", "aria-label": `${terms.length} products, the largest ${signed(top)}` },
            terms.map((x, d) => h("i", { class: x < 0 ? "less" : "more", title: `dimension ${d + 1}: ${signed(x)}`, style: { "--p": Math.max(0.02, Math.abs(x) / top) } })),
          ),
          h("p", { class: "caption" }, `One bar per dimension: qᵢ·kᵢ / √${terms.length}. Bars above the line raise the score, bars below lower it.`),
        );
      }
      draw();
      out.append(map(data.titles, info, state, go, own.run), h("div", { class: "stepper" }, list, body));
      requestAnimationFrame(() => {
        const here = list.querySelector("[aria-current]");
        if (list.scrollHeight > list.clientHeight) list.scrollTop = here.offsetTop - list.offsetTop - 60;
      });
    },
    code: ({ text, pair }) => [`explain ${shell.quoted(text)}${pair ? ` --pair ${shell.quoted(pair)}` : ""} --layer ${state.layer} --head ${state.head}`, `trace = model.trace(${shell.python(text)}${pair ? `, pair=${shell.python(pair)}` : ""})\ntrace["layers.${state.layer}.attention.weights"][${state.head}]`],
  });
  function step({ text, pair }, number, signal) {
    return ask("playground/step", { model: info.name, text, pair: pair || null, layer: state.layer, head: state.head, step: number }, signal);
  }
  function go(number) {
    if (number < 0 || number >= steps) return;
    state.step = number;
    own.run();
  }
  const keys = (event) => {
    if (/^(INPUT|TEXTAREA|SELECT|BUTTON)$/.test(event.target.tagName)) return;
    if (event.key === "ArrowRight") go(state.step + 1);
    if (event.key === "ArrowLeft") go(state.step - 1);
  };
  document.addEventListener("keydown", keys);
  const close = own.close;
  own.close = () => (document.removeEventListener("keydown", keys), close());
  return own;
}

/** The architecture, to click: input, layers, prediction; below it the heads and blocks of the layer that is shown. */
function map(titles, info, state, go, run) {
  const first = (test) => titles.findIndex(([group], i) => test(group, i));
  const here = titles[state.step][0];
  const block = (words, on, click, label) => h("button", { type: "button", class: "block", "aria-pressed": on, "aria-label": label, onclick: click }, words);
  const inLayer = (change) => () => {
    Object.assign(state, change);
    if (!here.startsWith("Layer")) state.step = first((group) => group.startsWith("Layer"));
    run();
  };
  const arrow = () => h("span", { class: "arrow", "aria-hidden": "true" }, "→");
  const blocks = titles.map(([group, title], i) => [group, title, i]).filter(([group]) => group.startsWith("Layer") && !group.includes("head"));
  return h(
    "div",
    { class: "map", role: "group", "aria-label": "Architecture" },
    h(
      "div",
      {},
      block("Input", here === "Input", () => go(0)),
      arrow(),
      range(info.layers).map((i) => block(String(i + 1), here.startsWith("Layer") && i === state.layer, inLayer({ layer: i }), `Layer ${i + 1}`)),
      arrow(),
      block("Prediction", here === "Prediction", () => go(first((group) => group === "Prediction"))),
    ),
    h(
      "div",
      { class: "inner" },
      h("span", { class: "quiet small" }, `Layer ${state.layer + 1}: heads`),
      range(info.heads).map((i) => block(String(i + 1), here.includes("head") && i === state.head, () => (Object.assign(state, { head: i }), go(first((group) => group.includes("head")))), `Head ${i + 1}`)),
      blocks.map(([, title, i]) => [arrow(), block(title, i === state.step, () => go(i))]),
    ),
  );
}

const pieces = (data) => h("div", { class: "pieces", style: { "margin-top": "1rem" } }, data.tokens.map((token, i) => h("span", { class: "piece" }, h("b", { dir: "auto" }, token), h("small", {}, String(data.ids[i])))));

const size = (shape) => shape.join(" × ");

function drawn(part, data, state, again, pick) {
  const head = h("header", {}, h("b", {}, part.label), h("span", { class: "quiet small mono" }, size(part.shape)), h("span", { class: "quiet small mono" }, part.name));
  if (part.kind === "vocabulary") return h("section", { class: "part" }, head, vocabulary(part, data));
  const values = floats(part.data);
  const [rows, width] = part.shape;
  if (rows * width !== values.length) throw new Problem("The server sent fewer numbers than it said.");
  if (part.kind === "matrix" && rows <= 14) return h("section", { class: "part" }, head, numbers(values, rows, data.tokens, pick), pick ? h("p", { class: "caption" }, "Click a number to see the products that it is the sum of.") : null);
  const names = rows === data.tokens.length ? data.tokens : rows === 1 ? [data.tokens[0]] : range(rows).map(String);
  const row = Math.min(state.token, rows - 1);
  const own = values.subarray(row * width, (row + 1) * width);
  const shown = [...own.slice(0, 8)].map((x) => (x < -1e8 ? "−∞" : x.toFixed(3).replace("-", "−")));
  const finite = own.filter((x) => x > -1e8);
  const mean = finite.reduce((a, b) => a + b, 0) / finite.length;
  const deviation = Math.sqrt(finite.reduce((a, b) => a + (b - mean) ** 2, 0) / finite.length);
  return h(
    "section",
    { class: "part" },
    head,
    h(
      "div",
      { class: "strip" },
      h("div", { class: "names" }, names.map((name, i) => h("button", { type: "button", "aria-pressed": i === row, dir: "auto", "aria-label": `Show the numbers of ${name}`, onclick: () => ((state.token = i), again()) }, name))),
      strip(values, rows, width, part.kind === "matrix"),
    ),
    part.name.endsWith("feed_forward.active") ? bend(floats(data.parts[0].data).subarray(row * width, (row + 1) * width), own) : null,
    h("p", { class: "values" }, h("bdi", {}, names[row]), `: ${shown.join("  ")}${width > 8 ? " …" : ""}`, h("span", { class: "quiet" }, `   mean ${mean.toFixed(3).replace("-", "−")}, deviation ${deviation.toFixed(3)}`)),
  );
}

/** One token's numbers before and after the activation: they lie on its curve. */
function bend(before, after) {
  const [width, height] = [320, 150];
  const canvas = h("canvas", { class: "bend", width: 2 * width, height: 2 * height, role: "img", "aria-label": "Each number after the activation over the number before" });
  const context = canvas.getContext("2d");
  const reach = Math.max(1, ...before.map(Math.abs));
  const [low, high] = [Math.min(-0.5, ...after), Math.max(1, ...after)];
  const x = (v) => (0.5 + (0.47 * v) / reach) * 2 * width;
  const y = (v) => (0.95 - (0.9 * (v - low)) / (high - low)) * 2 * height;
  context.fillStyle = colour("quiet");
  context.fillRect(0, y(0), 2 * width, 1);
  context.fillRect(x(0), 0, 1, 2 * height);
  context.globalAlpha = 0.5;
  for (let i = 0; i < before.length; i++) {
    context.fillStyle = colour(before[i] >= 0 ? "accent" : "second");
    context.fillRect(x(before[i]) - 2, y(after[i]) - 2, 4, 4);
  }
  return canvas;
}

const probes = new Map();
/** A colour of the page as the canvas takes it. */
function colour(name) {
  const key = name + (document.documentElement.dataset.theme ?? matchMedia("(prefers-color-scheme: dark)").matches);
  if (!probes.has(key)) {
    const probe = h("span", { style: { color: `var(--${name})` } });
    document.body.append(probe);
    probes.set(key, getComputedStyle(probe).color);
    probe.remove();
  }
  return probes.get(key);
}

/** A picture with a pixel for each number: blue above zero, brown below. */
function strip(values, rows, width, fromZero) {
  const canvas = h("canvas", { width, height: rows, role: "img", "aria-label": `${rows} by ${width} numbers as colours` });
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, rows);
  const sorted = Float32Array.from(values, (x) => (x < -1e8 ? 0 : Math.abs(x))).sort();
  const top = sorted[Math.floor(0.99 * (sorted.length - 1))] || 1; // one outlier must not blind all others
  const [more, less] = ["accent", "second"].map((name) => colour(name).match(/[\d.]+/g).map(Number));
  for (let i = 0; i < values.length; i++) {
    const x = values[i];
    const hue = x >= 0 || fromZero ? more : less;
    const strength = x < -1e8 ? 0 : Math.min(1, Math.abs(x) / top);
    image.data[4 * i] = hue[0];
    image.data[4 * i + 1] = hue[1];
    image.data[4 * i + 2] = hue[2];
    image.data[4 * i + 3] = 255 * strength;
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

function numbers(values, n, tokens, pick) {
  const weights = values.every((x) => x >= 0 && x <= 1);
  const shown = (x) => (x < -1e8 ? "−∞" : x.toFixed(weights ? 3 : 2).replace("-", "−"));
  const top = Math.max(...values.map((x) => (x < -1e8 ? 0 : Math.abs(x))), 1e-9);
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": "Matrix of numbers" },
    h(
      "table",
      { class: "grid-numbers heat" },
      h("thead", {}, h("tr", {}, h("td", {}), tokens.map((token) => h("th", { scope: "col" }, h("bdi", {}, token))))),
      h(
        "tbody",
        {},
        range(n).map((i) =>
          h("tr", {}, h("th", { scope: "row" }, h("bdi", {}, tokens[i])), range(n).map((j) => {
            const x = values[i * n + j];
            const hue = x >= 0 ? "accent" : "second";
            return h("td", { style: { background: `color-mix(in srgb, var(--${hue}) ${Math.round((40 * Math.min(1, Math.abs(x) / top)))}%, transparent)` } }, pick ? h("button", { type: "button", class: "cell", onclick: () => pick(i, j) }, shown(x)) : shown(x));
          })),
        ),
      ),
    ),
  );
}

const vocabulary = (part, data) =>
  h(
    "div",
    { style: { display: "grid", gap: "1rem", "grid-template-columns": "repeat(auto-fill, minmax(15rem, 1fr))" } },
    data.tokens.map((token, i) => h("div", { class: "card" }, h("h3", { class: "small mono" }, `${i}  `, h("bdi", {}, token)), bars(part.top[i].map(([name, value]) => ({ name, value }))))),
  );
