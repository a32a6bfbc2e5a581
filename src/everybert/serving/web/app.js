// The frame: which panel, which model, which theme, which keys; and what to do when the server is gone.
import { Problem, ask, h, server, trouble } from "./kit.js";

const PANELS = [
  ["Predict", [["fill", "Fill", "fill"], ["classify", "Classify", "classify"], ["names", "Names", "tag"], ["answer", "Answer", "answer"], ["next", "Next sentence", "next"], ["similar", "Similar", "embed"]]],
  ["Look inside", [["tokens", "Tokens", null], ["attention", "Attention", null], ["context", "Context", null], ["steps", "Step through", null], ["examples", "Training data", null]]],
];
const EVERY = PANELS.flatMap(([, panels]) => panels);
const COMPARED = ["fill", "tokens", "attention"]; // panels that can stand twice, side by side
const main = document.getElementById("main");
const nav = document.getElementById("nav");
const banner = document.getElementById("banner");
const modelPicker = document.getElementById("model");
const adapterPicker = document.getElementById("adapter");

let models = [];
let current = []; // the mounted panel, or the two that are compared
let turn = 0;
let picked = null; // the model that the visitor chose, by a picker or an address

// ── where we are: #panel?model=…&text=… ──

function place() {
  const [panel, query] = location.hash.replace(/^#/, "").split(/\?(.*)/s);
  const first = models[0]?.tasks.includes("fill") ? "fill" : "attention"; // where a visitor without an address begins
  return { panel: EVERY.some(([id]) => id === panel) ? panel : first, params: new URLSearchParams(query ?? "") };
}

function link(panel, params) {
  const query = new URLSearchParams([...params].filter(([, value]) => value !== ""));
  return `#${panel}${query.size ? `?${query}` : ""}`;
}

const named = (name) => models.find((model) => model.name === name);
/** The model of a panel: the one that was picked; else, where BERT's parts are shown, the one built as in the paper. */
const usual = (panel) => named(picked) ?? (["attention", "steps"].includes(panel) ? named("everybert-classic") : null) ?? models[0];
const chosen = () => named(place().params.get("model")) ?? usual(place().panel);

function choose(name) {
  const { panel, params } = place();
  params.set("model", name);
  go(link(panel, params));
}

function go(address) {
  history.pushState(null, "", address);
  draw();
}

// ── drawing ──

const able = (info, task) => !task || info.tasks.includes(task) || (task === "classify" && info.regression);

function drawNav(panel, info) {
  nav.replaceChildren(
    ...PANELS.flatMap(([group, panels]) => [
      h("p", {}, group),
      h(
        "ul",
        {},
        panels.map(([id, words, task]) =>
          h("li", {}, h("a", { href: link(id, new URLSearchParams({ model: usual(id).name })), "aria-current": id === panel ? "page" : null, ...(able(usual(id), task) ? {} : { class: "unable", title: `${usual(id).name} cannot do this: the panel says what can` }) }, words)),
        ),
      ),
    ]),
  );
  showPlace();
}

/** On a phone the panels are a row that scrolls: keep this one in sight. */
function showPlace() {
  const here = nav.querySelector("[aria-current]");
  if (here && nav.scrollWidth > nav.clientWidth) nav.scrollLeft = here.offsetLeft - nav.clientWidth / 2 + here.offsetWidth / 2;
}

function drawPickers(info) {
  const option = (value, words, selected) => h("option", { value, selected }, words);
  modelPicker.replaceChildren(...models.filter((m) => !m.adapter).map((m) => option(m.name, m.name, m.model === info.model && m.model === m.name)));
  modelPicker.disabled = false;
  const adapters = models.filter((m) => m.model === info.model && m.adapter);
  document.getElementById("adapter-picker").hidden = !adapters.length;
  const used = named(info.model)?.defaults[EVERY.find(([id]) => id === place().panel)[2]]; // what the server takes by itself
  adapterPicker.replaceChildren(option(info.model, used ? `auto: ${used}` : "none", !info.adapter), ...adapters.map((m) => option(m.name, m.adapter, m.name === info.name)));
}

async function draw() {
  const mine = ++turn;
  main.setAttribute("aria-busy", "true");
  const { panel, params } = place();
  const info = chosen();
  if (info !== usual(panel)) picked = info.name;
  drawNav(panel, info);
  drawPickers(info);
  document.title = `${EVERY.find(([id]) => id === panel)[1]} · everybert`;
  let module;
  try {
    module = await import(`./panel-${panel}.js`);
  } catch {
    server.lost();
    main.setAttribute("aria-busy", "false");
    main.replaceChildren(trouble("This panel could not be fetched from the server. Reload the page when the server is back."));
    return;
  }
  if (mine !== turn) return;
  current.forEach((one) => one.close());
  if (main.dataset.panel !== panel) window.scrollTo(0, 0);
  main.dataset.panel = panel;
  const second = COMPARED.includes(panel) && params.get("beside");
  params.delete("beside");
  const sides = second ? [params, new URLSearchParams(second)] : [params];
  const address = () => {
    const whole = new URLSearchParams(sides[0]);
    if (sides[1]) whole.set("beside", sides[1]);
    return link(panel, whole);
  };
  const roots = sides.length > 1 ? sides.map(() => h("div", { class: "half" })) : [main];
  if (sides.length > 1) main.replaceChildren(h("div", { class: "halves" }, roots));
  current = roots.map((root, i) => mount(module, root, sides, i, address));
  current.forEach((one) => one.run());
  main.setAttribute("aria-busy", "false");
}

/** One panel, alone or as one of two sides; each keeps its own values and, of two, has its own model. */
function mount(module, root, sides, i, address) {
  const info = (i ? named(sides[i].get("model")) : null) ?? chosen();
  const mine = turn;
  const set = (name, value) => (sides[i].set(name, value), go(address()));
  const remember = (values) => {
    sides[i] = new URLSearchParams({ model: info.name });
    for (const [name, value] of Object.entries({ ...values })) if (value !== "" && value !== null && value !== undefined) sides[i].set(name, value);
    if (mine === turn && address().length < 8000) history.replaceState(null, "", address()); // else another panel is opened
  };
  const button = (words, click) => h("button", { type: "button", class: "quiet-button", onclick: click }, words);
  const tools = !COMPARED.includes(place().panel)
    ? null
    : sides.length === 1
      ? button("Compare", () => ((sides[1] = new URLSearchParams(sides[0])), go(address())))
      : i === 0
        ? null
        : [
            h("select", { "aria-label": "Model of the second side", onchange: (event) => set("model", event.target.value) }, models.map((one) => h("option", { value: one.name, selected: one === info }, one.name))),
            button("Close", () => (sides.pop(), go(address()))),
          ];
  return module.default(root, { info, models, params: sides[i], choose: (name) => set("model", name), remember, tools, side: i ? "-second" : "" });
}

modelPicker.addEventListener("change", () => choose(modelPicker.value));
adapterPicker.addEventListener("change", () => choose(adapterPicker.value));
window.addEventListener("hashchange", draw);
window.addEventListener("resize", showPlace);

// ── keys ──

const keys = document.getElementById("keys");
const KEYS = [
  ["/", "write in the panel’s first field", () => main.querySelector("textarea, input[type=text]")?.focus()],
  ["[", "the panel before", () => walk(-1)],
  ["]", "the panel after", () => walk(1)],
  ["m", "choose a model", () => modelPicker.focus()],
  ["t", "system, light or dark", () => theme.click()],
  ["c", "copy a link to what is shown", () => main.querySelector(".permalink")?.click()],
  ["?", "this list", () => keys.showModal()],
];
const ELSEWHERE = [
  ["Ctrl Enter", "ask at once, from a field"],
  ["Esc", "leave a field; let go of a pinned token"],
  ["← ↑ ↓ →", "in Attention: another head, or another token; in Step through: another step"],
  ["Enter", "in Attention: rank the heads by the cell of the matrix"],
];
const listed = ([key, words]) => [h("dt", {}, key.split(" ").map((one) => h("kbd", {}, one))), h("dd", {}, words)];
keys.append(
  h("form", { method: "dialog" }, h("h2", { id: "keys-title" }, "Keys"), h("button", { class: "quiet-button" }, "Close")),
  h("dl", {}, [...KEYS, ...ELSEWHERE].map(listed)),
);
document.getElementById("keys-button").addEventListener("click", () => keys.showModal());
document.getElementById("tour").addEventListener("click", async () => (await import("./tour.js")).tour((panel, values) => go(link(panel, new URLSearchParams(values)))));
keys.addEventListener("click", (event) => event.target === keys && keys.close()); // beside it

function walk(by) {
  const at = EVERY.findIndex(([id]) => id === place().panel) + by;
  const [id] = EVERY[(at + EVERY.length) % EVERY.length];
  go(link(id, new URLSearchParams({ model: chosen().name })));
}

document.addEventListener("keydown", (event) => {
  const writing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) && event.target.type !== "checkbox";
  if (writing && event.key === "Escape") event.target.blur();
  if (writing || keys.open || event.ctrlKey || event.metaKey || event.altKey) return;
  const found = KEYS.find(([key]) => key === event.key);
  if (!found) return;
  event.preventDefault();
  found[2]();
});

