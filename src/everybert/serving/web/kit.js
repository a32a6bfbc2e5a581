// What the panels share: elements, requests, a form that asks as one types, bars, code to copy.

/** An element; text is always text, never HTML. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else if (name === "style") for (const [property, set] of Object.entries(value)) element.style.setProperty(property, set);
    else if (name.startsWith("aria-") && typeof value === "boolean") element.setAttribute(name, String(value));
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const percent = (p) => (p >= 0.9995 ? "100 %" : p >= 0.0995 ? `${(100 * p).toFixed(1)} %` : p >= 0.0001 ? `${(100 * p).toFixed(2)} %` : "<0.01 %");
export const signed = (x, digits = 3) => {
  const shown = Math.abs(x).toFixed(digits);
  return Number(shown) === 0 ? shown : `${x < 0 ? "−" : "+"}${shown}`;
};
export const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
export const floats = (text) => new Float32Array(bytes(text).buffer);
/** Characters per text. */
const MOST = 20000;
const count = (n) => n.toLocaleString("en");

// ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────

export class Problem extends Error {}

/** Someone to tell when the server is gone and when it is back; set by the page. */
export const server = { lost: () => {}, found: () => {}, key: () => null };

/** POST (or GET without a body), and what came back; errors are sentences. */
export async function ask(path, body, signal, again = 3) {
  const began = performance.now();
  const key = sessionStorage.getItem("everybert-key");
  const headers = { ...(body ? { "content-type": "application/json" } : {}), ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let reply;
  try {
    reply = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    server.lost();
    throw new Problem("The server does not answer. It may have been stopped, or the connection is gone.");
  }
  server.found();
  if (reply.ok) {
    const data = await reply.json();
    if (signal) signal.answers = [...(signal.answers ?? []), { path, data, milliseconds: performance.now() - began }];
    return data;
  }
  if (reply.status === 429 && again) {
    await new Promise((done) => setTimeout(done, 1000 * reply.headers.get("retry-after")));
    return ask(path, body, signal, again - 1);
  }
  const said = await reply.json().catch(() => ({}));
  if (reply.status === 401 && server.key()) return ask(path, body, signal);
  const words = typeof said.error === "string" ? said.error : (said.error?.message ?? `the server answered ${reply.status}`);
  throw new Problem(words.charAt(0).toUpperCase() + words.slice(1));
}

// ── small parts ───────────────────────────────────────────────────────────────────────────────────────────────

export const notice = (...children) => h("div", { class: "notice" }, ...children);
export const trouble = (words) => h("div", { class: "notice bad", role: "alert" }, h("p", {}, words));

/** Horizontal bars: rows of {name, value, shown, click, chosen}; value in 0 … 1 of `top`. */
export function bars(rows, { top = 1, kind = "" } = {}) {
  return h(
    "ul",
    { class: `bars ${kind}` },
    rows.map(({ name, value, shown, click, chosen, label }) => {
      const cells = [
        h("span", { class: "name", dir: "auto" }, name),
        h("span", { class: "track", "aria-hidden": "true" }, h("i", { style: { transform: `scaleX(${Math.max(0, Math.min(1, value / top))})` } })),
        h("span", { class: "value" }, shown ?? percent(value)),
      ];
      const attributes = { class: `bar${chosen ? " chosen" : ""}` };
      return h("li", {}, click ? h("button", { ...attributes, type: "button", onclick: click, "aria-label": label }, cells) : h("div", attributes, cells));
    }),
  );
}

/** A text with marked stretches [{start, end, ...attributes, after}], which do not overlap. Offsets count code points. */
export function marked(text, spans, tag = "mark") {
  const letters = [...text]; // Python counts code points; JavaScript strings count UTF-16 units
  const out = [];
  let at = 0;
  for (const { start, end, after, ...attributes } of [...spans].sort((a, b) => a.start - b.start)) {
    if (start < at || end <= start) continue;
    out.push(letters.slice(at, start).join(""));
    out.push(h(tag, attributes, letters.slice(start, end).join(""), after));
    at = end;
  }
  out.push(letters.slice(at).join(""));
  return out;
}

/** Text shaded by signed scores, as large as `top`. */
export function shaded(text, tokens) {
  const top = Math.max(...tokens.map((t) => Math.abs(t.score)), 1e-9);
  return marked(
    text,
    tokens.map(({ start, end, score }) => ({
      start,
      end,
      class: "shade",
      title: signed(score),
      style: { background: `color-mix(in srgb, var(--${score >= 0 ? "accent" : "second"}) ${Math.round((42 * Math.abs(score)) / top)}%, transparent)` },
    })),
    "span",
  );
}

const quoted = (text) => `"${String(text).replace(/["\\$`]/g, "\\$&")}"`;
const python = (text) => JSON.stringify(text);
export const shell = { quoted, python };

