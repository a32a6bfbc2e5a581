// A panel's result as a PNG: what the browser has laid out is drawn again on a canvas, boxes first, then text.

const none = /^(rgba\(0, 0, 0, 0\)|transparent)$/;

/** Draw an element and all that is in it. */
async function draw(context, root, origin) {
  for (const element of [root, ...root.querySelectorAll("*")]) {
    if (element.closest("svg") && element.tagName !== "svg") continue;
    const style = getComputedStyle(element);
    const box = element.getBoundingClientRect();
    if (!box.width || !box.height || style.visibility === "hidden") continue;
    const [x, y] = [box.left - origin.left, box.top - origin.top];
    if (!none.test(style.backgroundColor)) {
      context.fillStyle = style.backgroundColor;
      context.beginPath();
      context.roundRect(x, y, box.width, box.height, parseFloat(style.borderTopLeftRadius) || 0);
      context.fill();
    }
    if (parseFloat(style.borderTopWidth) && style.borderTopStyle === "solid") {
      context.strokeStyle = style.borderTopColor;
      context.lineWidth = parseFloat(style.borderTopWidth);
      context.beginPath();
      context.roundRect(x, y, box.width, box.height, parseFloat(style.borderTopLeftRadius) || 0);
      context.stroke();
    }
    if (element.tagName === "CANVAS") context.drawImage(element, x, y, box.width, box.height);
    if (element.tagName === "svg") context.drawImage(await image(element, box), x, y, box.width, box.height);
    else for (const node of element.childNodes) if (node.nodeType === Node.TEXT_NODE) write(context, node, style, origin);
  }
}

/** A text node, word by word, where the browser has put each. */
function write(context, node, style, origin) {
  context.font = `${style.fontStyle} ${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  context.fillStyle = style.color;
  context.direction = style.direction;
  context.textBaseline = "middle";
  context.textAlign = "center";
  for (const { index, 0: word } of node.data.matchAll(/\S+/g)) {
    const range = document.createRange();
    range.setStart(node, index);
    range.setEnd(node, index + word.length);
    const [box] = range.getClientRects();
    if (box?.width) context.fillText(word, box.left + box.width / 2 - origin.left, box.top + box.height / 2 - origin.top);
  }
}

/** A drawing with the colours that the page's styles give it, as an image. */
async function image(svg, box) {
  const copy = svg.cloneNode(true);
  const [from, to] = [svg, copy].map((one) => [one, ...one.querySelectorAll("*")]);
  from.forEach((element, i) => {
    const style = getComputedStyle(element);
    for (const name of ["fill", "stroke", "stroke-width", "font", "opacity"]) to[i].style.setProperty(name, style.getPropertyValue(name));
  });
  copy.setAttribute("width", box.width);
  copy.setAttribute("height", box.height);
  const loaded = new Image();
  loaded.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
  await loaded.decode();
  return loaded;
}

/** Save what an element shows as a PNG file. */
export async function savePicture(root, name) {
  const [width, height, margin] = [root.scrollWidth, root.scrollHeight, 16];
  const scale = Math.min(2, 16000 / height, 16000 / width);
  const canvas = document.createElement("canvas");
  canvas.width = (width + 2 * margin) * scale;
  canvas.height = (height + 2 * margin) * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.fillStyle = getComputedStyle(document.body).backgroundColor;
  context.fillRect(0, 0, width + 2 * margin, height + 2 * margin);
  const box = root.getBoundingClientRect();
  await draw(context, root, { left: box.left - margin, top: box.top - margin });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await new Promise((done) => canvas.toBlob(done)));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
