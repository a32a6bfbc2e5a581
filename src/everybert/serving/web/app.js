// The frame: which panel, which model, which theme; and what to do when the server is gone.
import { Problem, ask, h, server, trouble } from "./kit.js";

const PANELS = [
  ["Predict", [["fill", "Fill", "fill"], ["classify", "Classify", "classify"], ["names", "Names", "tag"], ["answer", "Answer", "answer"], ["next", "Next sentence", "next"], ["similar", "Similar", null]]],
  ["Look inside", [["tokens", "Tokens", null], ["attention", "Attention", null], ["context", "Context", null], ["steps", "Step through", null]]],
];
const EVERY = PANELS.flatMap(([, panels]) => panels);
const main = document.getElementById("main");
const nav = document.getElementById("nav");
const banner = document.getElementById("banner");
const modelPicker = document.getElementById("model");
const adapterPicker = document.getElementById("adapter");

let models = [];
let current = null; // the mounted panel
let turn = 0;

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

const chosen = () => models.find((model) => model.name === place().params.get("model")) ?? models[0];

function choose(name) {
  const { panel, params } = place();
  params.set("model", name);
  location.hash = link(panel, params);
}

// ── drawing ──

function drawNav(panel, info) {
  nav.replaceChildren(
    ...PANELS.flatMap(([group, panels]) => [
      h("p", {}, group),
      h(
        "ul",
        {},
        panels.map(([id, words, task]) =>
          h("li", {}, h("a", { href: link(id, new URLSearchParams({ model: info.name })), "aria-current": id === panel ? "page" : null, class: task && !info.tasks.includes(task) ? "unable" : null }, words)),
        ),
      ),
    ]),
  );
  const here = nav.querySelector("[aria-current]");
  if (nav.scrollWidth > nav.clientWidth) nav.scrollLeft = here.offsetLeft - nav.clientWidth / 2 + here.offsetWidth / 2;
}

function drawPickers(info) {
  const option = (value, words, selected) => h("option", { value, selected }, words);
  modelPicker.replaceChildren(...models.filter((m) => !m.adapter).map((m) => option(m.name, m.name, m.model === info.model && m.model === m.name)));
  modelPicker.disabled = false;
  const adapters = models.filter((m) => m.model === info.model && m.adapter);
  document.getElementById("adapter-picker").hidden = !adapters.length;
  adapterPicker.replaceChildren(option(info.model, "none", !info.adapter), ...adapters.map((m) => option(m.name, m.adapter, m.name === info.name)));
}

async function draw() {
  const mine = ++turn;
  const { panel, params } = place();
  const info = chosen();
  drawNav(panel, info);
  drawPickers(info);
  document.title = `${EVERY.find(([id]) => id === panel)[1]} · everybert`;
  let module;
  try {
    module = await import(`./panel-${panel}.js`);
  } catch {
    server.lost();
    main.replaceChildren(trouble("This panel could not be fetched from the server. Reload the page when the server is back."));
    return;
  }
  if (mine !== turn) return;
  current?.close();
  const remember = (values) => {
    const kept = new URLSearchParams({ model: info.name });
    for (const [name, value] of Object.entries({ ...values })) if (value !== "" && value !== null && value !== undefined) kept.set(name, value);
    const address = link(panel, kept);
    if (address.length < 8000) history.replaceState(null, "", address);
  };
  current = module.default(main, { info, models, params, choose, remember });
  current.run();
}

modelPicker.addEventListener("change", () => choose(modelPicker.value));
adapterPicker.addEventListener("change", () => choose(adapterPicker.value));
window.addEventListener("hashchange", draw);
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
  event.preventDefault();
  main.querySelector("textarea, input[type=text]")?.focus();
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
async function look() {
  try {
    models = await ask("playground/models");
  } catch {
    return;
  }
  draw();
}

try {
  models = await ask("playground/models");
  await draw();
} catch (error) {
  main.replaceChildren(trouble(error instanceof Problem ? error.message : `This page could not start: ${error.message}`));
}