/** Code whose quoted texts keep to themselves: one that reads from the right does not carry its neighbours along. */
const isolated = (text) => text.split(/("(?:[^"\\]|\\.)*")/).map((part, i) => (i % 2 ? h("bdi", {}, part) : part));

/** Lines of code with a button that copies them. */
const code = (name, text, whole = text) =>
  h(
    "div",
    { class: "code" },
    h("pre", { tabindex: 0, role: "region", "aria-label": name }, isolated(text)),
    h("button", { type: "button", class: "quiet-button", "aria-label": `Copy: ${name}`, onclick: (event) => copy(event.currentTarget, whole) }, "Copy"),
  );

/** The command, where there is one, and the lines of Python that give the same. */
function same({ info, models }, cli, lines) {
  const own = info.adapter && info.folder === models.find((model) => model.name === info.model).folder; // part of the model's folder
  const adapter = own && /^(classify|tag|answer) /.test(cli ?? "") ? ` --adapter ${quoted(info.adapter)}` : ""; // the commands that have it
  const use = own ? `\nmodel.use(${python(info.adapter)})` : "";
  return [...(cli ? [code("Command line", `everybert ${cli} --model ${quoted(info.folder)}${adapter}`)] : []), code("Python", `import everybert\nmodel = everybert.load(${python(info.folder)})${use}\n${lines}`)];
}

/** How long each answer took, and its JSON; long arrays and texts are shortened where they are shown, not where copied. */
function answers(given) {
  const short = (key, value) => (typeof value === "string" && value.length > 200 ? `${value.slice(0, 60)}… (${count(value.length)} characters)` : Array.isArray(value) && value.length > 40 ? [...value.slice(0, 40), `… (${count(value.length)} items)`] : value);
  const shown = (data) => JSON.stringify(data, short, 2).replace(/\[[^[\]{}]*\]/g, (list) => list.replace(/\s+/g, " "));
  if (!given.length) return ""; // nothing was asked
  return h(
    "details",
    { class: "json" },
    h("summary", {}, `Answered in ${count(Math.round(Math.max(...given.map((one) => one.milliseconds))))} ms: JSON`),
    given.map(({ path, data }) => code(`POST /${path}`, shown(data), JSON.stringify(data))),
  );
}

export async function copy(button, text) {
  const was = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select it";
  }
  setTimeout(() => (button.textContent = was), 1400);
}

// ── a form that asks as one types ─────────────────────────────────────────────────────────────────────────────

/**
 * The frame of a panel. `fields`: [{name, label, kind: "area" | "line", value, optional, more: words that open it}]; `examples`: [{words, values}];
 * `request(values, signal)` promises data, `show(data, values, root)` draws it, `code(values)` gives [command or null, Python].
 */
