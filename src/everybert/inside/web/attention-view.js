// The attention viewer: every head as a thumbnail, one head large, as lines or as a matrix. Used by the playground and,
// with its data inlined, by notebooks and by the pages that `everybert attention --out` writes.
//
// A source is {tokens, texts, layers, heads, size, thumbnails, head(layer, head), link(from, to)}: `texts` says which
// text a token is from (null for special tokens); `thumbnails` are uint8 (layers, heads, size, size); `head` promises
// n × n weights as uint16 of 65535ths; `link` promises one link's weight in every head. Where the model itself is at
// hand, `off(heads)` promises what changes without these heads: {cosine, masks, whole, without}. Layers and heads are
// counted from 0 in the source, and shown counted from 1, as the literature does.
import { canvasPen, direction, drawLines, drawMatrix, linesLayout, matrixLayout, numbers, strongest, svgPen, tone, visible, weightPicture } from "./attention-draw.js";

const STAGE = 560; // the tallest the stage grows before it scrolls
const HUES = ["accent", "second", "third", "fourth"]; // of heads that are drawn over each other

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function download(name, blob) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** Build the viewer in `root`. `changed(state)` is told of each choice, for permalinks. */
export function attentionView(root, source, start = {}, changed = () => {}) {
  const n = source.tokens.length;
  const pairs = source.texts.includes(1);
  const within = (value, most, other) => (Number.isInteger(value) && value >= 0 && value < most ? value : other);
  const state = {
    layer: within(start.layer, source.layers, source.layers - 1),
    head: within(start.head, source.heads, 0),
    view: start.view === "matrix" ? "matrix" : "lines",
    filter: pairs && ["aa", "ab", "ba", "bb"].includes(start.filter) ? start.filter : "all",
    special: start.special !== false,
    focus: null, // pointed at: {side, token}, or in the matrix {row, column}
    pinned: null, // clicked
  };
  let weights = new Float32Array(0);
  let links = [];
  let best = null; // the strongest link between two different tokens
  let peak = 1; // the weight that has the darkest shade: the head's largest, so that diffuse heads are seen too
  let picture = null;
  let colours = {};
  let layout = {};
  let asked = 0;
  let over = []; // further heads drawn over the chosen one: {layer, head, weights, links, peak}
  const off = new Set(); // heads that are switched off

  // ── the elements ──

  const stage = make("div", { class: "av-stage", tabindex: 0, role: "img", "aria-describedby": "av-keys" });
  const spacer = make("div", { class: "av-spacer" });
  const canvas = make("canvas", { class: "av-canvas", "aria-hidden": "true" });
  stage.append(canvas, spacer);
  const readout = make("p", { class: "av-readout", role: "status", "aria-live": "polite" });
  const where = make("p", { class: "av-links" });
  const title = make("h2", { class: "av-title" });
  const scale = make("span", { class: "av-scale" });
  const option = (value, words) => make("option", { value, selected: state.filter === value }, words);
  const views = make("div", { class: "av-switch", role: "group", "aria-label": "View" });
  for (const [name, words] of [["lines", "Lines"], ["matrix", "Matrix"]])
    views.append(make("button", { type: "button", "data-view": name, onclick: () => choose({ view: name }) }, words));
  const filter = make(
    "select",
    { "aria-label": "Which links", onchange: (event) => choose({ filter: event.target.value }) },
    option("all", "All links"),
    option("ab", "A → B"),
    option("ba", "B → A"),
    option("aa", "A → A"),
    option("bb", "B → B"),
  );
  const special = make("input", { type: "checkbox", checked: state.special, onchange: () => choose({ special: special.checked }) });
  const bar = make(
    "div",
    { class: "av-bar" },
    views,
    pairs ? filter : null,
    make("label", { class: "av-check" }, special, "special tokens"),
    make(
      "span",
      { class: "av-save" },
      make("button", { type: "button", onclick: savePng, "aria-label": "Download as PNG" }, "↓ PNG"),
      make("button", { type: "button", onclick: saveSvg, "aria-label": "Download as SVG" }, "↓ SVG"),
    ),
  );
  const heads = thumbnails();
  const overlay = make("input", { type: "checkbox", onchange: () => ((over = []), prepare()) });
  const toggle = make("button", { type: "button", class: "av-chip", onclick: switchOff });
  const change = make("div", { class: "av-change", role: "status" });
  const keys = make("p", { id: "av-keys", class: "av-keys" }, "Point at a token, or focus the picture and use ↑ ↓ ← →; click pins; Esc lets go. Click a token on each side to rank the heads by that link.");
  root.classList.add("av");
  root.replaceChildren(
    make("div", { class: "av-side" }, make("p", { class: "av-caption" }, `${source.layers} layers × ${source.heads} heads`), heads.grid, make("label", { class: "av-check av-over" }, overlay, `click adds a head in another colour (up to ${HUES.length})`), source.off ? toggle : null, change),
    make("div", { class: "av-main" }, make("div", { class: "av-top" }, make("div", {}, title, scale), bar), stage, readout, where, keys),
  );

  function thumbnails() {
    const { layers, heads: count, size, thumbnails: data } = source;
    const grid = make("div", { class: "av-grid", role: "grid", "aria-label": "All heads: choose one" });
    grid.style.setProperty("--heads", count);
    const header = make("div", { class: "av-row av-numbers", "aria-hidden": "true" }, make("span"));
    for (let h = 0; h < count; h++) header.append(make("span", {}, String(h + 1)));
    grid.append(header);
    const cells = [];
    for (let l = 0; l < layers; l++) {
      const row = make("div", { class: "av-row", role: "row" }, make("span", { class: "av-number", "aria-hidden": "true" }, String(l + 1)));
      for (let h = 0; h < count; h++) {
        const small = make("canvas", { width: size, height: size });
        const cell = make(
          "button",
          { type: "button", role: "gridcell", tabindex: -1, class: "av-cell", "aria-label": `Layer ${l + 1}, head ${h + 1}`, onclick: () => choose({ layer: l, head: h }) },
          small,
        );
        cells.push(cell);
        row.append(cell);
      }
      grid.append(row);
    }
    grid.addEventListener("keydown", (event) => {
      const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!move) return;
      event.preventDefault();
      const at = cells.indexOf(event.target);
      const layer = Math.max(0, Math.min(layers - 1, Math.floor(at / count) + move[0]));
      const head = Math.max(0, Math.min(count - 1, (at % count) + move[1]));
      if (!overlay.checked) choose({ layer, head });
      cells[layer * count + head].focus();
    });
    const paint = () => {
      const [r, g, b] = numbers(colours.accent);
      cells.forEach((cell, k) => {
        const context = cell.firstChild.getContext("2d");
        const image = context.createImageData(size, size);
        for (let i = 0, from = k * size * size; i < size * size; i++) {
          image.data[4 * i] = r;
          image.data[4 * i + 1] = g;
          image.data[4 * i + 2] = b;
          image.data[4 * i + 3] = 255 * tone(data[from + i] / 255);
        }
        context.putImageData(image, 0, 0);
      });
    };
    const mark = () =>
      cells.forEach((cell, k) => {
        const on = k === state.layer * count + state.head;
        cell.setAttribute("aria-selected", on);
        cell.classList.toggle("off", off.has(k));
        const place = over.findIndex((one) => one.layer * count + one.head === k);
        cell.style.outline = place < 0 ? "" : `2px solid var(--${HUES[place + 1]})`;
        cell.tabIndex = on ? 0 : -1;
      });
    return { grid, cells, paint, mark };
  }

  // ── choices ──

  /** Add a head to those that are drawn over each other, or take it out. */
  async function add({ layer, head }) {
    const at = over.findIndex((one) => one.layer === layer && one.head === head);
    if (at >= 0) over.splice(at, 1);
    else if (over.length < HUES.length - 1) {
      const own = Float32Array.from(await source.head(layer, head), (x) => x / 65535);
      over.push({ layer, head, weights: own, links: [], peak: own.reduce((a, b) => Math.max(a, b), 4 / n / n) });
    }
    prepare();
  }

  /** Switch the chosen head off, or on again, and say what changes. */
  async function switchOff() {
    const k = state.layer * source.heads + state.head;
    if (!off.delete(k)) off.add(k);
    prepare();
    const chosen = [...off].map((one) => [Math.floor(one / source.heads), one % source.heads]);
    let found;
    try {
      found = chosen.length ? await source.off(chosen) : null;
    } catch (error) {
      return change.replaceChildren(error.message);
    }
    if (!found) return change.replaceChildren();
    const moved = [...found.cosine.keys()].sort((a, b) => found.cosine[a] - found.cosine[b]).slice(0, 5);
    const row = (words, value) => make("li", {}, words, make("small", {}, value));
    const guess = ([token, p]) => `${token} ${p.toFixed(2)}`;
    change.replaceChildren(
      make("p", {}, `Without ${chosen.length === 1 ? "this head" : `these ${chosen.length} heads`}, these tokens change most (cosine to before):`),
      make("ol", {}, ...moved.map((i) => row(source.tokens[i], found.cosine[i].toFixed(3)))),
      ...(found.masks ?? []).map((at, m) =>
        make("p", {}, `${source.tokens[at]}: ${found.whole[m].slice(0, 3).map(guess).join(", ")} → ${found.without[m].slice(0, 3).map(guess).join(", ")}`),
      ),
    );
  }

  function choose(change) {
    if (overlay.checked && "layer" in change && (change.layer !== state.layer || change.head !== state.head)) return add(change);
    const other = (change.layer ?? state.layer) !== state.layer || (change.head ?? state.head) !== state.head;
    Object.assign(state, change);
    if ("view" in change) state.focus = state.pinned = null;
    changed({ ...state });
    if (other) load();
    else prepare();
  }

  async function load() {
    const turn = ++asked;
    heads.mark();
    root.setAttribute("aria-busy", "true"); // until this head is drawn
    let raw;
    try {
      raw = await source.head(state.layer, state.head);
    } catch (error) {
      if (turn !== asked) return;
      if (error.name !== "AbortError") readout.textContent = error.message;
      root.setAttribute("aria-busy", "false");
      return;
    }
    if (turn !== asked) return; // a later choice has overtaken this one
    weights = Float32Array.from(raw, (x) => x / 65535);
    prepare();
  }

  function prepare() {
    heads.mark();
    toggle.textContent = off.has(state.layer * source.heads + state.head) ? "Switch this head on again" : "Switch this head off";
    for (const button of views.children) button.setAttribute("aria-pressed", button.dataset.view === state.view);
    title.textContent = `Layer ${state.layer + 1}, head ${state.head + 1}`;
    if (!weights.length) return;
    const shown = visible(source, state);
    peak = Math.max(4 / n / n, weights.reduce((a, b) => Math.max(a, b), 0));
    scale.textContent = `strongest weight ${peak.toFixed(peak < 0.1 ? 3 : 2)}`;
    links = strongest(weights, n, shown);
    for (const one of over) one.links = strongest(one.weights, n, shown);
    root.dataset.links = links.length;
    best = links.find(([i, j]) => i !== j);
    picture = state.view === "matrix" ? weightPicture(source, weights, { shown, colours, peak }) : null;
    measure();
    report();
  }

  function measure() {
    const width = stage.clientWidth || 600;
    layout = state.view === "lines" ? linesLayout(width, n) : matrixLayout(width, n, source.tokens);
    const height = Math.min(layout.height, state.view === "lines" ? STAGE : Infinity);
    stage.style.height = `${height}px`;
    spacer.style.height = `${Math.max(0, layout.height - height)}px`;
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    draw();
  }

  function readColours() {
    const probe = make("span"); // the colours are the page's; the viewer may not be in it yet
    document.body.append(probe);
    for (const name of [...HUES, "ink", "quiet", "surface", "sunken"]) {
      probe.style.color = `var(--${name})`;
      colours[name] = getComputedStyle(probe).color;
    }
    probe.remove();
  }

  // ── drawing ──

  let waiting = false;
  let drawn = weights; // the weights that are on the screen
  const draw = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      const began = performance.now();
      const context = canvas.getContext("2d");
      const scale = window.devicePixelRatio || 1;
      context.setTransform(scale, 0, 0, scale, 0, 0);
      context.clearRect(0, 0, canvas.width, canvas.height);
      paint(canvasPen(context), stage.scrollTop, canvas.height / scale);
      root.dataset.frame = (performance.now() - began).toFixed(1);
      if (weights === drawn || !weights.length) return;
      drawn = weights;
      root.dataset.drawn = performance.now().toFixed(1);
      root.setAttribute("aria-busy", "false");
    });
  };

  function paint(pen, scroll, height) {
    const focus = state.focus ?? state.pinned;
    if (state.view === "lines") {
      const options = { focus: focus?.side ? focus : null, scroll, height, colours, shown: visible(source, state) };
      drawLines(pen, source, weights, links, layout, { ...options, peak, colour: over.length ? colours.accent : undefined });
      over.forEach((one, i) => drawLines(pen, source, one.weights, one.links, layout, { ...options, peak: one.peak, colour: colours[HUES[i + 1]], labels: false }));
    } else drawMatrix(pen, source, picture, layout, { point: focus && "row" in focus ? focus : null, colours });
  }

  // ── pointing ──

  function under(event) {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    if (state.view === "lines") {
      const token = Math.floor((y + stage.scrollTop - layout.top) / layout.row);
      if (token < 0 || token >= n) return null;
      const side = x < layout.left + 12 ? "from" : x > layout.right - 12 ? "to" : null;
      return side && { side, token };
    }
    const row = Math.floor((y - layout.top) / layout.cell);
    const column = Math.floor((x - layout.left) / layout.cell);
    return row >= 0 && row < n && column >= 0 && column < n ? { row, column } : null;
  }

  function point(focus) {
    state.focus = focus;
    draw();
    report();
  }

  stage.addEventListener("pointermove", (event) => point(under(event)));
  stage.addEventListener("pointerleave", () => point(null));
  stage.addEventListener("scroll", draw, { passive: true });
  stage.addEventListener("click", (event) => pin(under(event)));
  stage.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (event.key === "Escape") return pin(null);
    if (event.key === "Enter") return pin(state.pinned && state.focus ? state.focus : state.pinned);
    if (!move) return;
    event.preventDefault();
    const clamp = (value) => Math.max(0, Math.min(n - 1, value));
    const now = state.focus ?? state.pinned;
    if (state.view === "matrix") {
      state.pinned = now?.row === undefined ? { row: 0, column: 0 } : { row: clamp(now.row + move[0]), column: clamp(now.column + move[1]) };
    } else {
      const side = move[1] < 0 ? "from" : move[1] > 0 ? "to" : (now?.side ?? "from");
      state.pinned = { side, token: clamp((now?.token ?? -move[0]) + move[0]) };
      const y = layout.top + state.pinned.token * layout.row;
      if (y < stage.scrollTop || y + layout.row > stage.scrollTop + stage.clientHeight) stage.scrollTop = y - stage.clientHeight / 2;
    }
    point(null);
  });

  function pin(focus) {
    const before = state.pinned;
    state.pinned = focus;
    point(null);
    if (!focus) return where.replaceChildren();
    const link = "row" in focus ? [focus.row, focus.column] : before?.side && before.side !== focus.side ? (focus.side === "to" ? [before.token, focus.token] : [focus.token, before.token]) : null;
    if (link) rank(...link);
  }

  /** A token within a sentence; one that reads from the right leaves the sentence's order alone. */
  const name = (i) => ["“", make("bdi", { dir: direction(source.tokens[i]) }, source.tokens[i]), "”"];

  /** Say in which heads one link is strongest. */
  async function rank(from, to) {
    let each;
    try {
      each = await source.link(from, to);
    } catch (error) {
      if (error.name !== "AbortError") where.textContent = error.message;
      return null;
    }
    const order = [...each.keys()].sort((a, b) => each[b] - each[a]).slice(0, 5);
    const chips = order.map((k) => {
      const [layer, head] = [Math.floor(k / source.heads), k % source.heads];
      const words = [`layer ${layer + 1} head ${head + 1}`, make("small", {}, each[k].toFixed(2))];
      return make("button", { type: "button", class: "av-chip", onclick: () => choose({ layer, head }) }, ...words);
    });
    where.replaceChildren(make("span", {}, ...name(from), " → ", ...name(to), " is strongest in "), ...chips);
    return order.map((k) => [Math.floor(k / source.heads), k % source.heads, each[k]]);
  }

  function report() {
    const focus = state.focus ?? state.pinned;
    const shown = visible(source, state);
    let words;
    if (!weights.length) words = [];
    else if (focus && "row" in focus) words = [...name(focus.row), " → ", ...name(focus.column), `  ${weights[focus.row * n + focus.column].toFixed(4)}`];
    else if (focus) {
      const at = (k) => (focus.side === "from" ? [focus.token, k] : [k, focus.token]);
      const ends = [...Array(n).keys()]
        .filter((k) => shown(...at(k)))
        .map((k) => [k, weights[at(k)[0] * n + at(k)[1]]])
        .sort((a, b) => b[1] - a[1])
        .slice(0, 4);
      const verb = focus.side === "from" ? "attends to" : "is attended to by";
      words = [...name(focus.token), ` ${verb} `, ...ends.flatMap(([k, w], i) => [i ? ", " : "", ...name(k), ` ${w.toFixed(3)}`])];
    } else {
      words = best ? ["Strongest link: ", ...name(best[0]), " → ", ...name(best[1]), `  ${best[2].toFixed(3)}`] : ["No link stands out in this selection."];
    }
    readout.replaceChildren(...words);
    stage.setAttribute("aria-label", `Attention of layer ${state.layer + 1}, head ${state.head + 1}, ${n} tokens. ${readout.textContent}`);
  }

  // ── pictures to keep ──

  const file = (kind) => `attention-layer${state.layer + 1}-head${state.head + 1}.${kind}`;

  function savePng() {
    const width = stage.clientWidth;
    const scale = Math.min(2, 16000 / layout.height, 16000 / width);
    const whole = make("canvas", { width: Math.round(width * scale), height: Math.round(layout.height * scale) });
    const context = whole.getContext("2d");
    context.scale(scale, scale);
    const pen = canvasPen(context);
    pen.rect(0, 0, width, layout.height, colours.surface);
    paint(pen, 0, layout.height);
    whole.toBlob((blob) => download(file("png"), blob));
  }

  function saveSvg() {
    const pen = svgPen(stage.clientWidth, layout.height, colours.surface);
    paint(pen, 0, layout.height);
    download(file("svg"), new Blob([pen.toString()], { type: "image/svg+xml" }));
  }

  // ── start, and keep up with the window and the theme ──

  const refresh = () => {
    readColours();
    heads.paint();
    prepare();
  };
  const resized = new ResizeObserver(() => weights.length && measure());
  resized.observe(stage);
  const themed = new MutationObserver(refresh);
  themed.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", refresh);
  readColours();
  heads.paint();
  const ready = load();
  return {
    ready,
    state,
    choose,
    weights: () => weights,
    /** Pin a token, and rank the heads by a link [from, to]. */
    point(focus, link) {
      state.pinned = focus;
      draw();
      report();
      if (link) rank(...link);
    },
    close() {
      resized.disconnect();
      themed.disconnect();
      dark.removeEventListener("change", refresh);
    },
  };
}
