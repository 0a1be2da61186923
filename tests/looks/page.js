// Of the outputs of a cell, an element: their structure, and the contrast of every text in them (WCAG 2).
element => {
  const KEPT = /^(nbddp-|ansi-bold|ansi-underline|widget-(?!\w*-ui)|jupyter-button)/;
  const name = e => [e.tagName.toLowerCase(), ...[...e.classList].filter(c => KEPT.test(c)).sort()].join(".");
  const folded = parts => parts.filter((p, i) => p !== parts[i - 1]).map(p => parts.filter(q => q === p).length > 1 ? p + "+" : p);
  const tree = e => {
    if (e.tagName === "STYLE" || e.tagName === "svg") return e.tagName.toLowerCase();
    if (e.tagName === "IMG") return name(e) + (e.alt.trim() ? "[alt]" : "[no alt]");
    if (e.tagName === "PRE") return name(e);
    const inside = folded([...e.children].map(tree));
    return name(e) + (inside.length ? "(" + inside.join(" ") + ")" : "");
  };
  const parse = c => {
    const srgb = c.match(/^color\(srgb ([^)]*)\)/);
    if (srgb) { const [r, g, b, a] = srgb[1].split(/[ /]+/).map(Number); return [255 * r, 255 * g, 255 * b, a ?? 1]; }
    const [r, g, b, a] = c.match(/[\d.]+/g).map(Number); return [r, g, b, a ?? 1];
  };
  const over = (top, below, opacity = 1) => { const a = top[3] * opacity; return [0, 1, 2].map(i => a * top[i] + (1 - a) * below[i]).concat(1); };
  const behind = e => {
    if (!e) return [255, 255, 255, 1];
    const style = getComputedStyle(e);
    return over(parse(style.backgroundColor), behind(e.parentElement), +style.opacity);
  };
  // In a drawing a text lies on the parts that are drawn before it, where its middle is
  const drawnBehind = e => {
    let root = e; while (root.parentElement?.closest("svg")) root = root.parentElement.closest("svg");
    const box = e.getBoundingClientRect(), [x, y] = [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
    let below = behind(root);
    for (const part of root.querySelectorAll("rect, path, circle, ellipse, polygon")) {
      if (part.closest("defs") || !(part.compareDocumentPosition(e) & Node.DOCUMENT_POSITION_FOLLOWING)) continue;
      const at = part.getBoundingClientRect(), style = getComputedStyle(part);
      if (x < at.left || x > at.right || y < at.top || y > at.bottom || !/^(rgb|color)/.test(style.fill)) continue;
      below = over(parse(style.fill), below, style.fillOpacity * style.opacity);
    }
    return below;
  };
  const opacity = e => e ? getComputedStyle(e).opacity * opacity(e.parentElement) : 1;
  const light = c => { const [r, g, b] = c.slice(0, 3).map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b; };
  const ratio = (a, b) => { const [high, low] = [light(a), light(b)].sort((x, y) => y - x); return (high + .05) / (low + .05); };
  const texts = [], walk = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode, e = node.parentElement;
    if (!node.data.trim() || !e.getClientRects().length || /^(STYLE|SCRIPT)$/.test(e.tagName) || e.closest(".jp-OutputPrompt, :disabled")) continue;
    const style = getComputedStyle(e), drawn = e.closest("svg") !== null;
    if (drawn && !/^(rgb|color)/.test(style.fill)) continue;
    const below = drawn ? drawnBehind(e) : behind(e), ink = over(parse(drawn ? style.fill : style.color), below, opacity(e) * (drawn ? +style.fillOpacity : 1));
    texts.push({text: node.data.trim().slice(0, 60), where: name(e), ink: ink.slice(0, 3).map(Math.round), behind: below.slice(0, 3).map(Math.round),
      ratio: ratio(ink, below)});
  }
  const outputs = [...element.querySelectorAll(".jp-OutputArea-output")].filter(e => !e.parentElement.closest(".jp-OutputArea-output"));
  return {
    outputs: outputs.map(e => ({mime: e.dataset.mimeType || (e.querySelector("[data-mime-type]") || {dataset: {}}).dataset.mimeType || "", tree: folded([...e.children].map(tree)).join(" "), text: e.innerText})),
    texts,
  };
}