export function panel(root, context, { title, lead, fields, examples = [], controls = [], request, show, code: lines, wait = 350 }) {
  const { params } = context;
  const values = {};
  const inputs = {};
  const form = h("form", { class: "form", onsubmit: (event) => (event.preventDefault(), run()) });
  for (const field of fields) {
    values[field.name] = params.get(field.name) ?? field.value ?? "";
    const id = `field-${field.name}${context.side ?? ""}`; // unique where two panels are compared
    const over = h("span", { class: "count", id: `${id}-count`, role: "status" });
    const input = h(field.kind === "line" ? "input" : "textarea", {
      id,
      type: field.kind === "line" ? "text" : undefined,
      rows: field.kind === "line" ? undefined : (field.rows ?? 1),
      dir: "auto",
      "aria-describedby": `${id}-count`,
      spellcheck: "false",
      autocomplete: "off",
      value: values[field.name],
      placeholder: field.placeholder,
      oninput: () => (set(field.name, input.value), later()),
      onkeydown: (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey || field.kind === "line") && (event.preventDefault(), run()),
    });
    inputs[field.name] = { input, over };
    const body = h("div", { class: "field" }, h("div", { class: "label" }, h("label", { for: id }, field.label), over), input);
    form.append(field.more ? h("details", { class: "more", open: values[field.name] !== "" }, h("summary", {}, field.more), body) : body);
  }
  if (controls.length) form.append(h("div", { class: "controls" }, controls));
  if (examples.length)
    form.append(
      h(
        "div",
        { class: "examples", role: "group", "aria-label": "Examples" },
        h("span", {}, "Try"),
        examples.map((example) => h("button", { type: "button", class: "chip", onclick: () => (fill(example.values), example.then?.(), run()) }, example.words)),
      ),
    );
  const result = h("section", { class: "result", "aria-label": "Result", "aria-busy": "false" });
  const codes = h("section", { class: "same" });
  root.replaceChildren(h("div", { class: "title" }, h("h1", {}, title), context.tools), h("p", { class: "lead" }, lead), form, result, codes);

  function set(name, value) {
    values[name] = value;
    const n = [...value].length;
    const { over } = inputs[name];
    over.textContent = n > 500 ? `${count(n)} of ${count(MOST)} characters` : "";
    over.classList.toggle("over", n > MOST);
  }

  function fill(change) {
    for (const [name, value] of Object.entries(change)) {
      set(name, value);
      inputs[name].input.value = value;
      if (value) inputs[name].input.closest("details")?.setAttribute("open", "");
    }
  }

  let timer = 0;
  let flight = null;
  let closed = false;
  const later = () => {
    clearTimeout(timer);
    result.dataset.stale = ""; // what is shown is not yet of what was typed
    timer = setTimeout(run, wait);
  };

  async function run() {
    clearTimeout(timer);
    flight?.abort();
    const mine = (flight = new AbortController());
    context.remember(values);
    codes.replaceChildren();
    const long = fields.find((field) => [...values[field.name]].length > MOST);
    if (long) {
      const n = [...values[long.name]].length;
      return done(trouble(`${long.label}: ${count(n)} characters are more than this page takes at once (${count(MOST)}). Paste less, or use the command line, which reads files of any length.`));
    }
    const empty = fields.find((field) => !field.optional && !values[field.name].trim());
    if (empty) return done(notice(h("p", {}, `${empty.label}: type something above.`)));
    codes.replaceChildren(
      h(
        "h2",
        {},
        h("span", {}, "The same, elsewhere"),
        h("button", { type: "button", class: "quiet-button", onclick: async () => (await import("./picture.js")).savePicture(result, `everybert-${title.toLowerCase().replace(/\W+/g, "-")}.png`) }, "↓ Picture"),
        h("button", { type: "button", class: "quiet-button permalink", onclick: (event) => copy(event.currentTarget, location.href) }, "Copy link to this"),
      ),
      ...same(context, ...lines(values)),
    );
    result.setAttribute("aria-busy", "true");
    try {
      const data = await request({ ...values }, mine.signal);
      if (mine.signal.aborted || closed) return;
      const fresh = h("div");
      show(data, { ...values }, fresh);
      done(...fresh.childNodes);
      codes.append(answers(mine.signal.answers ?? []));
    } catch (error) {
      if (error.name === "AbortError" || mine.signal.aborted || closed) return;
      if (!(error instanceof Problem)) console.error(error);
      done(trouble(error instanceof Problem ? error.message : `Something went wrong on this page: ${error.message}`));
    }
  }

  function done(...children) {
    result.replaceChildren(...children);
    result.setAttribute("aria-busy", "false");
    delete result.dataset.stale;
  }

  for (const field of fields) set(field.name, values[field.name]);
  return { run, later, values, fill, result, form, close: () => ((closed = true), clearTimeout(timer), flight?.abort()) };
}

/** What to say, and do, where a model lacks what a panel needs. `remedy`: a sentence, and commands (MODEL stands for this one). */
export function unable(root, context, { title, lead, lacks, remedy, task }) {
  const able = context.models.filter((model) => model.tasks.includes(task));
  root.replaceChildren(
    h("h1", {}, title),
    h("p", { class: "lead" }, lead),
    h(
      "div",
      { class: "result", "aria-busy": "false" },
      notice(
        h("p", {}, `${context.info.name} ${lacks}.`),
        h("p", { class: "quiet" }, able.length ? `Served here and able to: choose ${able.length > 1 ? "one" : "it"}.` : `No model that is served here can. ${remedy[0]}`),
        able.length
          ? h("div", { class: "row" }, able.slice(0, 6).map((model) => h("button", { type: "button", class: "button", onclick: () => context.choose(model.name) }, model.name)))
          : code("Commands that make and serve one", remedy[1].replaceAll("MODEL", quoted(context.info.folder))),
      ),
    ),
  );
  return { run() {}, close() {} };
}