// ── the theme ──

const THEMES = ["system", "light", "dark"];
const theme = document.getElementById("theme");
function paint(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  theme.textContent = `Theme: ${name}`;
}
let dressed = localStorage.getItem("everybert-theme") ?? "system";
paint(dressed);
theme.addEventListener("click", () => {
  dressed = THEMES[(THEMES.indexOf(dressed) + 1) % THEMES.length];
  localStorage.setItem("everybert-theme", dressed);
  paint(dressed);
});

// ── the server, gone and back ──

let watching = 0;
server.lost = () => {
  banner.textContent = "The server does not answer; it may have been stopped. This page tries again by itself.";
  banner.hidden = false;
  if (!watching) watching = setInterval(look, 1500);
};
server.found = () => {
  banner.hidden = true;
  clearInterval(watching);
  watching = 0;
};
server.key = () => {
  const key = prompt("This server asks for an API key:");
  if (key) sessionStorage.setItem("everybert-key", key);
  return key;
};
/** The models, each with its id as its name. */
async function list() {
  return (await ask("v1/models")).data.map((model) => ({ ...model, name: model.id }));
}
async function look() {
  try {
    models = await list();
  } catch {
    return;
  }
  draw();
}

try {
  models = await list();
  await draw();
} catch (error) {
  main.replaceChildren(trouble(error instanceof Problem ? error.message : `This page could not start: ${error.message}`));
}
