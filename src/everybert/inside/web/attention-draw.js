// Drawing one head, on a canvas or as SVG: both are "pens" with the same few strokes, so that each view is written once.

const FONT = 'ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace';
const MOST_LINES = 1500; // a frame's worth: the strongest links, whatever the length of the text
const faint = (n) => Math.min(0.02, 4 / n); // links below this are not drawn unless their token is pointed at

export const ROW = { tall: 24, low: 18 };

const font = (size, bold) => `${bold ? 600 : 400} ${size}px ${FONT}`;
const graphemes = new Intl.Segmenter("en", { granularity: "grapheme" }); // a family, a flag, a letter with its accents: one each
const ruler = document.createElement("canvas").getContext("2d");
const RIGHT_TO_LEFT = /^[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;

/** A token's own direction, its first letter's: "##", "▁" and "Ġ" (a space, to byte-level BPE) stand where its reading begins. */
export const direction = (string) => (RIGHT_TO_LEFT.test(string.replace(/^Ġ/, "").match(/\p{L}/u)?.[0] ?? "") ? "rtl" : "ltr");

/** Pixels of a label, at its widest (bold). */
function wide(string, size) {
  ruler.font = font(size, true);
  return ruler.measureText(string).width;
}

export const tone = (weight) => Math.min(1, Math.pow(weight, 0.6)); // what the eye sees: small weights stay visible

// ── pens ──────────────────────────────────────────────────────────────────────────────────────────────────────

export function canvasPen(context) {
  return {
    rect(x, y, width, height, colour, alpha = 1) {
      context.globalAlpha = alpha;
      context.fillStyle = colour;
      context.fillRect(x, y, width, height);
    },
    curve(x1, y1, x2, y2, colour, width, alpha) {
      const bend = (x2 - x1) / 2;
      context.globalAlpha = alpha;
      context.strokeStyle = colour;
      context.lineWidth = width;
      context.beginPath();
      context.moveTo(x1, y1);
      context.bezierCurveTo(x1 + bend, y1, x2 - bend, y2, x2, y2);
      context.stroke();
    },
    text(string, x, y, colour, { align = "left", size = 13, turn = 0, bold = false } = {}) {
      context.globalAlpha = 1;
      context.fillStyle = colour;
      context.font = font(size, bold);
      context.direction = direction(string);
      context.textAlign = align;
      context.textBaseline = "middle";
      if (!turn) return context.fillText(string, x, y);
      context.save();
      context.translate(x, y);
      context.rotate(turn);
      context.fillText(string, 0, 0);
      context.restore();
    },
    picture(canvas, x, y, width, height) {
      context.globalAlpha = 1;
      context.imageSmoothingEnabled = false;
      context.drawImage(canvas, x, y, width, height);
    },
  };
}

const escape = (string) =>
  String(string).replace(/[&<>"']/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[c]);

export function svgPen(width, height, background) {
  const out = [];
  const round = (x) => Math.round(x * 100) / 100;
  return {
    rect: (x, y, w, h, colour, alpha = 1) =>
      out.push(`<rect x="${round(x)}" y="${round(y)}" width="${round(w)}" height="${round(h)}" fill="${colour}" fill-opacity="${round(alpha)}"/>`),
    curve(x1, y1, x2, y2, colour, line, alpha) {
      const bend = (x2 - x1) / 2;
      const path = `M${round(x1)} ${round(y1)}C${round(x1 + bend)} ${round(y1)} ${round(x2 - bend)} ${round(y2)} ${round(x2)} ${round(y2)}`;
      out.push(`<path d="${path}" fill="none" stroke="${colour}" stroke-width="${round(line)}" stroke-opacity="${round(alpha)}"/>`);
    },
    text(string, x, y, colour, { align = "left", size = 13, turn = 0, bold = false } = {}) {
      const way = direction(string); // "start" is on the right of what reads from there
      const anchor = (align === "left") === (way === "ltr") ? "start" : "end";
      const rotate = turn ? ` transform="rotate(${round((turn * 180) / Math.PI)} ${round(x)} ${round(y)})"` : "";
      out.push(
        `<text x="${round(x)}" y="${round(y)}" direction="${way}" fill="${colour}" font-size="${size}" font-weight="${bold ? 600 : 400}" ` +
          `text-anchor="${anchor}" dominant-baseline="central"${rotate}>${escape(string)}</text>`,
      );
    },
    picture: (canvas, x, y, w, h) =>
      out.push(`<image x="${x}" y="${y}" width="${w}" height="${h}" style="image-rendering:pixelated" href="${canvas.toDataURL()}"/>`),
    toString: () =>
      `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" ` +
      `font-family="${escape(FONT)}"><rect width="100%" height="100%" fill="${background}"/>${out.join("")}</svg>`,
  };
}

// ── what is drawn ─────────────────────────────────────────────────────────────────────────────────────────────

/** Which links a filter lets through: "all", "ab" (from the first text to the second), and so on. */
export function visible(source, { filter, special }) {
  const side = (i) => source.texts[i];
  return (from, to) => {
    if (!special && (side(from) === null || side(to) === null)) return false;
    if (filter === "all") return true;
    return side(from) === "ab".indexOf(filter[0]) && side(to) === "ab".indexOf(filter[1]);
  };
}

/** The links worth drawing, strongest first: parallel arrays of from, to and weight. */
export function strongest(weights, n, shown) {
  const found = [];
  const least = faint(n);
  for (let i = 0; i < n; i++)
    for (let j = 0; j < n; j++) {
      const w = weights[i * n + j];
      if (w >= least && shown(i, j)) found.push([i, j, w]);
    }
  return found.sort((a, b) => b[2] - a[2]);
}

/** Where things stand in the lines view. */
export function linesLayout(width, n) {
  const row = n > 80 ? ROW.low : ROW.tall;
  const column = Math.max(84, Math.min(220, width * 0.3));
  return { row, column, left: column, right: width - column, height: n * row + 16, top: 8, size: n > 80 ? 12 : 13 };
}

/** Shorten a token to the room there is, between letters as they are seen. */
export function fitted(string, room, size) {
  if (wide(string, size) <= room) return string;
  const letters = Array.from(graphemes.segment(string), (part) => part.segment);
  while (letters.length && wide(letters.join("") + "…", size) > room) letters.pop();
  return letters.join("") + "…";
}

/**
 * Two columns of tokens and the links between them. `focus` is {side, token} or null; `scroll` the first pixel seen.
 * `colour` is that of a head which is drawn over others; without it, links have the colour of their text.
 */
export function drawLines(pen, source, weights, links, layout, { focus, scroll, height, colours, shown, peak, colour, labels = true }) {
  const { row, top, left, right, column, size } = layout;
  const n = source.tokens.length;
  const middle = (i) => top + i * row + row / 2 - scroll;
  const first = Math.max(0, Math.floor((scroll - top) / row) - 1);
  const last = Math.min(n - 1, Math.ceil((scroll + height - top) / row));
  const seen = (i) => i >= first && i <= last;
  const hue = (i) => colour ?? (source.texts[i] === 1 ? colours.second : colours.accent);
  const stroke = (i, j, w) =>
    pen.curve(left + 6, middle(i), right - 6, middle(j), hue(i), 0.6 + 2.6 * w, Math.max(0.05, tone(w / peak)));
  const shade = { from: new Map(), to: new Map() };
  if (focus) {
    const { side, token } = focus;
    for (let k = 0; k < n; k++) {
      const [i, j] = side === "from" ? [token, k] : [k, token];
      const w = shown(i, j) ? weights[i * n + j] : 0;
      if (w < Math.min(0.004, 0.5 / n)) continue;
      shade[side === "from" ? "to" : "from"].set(k, w);
      if (seen(i) || seen(j)) stroke(i, j, w);
    }
    shade[side].set(token, peak);
  } else {
    let drawn = 0;
    for (const [i, j, w] of links) {
      if (drawn >= MOST_LINES) break;
      if (!seen(i) && !seen(j)) continue;
      stroke(i, j, w);
      drawn++;
    }
  }
  for (let i = first; labels && i <= last; i++) {
    const token = fitted(source.tokens[i], column - 16, size);
    const y = middle(i);
    for (const [side, x, align] of [["from", left - 4, "right"], ["to", right + 4, "left"]]) {
      const w = shade[side].get(i);
      if (w !== undefined) pen.rect(side === "from" ? 0 : right, y - row / 2 + 1, column, row - 2, hue(i), 0.1 + 0.34 * tone(w / peak));
      pen.text(token, x, y, source.texts[i] === null ? colours.quiet : colours.ink, {
        align,
        size,
        bold: focus?.side === side && focus.token === i,
      });
    }
  }
}

/** Where things stand in the matrix view: labels only where there is room for them. */
export function matrixLayout(width, n, tokens) {
  const longest = Math.min(96, Math.max(...tokens.map((token) => wide(token, 13))));
  const wanted = Math.ceil(longest) + 14;
  const labelled = Math.floor((width - wanted - 8) / n) >= 11;
  const label = labelled ? wanted : 8;
  const room = Math.max(60, width - label - 8);
  const cell = labelled ? Math.min(36, Math.floor(room / n)) : Math.min(12, room / n);
  const side = cell * n;
  return { cell, label, labelled, side, left: label + Math.max(0, Math.floor((room - side) / 2)), top: label, height: label + side + 8 };
}

/** n × n weights as one small picture, a pixel a weight. */
export function weightPicture(source, weights, { shown, colours, peak }) {
  const n = source.tokens.length;
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = n;
  const context = canvas.getContext("2d");
  const image = context.createImageData(n, n);
  const [ra, ga, ba] = numbers(colours.accent);
  const [rb, gb, bb] = numbers(colours.second);
  for (let i = 0, k = 0; i < n; i++) {
    const second = source.texts[i] === 1;
    for (let j = 0; j < n; j++, k++) {
      const at = 4 * k;
      image.data[at] = second ? rb : ra;
      image.data[at + 1] = second ? gb : ga;
      image.data[at + 2] = second ? bb : ba;
      image.data[at + 3] = shown(i, j) ? 255 * tone(weights[k] / peak) : 0;
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

/** The matrix: a row is what its token draws from. `point` is {row, column} or null. */
export function drawMatrix(pen, source, picture, layout, { point, colours }) {
  const { cell, left, top, label, labelled, side } = layout;
  pen.rect(left, top, side, side, colours.sunken);
  pen.picture(picture, left, top, side, side);
  if (labelled) {
    const size = Math.min(13, cell);
    source.tokens.forEach((token, i) => {
      const colour = source.texts[i] === null ? colours.quiet : colours.ink;
      const middle = i * cell + cell / 2;
      const name = fitted(token, label - 8, size);
      pen.text(name, left - 6, top + middle, colour, { align: "right", size, bold: point?.row === i });
      pen.text(name, left + middle, top - 6, colour, { size, turn: -Math.PI / 2, bold: point?.column === i });
    });
  }
  if (point) {
    pen.rect(left, top + point.row * cell, side, Math.max(1, cell), colours.ink, 0.14);
    pen.rect(left + point.column * cell, top, Math.max(1, cell), side, colours.ink, 0.14);
  }
}

export const numbers = (colour) => colour.match(/[\d.]+/g).map(Number);
