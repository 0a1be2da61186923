// Makes each figure of the page live: the SVG takes the place of its <img>, and the titled spans become its parts' names.
// Runs once per output; what it has done is marked, so several runs do no harm.
(() => {
  "use strict";
  const all = (window.nbddpFigures ||= { count: 0 });
  const MOST = 32; // times the width
  const STEP = 1.5; // a press of + or −
  const KEYS = /^(Arrow(Left|Right|Up|Down)|Home|End|Escape|Enter| |[-+=0])$/;
  const PLACE = /In\[(\d+)\](?: line (\d+))?/;
  const plain = (e) => !e.ctrlKey && !e.metaKey && !e.altKey;
  const make = (tag, name, text = "") => Object.assign(document.createElement(tag), { className: name, textContent: text });

  // JupyterLab looks for this attribute on what has the focus; other keys (Ctrl+S, Shift+Enter) stay its own.
  if (!all.keys) {
    all.keys = true;
    addEventListener("keydown", (e) => {
      const at = e.target instanceof Element && e.target.closest(".nbddp-figure :is([tabindex], button, summary)");
      if (at) at.toggleAttribute("data-lm-suppress-shortcuts", KEYS.test(e.key) && plain(e) && !e.shiftKey);
    }, true);
  }

  const asSvg = (text) => {
    const parsed = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
    if (parsed.nodeName !== "svg") throw new Error("the picture is no SVG");
    return document.importNode(parsed, true);
  };

  function picture(img) {
    const text = decodeURIComponent(img.src.slice(img.src.indexOf(",") + 1));
    const svg = asSvg(text.replaceAll("nbddp-hatch", `nbddp-hatch-${++all.count}`));
    svg.style.colorScheme = "inherit";
    svg.setAttribute("role", "group");
    return svg;
  }

  class Pane {
    constructor(pane) {
      this.pane = pane;
      this.view = pane.querySelector(".nbddp-view");
      this.sheet = pane.querySelector(".nbddp-drawing");
      this.cards = new Map(); // part → its pinned card
      this.card = make("div", "nbddp-card");
      this.card.setAttribute("aria-hidden", "true"); // what has the focus says the same by its name
      this.zoomed = 1;
      const img = this.sheet.querySelector("img");
      this.svg = picture(img);
      this.take(img.alt, [...this.sheet.querySelectorAll(".nbddp-part")].map((s) => ({ ...s.dataset, words: s.title })));
      img.replaceWith(this.svg);
      this.sheet.querySelectorAll(".nbddp-part").forEach((spot) => spot.remove());
      this.listen();
      if (pane.dataset.zoom) this.tools();
    }

    // The parts of a drawing with their words; one of them is where Tab stops.
    take(name, spots) {
      this.svg.setAttribute("aria-label", `${name}; arrow keys go from part to part`);
      this.parts = [...this.svg.querySelectorAll("[data-i]")];
      this.parts.forEach((part, i) => {
        Object.assign(part.dataset, spots[i]);
        part.setAttribute("tabindex", i ? -1 : 0);
        part.setAttribute("role", "img");
        part.setAttribute("aria-label", spots[i].words);
      });
    }

    // Show another drawing, as high as the highest so far: what lies below stays where the pointer is.
    redraw(scene) {
      [...this.cards.keys()].forEach((part) => this.unpin(part));
      const kept = this.svg.querySelectorAll(":scope > style, :scope > defs");
      const made = asSvg(`<svg xmlns="${this.svg.namespaceURI}">${scene.body}</svg>`);
      this.sheet.style.minHeight = `${Math.max(this.sheet.offsetHeight, scene.height)}px`;
      this.svg.replaceChildren(...kept, ...made.childNodes);
      this.svg.setAttribute("height", scene.height);
      this.take(scene.name, scene.parts);
      this.show(null);
    }

    listen() {
      const part = (e) => e.target instanceof Element && e.target.closest(".nbddp-svg [data-i]");
      this.sheet.addEventListener("pointerover", (e) => this.show(part(e)));
      this.sheet.addEventListener("pointerleave", () => this.show(part({ target: document.activeElement })));
      this.sheet.addEventListener("focusin", (e) => this.show(part(e)));
      this.sheet.addEventListener("focusout", () => this.show(null));
      this.sheet.addEventListener("click", (e) => { if (!this.dragged && part(e)) this.act(part(e)); });
      this.pane.addEventListener("keydown", (e) => this.key(e, this.parts.indexOf(e.target)));
      this.view.addEventListener("scroll", () => this.place(), { passive: true });
      new ResizeObserver(() => this.place()).observe(this.view);
    }

    show(part) {
      this.shown = part && !this.cards.has(part) ? part : null;
      if (!this.shown) return this.card.remove();
      this.card.textContent = this.shown.dataset.words;
      this.pane.append(this.card);
      this.at(this.card, this.shown);
    }

    // Below its part, or above where there is no room, and never beyond the sides of the pane or below the figure.
    at(card, part) {
      const pane = this.pane.getBoundingClientRect(), box = part.firstElementChild.getBoundingClientRect();
      const left = Math.max(box.left, pane.left) - pane.left;
      card.style.left = `${Math.max(0, Math.min(left, pane.width - card.offsetWidth))}px`;
      const below = box.bottom - pane.top + 6, above = box.top - pane.top - card.offsetHeight - 6;
      const end = this.pane.closest(".nbddp-figure").getBoundingClientRect().bottom - pane.top - card.offsetHeight;
      card.style.top = `${below + card.offsetHeight > pane.height && above > 0 ? above : Math.max(0, Math.min(below, end))}px`;
      card.hidden = box.right < pane.left || box.left > pane.right;
    }

    place() {
      this.sheet.style.setProperty("--at", `${this.view.scrollLeft}px`);
      this.cards.forEach((card, part) => this.at(card, part));
      if (this.shown) this.at(this.card, this.shown);
    }

    // A click, or Enter: show the part's scene, or pin its card, or take that away.
    act(part) {
      if (this.choose && part.dataset.scene) return this.choose(part);
      if (this.cards.has(part)) return this.unpin(part);
      const card = make("div", "nbddp-card pinned", part.dataset.words);
      card.setAttribute("role", "note");
      const close = make("button", "", "Unpin");
      close.addEventListener("click", () => { this.unpin(part); part.focus(); });
      card.append(make("br", ""), close, ...this.links(part));
      part.classList.add("pinned");
      this.cards.set(part, card);
      this.pane.append(card);
      this.show(null);
      this.place();
    }

    unpin(part) {
      this.cards.get(part).remove();
      this.cards.delete(part);
      part.classList.remove("pinned");
    }

    links(part) {
      return (part.dataset.cell || "").split(" ").flatMap((place) => {
        const [number, line] = place.split(":"), cell = number && cellOf(number);
        if (!cell) return [];
        const go = make("button", "", `Go to line ${line} of In[${number}]`);
        go.addEventListener("click", () => reveal(cell, line));
        return [go];
      });
    }

    key(e, i) {
      if (!plain(e) || e.shiftKey || !KEYS.test(e.key) || (i < 0 && e.target !== this.view)) return;
      const to = i >= 0 && this.beside(e.key, this.parts[i]);
      if (to) this.pick(to);
      else if (e.key === "Escape" && this.cards.size) [...this.cards.keys()].forEach((part) => this.unpin(part));
      else if ((e.key === "Enter" || e.key === " ") && i >= 0) this.act(this.parts[i]);
      else if (this.pane.dataset.zoom && "+=".includes(e.key)) this.zoom(this.zoomed * STEP);
      else if (this.pane.dataset.zoom && e.key === "-") this.zoom(this.zoomed / STEP);
      else if (this.pane.dataset.zoom && e.key === "0") this.zoom(1);
      else if (i < 0 || !/^(Arrow|Home|End)/.test(e.key)) return;
      e.preventDefault();
      e.stopPropagation();
    }

    // The part that an arrow key goes to: the next of the row, or the nearest of the row above or below.
    beside(key, part) {
      const rows = { ArrowUp: -1, ArrowDown: 1 }[key];
      if (!rows) {
        const row = this.parts.filter((p) => p.dataset.row === part.dataset.row), i = row.indexOf(part);
        return row[{ ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: row.length - 1 }[key]];
      }
      const far = (p) => Math.abs(p.dataset.at - part.dataset.at);
      const numbers = this.parts.map((p) => +p.dataset.row).filter((r) => (r - part.dataset.row) * rows > 0);
      const next = rows > 0 ? Math.min(...numbers) : Math.max(...numbers);
      return this.parts.filter((p) => +p.dataset.row === next).sort((a, b) => far(a) - far(b))[0];
    }

    pick(part) {
      this.parts.forEach((p) => p.setAttribute("tabindex", p === part ? 0 : -1));
      part.focus();
      part.scrollIntoView({ block: "nearest", inline: "nearest" });
    }

    zoom(times, x = this.view.clientWidth / 2) {
      const before = this.zoomed, at = this.view.scrollLeft + x;
      this.zoomed = Math.min(MOST, Math.max(1, times));
      this.sheet.style.width = `${100 * this.zoomed}%`;
      this.view.scrollLeft = (at * this.zoomed) / before - x;
      this.smaller.disabled = this.whole.disabled = this.zoomed === 1;
      this.larger.disabled = this.zoomed === MOST;
      this.place();
    }

    tools() {
      const bar = make("div", "nbddp-tools"), button = (text, name, act) => {
        const made = make("button", "", text);
        made.setAttribute("aria-label", name);
        made.title = name;
        made.addEventListener("click", act);
        bar.append(made);
        return made;
      };
      bar.setAttribute("role", "group");
      bar.setAttribute("aria-label", "Zoom in time");
      this.smaller = button("−", "Zoom out", () => this.zoom(this.zoomed / STEP));
      this.larger = button("+", "Zoom in", () => this.zoom(this.zoomed * STEP));
      this.whole = button("Whole width", "Show the whole width", () => this.zoom(1));
      this.smaller.disabled = this.whole.disabled = true;
      this.hint = make("small", "", "Drag to pan, Ctrl + wheel to zoom; click a part to pin its numbers.");
      bar.append(this.hint);
      this.pane.before(bar);
      this.view.addEventListener("wheel", (e) => {
        if (!e.ctrlKey && !e.metaKey) return;
        e.preventDefault();
        this.zoom(this.zoomed * Math.exp(-e.deltaY / 300), e.clientX - this.view.getBoundingClientRect().left);
      }, { passive: false });
      this.pans();
    }

    pans() {
      let from = null;
      this.view.addEventListener("pointerdown", (e) => {
        this.dragged = false;
        if (e.button === 0 && e.pointerType === "mouse") from = e.clientX + this.view.scrollLeft;
      });
      this.view.addEventListener("pointermove", (e) => {
        if (from === null || !(e.buttons & 1)) return void (from = null);
        if (Math.abs(from - e.clientX - this.view.scrollLeft) > 3) this.dragged = true;
        this.view.scrollLeft = from - e.clientX;
      });
      addEventListener("pointerup", () => { from = null; });
    }
  }

  async function unpacked(text) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  }

  // The scenes of a figure: one takes the place of the first drawing and of its words when a part of it is chosen.
  class Scenes {
    constructor(root) {
      this.root = root;
      this.head = root.querySelector(":scope > pre");
      this.head.setAttribute("role", "status");
      this.parts = root.panes.flatMap((pane) => pane.parts.filter((part) => part.dataset.scene));
      for (const part of this.parts) {
        part.dataset.words = part.dataset.words.replace(/\n.*$/, "\nClick, or press Enter, to draw it above.");
        part.setAttribute("aria-label", part.dataset.words);
        part.setAttribute("role", "button");
        part.setAttribute("aria-pressed", part.firstElementChild.classList.contains("now"));
      }
      for (const pane of root.panes) {
        pane.choose = (part) => this.show(part);
        if (pane.parts.includes(this.parts[0])) pane.hint.textContent = root.dataset.offered;
      }
    }

    async show(part) {
      this.asked = part;
      const scenes = await (this.scenes ||= unpacked(this.root.dataset.scenes));
      if (this.asked !== part) return; // another was chosen since
      const { head, fold } = scenes[part.dataset.scene];
      this.root.panes[0].redraw(scenes[part.dataset.scene]);
      const more = this.head.querySelector(".nbddp-caption") || "";
      this.head.innerHTML = head;
      this.head.append(more);
      const details = this.root.querySelector(":scope > details"), open = details.firstElementChild;
      details.innerHTML = fold;
      details.prepend(open);
      link(this.root);
      for (const other of this.parts) {
        other.firstElementChild.classList.toggle("now", other === part);
        other.setAttribute("aria-pressed", other === part);
      }
    }
  }

  // The cell with this number, in JupyterLab, Notebook, nbclassic and what nbconvert writes.
  function cellOf(number) {
    const cells = [...document.querySelectorAll(".jp-CodeCell, .code_cell")];
    const prompt = (cell) => cell.querySelector(".jp-InputPrompt, .input_prompt")?.textContent || "";
    return cells.find((cell) => prompt(cell).match(/\d+/)?.[0] === number);
  }

  function reveal(cell, line) {
    const lines = cell.querySelectorAll(".cm-line, .CodeMirror-line");
    const to = lines[line - 1] || cell.querySelector(".jp-InputArea, .input_area") || cell;
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    to.scrollIntoView({ block: "center", behavior: still ? "auto" : "smooth" });
    to.classList.add("nbddp-found");
    setTimeout(() => to.classList.remove("nbddp-found"), 4000);
  }

  // In texts and tables, what names a cell or its line leads there: where cells have numbers.
  function link(root) {
    if (!document.querySelector(".jp-InputPrompt, .input_prompt")) return;
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT), texts = [];
    while (walker.nextNode()) if (!walker.currentNode.parentElement.closest("button, svg, style")) texts.push(walker.currentNode);
    for (let text = texts.pop(); text; text = texts.pop()) {
      const found = text.data.match(PLACE);
      if (!found) continue;
      const place = text.splitText(found.index), go = make("button", "nbddp-place", found[0]);
      texts.push(place.splitText(found[0].length));
      go.addEventListener("click", () => {
        const cell = cellOf(found[1]);
        if (cell) reveal(cell, found[2]);
        else Object.assign(go, { disabled: true, title: "This cell is not on the page." });
      });
      place.replaceWith(go);
    }
  }

  for (const root of document.querySelectorAll(".nbddp-figure:not([data-live])")) {
    root.dataset.live = "1";
    try {
      root.panes = [...root.querySelectorAll(".nbddp-pane")].map((pane) => new Pane(pane));
      if (root.dataset.scenes && window.DecompressionStream) root.scenes = new Scenes(root);
      link(root);
    } catch (failure) {
      console.warn("nbddp: this figure stays a picture", failure);
    }
  }
})();
