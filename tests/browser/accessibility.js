// What a screen reader, a keyboard and weak eyes need, checked in the page. Gives a list of sentences; empty is good.
() => {
  const wrong = [];
  const say = (element, words) => wrong.push(`${words}: <${element.tagName.toLowerCase()} class="${element.className}"> ${(element.textContent || "").trim().slice(0, 40)}`);
  const visible = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true }) && element.getClientRects().length > 0;
  const all = (selector) => [...document.querySelectorAll(selector)].filter(visible);
  const text = (id) => document.getElementById(id)?.textContent.trim() ?? "";

  function name(element) {
    if (element.getAttribute("aria-label")) return element.getAttribute("aria-label").trim();
    if (element.getAttribute("aria-labelledby")) return element.getAttribute("aria-labelledby").split(" ").map(text).join(" ").trim();
    if (element.labels?.length) return [...element.labels].map((label) => label.textContent).join(" ").trim();
    return (element.textContent || element.getAttribute("alt") || element.getAttribute("title") || "").trim();
  }

  // ── names and roles ──
  for (const element of all("button, a[href], input, select, textarea, summary, [tabindex], [role=img], [role=grid]")) {
    if (element.tabIndex >= 0 && !name(element) && element.tagName !== "MAIN") say(element, "no accessible name");
  }
  for (const element of all("input, select, textarea")) if (!element.labels?.length && !element.getAttribute("aria-label")) say(element, "a field without a label");
  for (const element of all("img")) if (!element.hasAttribute("alt")) say(element, "a picture without alt");
  for (const element of all("canvas, svg")) {
    const hidden = element.closest("[aria-hidden=true], button, [role=img]");
    if (!hidden && !element.getAttribute("aria-label")) say(element, "a drawing without a name");
  }
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) wrong.push(`the id ${id} is used twice`);
  for (const attribute of ["for", "aria-describedby", "aria-labelledby"])
    for (const element of document.querySelectorAll(`[${attribute}]`))
      for (const id of element.getAttribute(attribute).split(" ")) if (!ids.includes(id)) say(element, `${attribute} names ${id}, which is not there`);
  for (const element of all("table")) if (!element.querySelector("th[scope]")) say(element, "a table without headers");
  for (const element of all("[role=gridcell]")) if (!element.closest("[role=row]") || !element.closest("[role=grid]")) say(element, "a grid cell outside its grid");
  for (const element of all("[role=listitem]")) if (!element.closest("[role=list], ul, ol")) say(element, "a list item outside its list");

  // ── the page's bones ──
  if (!document.documentElement.lang) wrong.push("the page has no language");
  if (!document.title.trim()) wrong.push("the page has no title");
  if (all("h1").length !== 1) wrong.push(`${all("h1").length} first headings`);
  let level = 1;
  for (const heading of all("h1, h2, h3, h4")) {
    const own = Number(heading.tagName[1]);
    if (own > level + 1) say(heading, `a heading of level ${own} after one of level ${level}`);
    level = own;
  }
  for (const landmark of ["header", "nav", "main"]) if (all(landmark).length < 1) wrong.push(`no ${landmark}`);

  // ── contrast (WCAG 2: 4.5, large 3) ──
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const cache = new Map();
  function rgba(colour) {
    if (!cache.has(colour)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      cache.set(colour, [r, g, b, a / 255]);
    }
    return cache.get(colour);
  }
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3]));
  function background(element) {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(rgba(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255]);
  }
  const light = (colour) => {
    const [r, g, b] = colour.slice(0, 3).map((x) => ((x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.textContent.trim() || !visible(element) || element.closest("[disabled], [aria-busy=true], script, noscript, option")) continue;
    const style = getComputedStyle(element);
    if (parseFloat(style.fontSize) === 0) continue;
    const under = background(element);
    const ink = over(rgba(element.closest("svg") ? style.fill : style.color), under);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && Number(style.fontWeight) >= 700);
    const found = contrast(ink, under);
    if (found < (large ? 3 : 4.5)) say(element, `contrast ${found.toFixed(2)} (${style.color} on ${under.map(Math.round)})`);
  }
  for (const element of all("input, select, textarea")) {
    const found = contrast(rgba(getComputedStyle(element).borderTopColor), background(element.parentElement));
    if (found < 3 && element.type !== "checkbox") say(element, `the border's contrast is ${found.toFixed(2)}`);
  }

  // ── targets ──
  for (const element of all("button, select, summary, nav a")) {
    const box = element.getBoundingClientRect();
    const inline = element.matches(".word, .av-cell, .names button");
    if (!inline && (box.height < 24 || box.width < 24)) say(element, `a target of ${box.width.toFixed(0)} × ${box.height.toFixed(0)} pixels`);
  }
  return wrong;
};
