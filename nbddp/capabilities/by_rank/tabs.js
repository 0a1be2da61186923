(() => {
  // What a view had when it was replaced: its tab, search, scroll positions and focus. A new view takes this over from
  // the one that was in the same place, so the HTML needs no name that differs from run to run. The view that stays
  // comes beside the live one, which it hides, because that is about to be emptied.
  const before = (window.nbddpTabs = window.nbddpTabs || []);
  const NEAR = 4; // elements around a view that belong to its output
  const LIVE = 368, NAME = 23, LINE = 17; // pixels that all ranks share while the cell runs; of a name; of a line
  if (!before.listens) {
    before.listens = true;
    // JupyterLab and Notebook 7 take Enter and the arrow keys, unless the element that has the focus says so
    window.addEventListener("keydown", (event) => {
      const at = event.target instanceof Element && event.target.closest(".nbddp-strip button, .nbddp-body, .nbddp-rank");
      const held = event.ctrlKey || event.altKey || event.metaKey || event.shiftKey;
      const ours = /^(Arrow.*|Home|End|Page.*|Enter| )$/.test(event.key) && !held;
      if (at && at === event.target) at.toggleAttribute("data-lm-suppress-shortcuts", ours);
    }, true);
  }
  const inherited = (root) => {
    const ended = (old) => !("live" in root.dataset) && "live" in old.root.dataset && old.root.isConnected;
    const at = before.findIndex((old) => ended(old) ? old.around.some((e) => e.contains(root))
      : !old.root.isConnected && old.around.find((e) => e.isConnected)?.contains(root));
    const old = at < 0 ? undefined : before.splice(at, 1)[0];
    if (old?.root.isConnected) (old.root.closest(".nbddp-live") || old.root).style.display = "none";
    for (let i = before.length; i--; ) if (!before[i].around.some((e) => e.isConnected)) before.splice(i, 1);
    const around = [];
    for (let e = root.parentElement; e && e !== document.body && around.length < NEAR; e = e.parentElement) around.push(e);
    const state = old ? { ...old.state } : { tops: {}, search: "" };
    before.push({ root, around, state });
    return state;
  };
  const made = (name, kind, more) => Object.assign(document.createElement(kind), { className: name }, more);
  const markup = (text) => text.replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);

  const begin = (root) => {
    root.dataset.on = "1";
    const state = inherited(root), live = "live" in root.dataset;
    const body = root.querySelector(":scope > .nbddp-body");
    const panes = [...body.querySelectorAll(":scope > .nbddp-rank")];
    const differs = body.querySelector(":scope > .nbddp-differs");
    for (const pane of panes) {
      const sheet = made("nbddp-wide", "div"); // as wide as the longest line, so that the name can stay in view
      sheet.append(made("nbddp-name", "div", { textContent: pane.querySelector("summary").textContent }));
      pane.append(sheet);
      sheet.append(pane.querySelector(".nbddp-lines"));
    }
    for (const fold of [...panes, ...(differs ? [differs] : [])]) fold.open = true;
    root.style.setProperty("--rows", Math.max(2, Math.floor((LIVE / panes.length - NAME) / LINE)));
    const first = (pane) => Number(pane.dataset.ranks.split(" ")[0]);

    // -- tabs
    const head = made("nbddp-head", "div"), strip = made("nbddp-strip", "div");
    strip.setAttribute("role", "tablist");
    strip.setAttribute("aria-label", "Output by rank");
    const tabs = [];
    const add = (key, name, label, pane) => {
      const tab = made("", "button", { type: "button", textContent: name, title: label });
      tab.setAttribute("role", "tab");
      tab.setAttribute("aria-label", label);
      tabs.push({ key, tab, pane });
      strip.append(tab);
    };
    if (panes.length === 1) add("all", panes[0].dataset.tab, panes[0].querySelector("summary").textContent);
    else {
      add("all", "all", "all ranks");
      if (differs) add("differences", "differences", "lines that differ between ranks");
      add("side", "side by side", "ranks side by side");
      for (const pane of panes) {
        const failed = "failed" in pane.dataset ? " ✗" : "";
        add(`rank ${first(pane)}`, pane.dataset.tab + failed, pane.querySelector("summary").textContent, pane);
      }
    }
    const chosen = () => tabs.find((one) => one.key === state.tab)
      || tabs.find((one) => one.pane?.dataset.ranks.split(" ").includes((state.tab || "").slice(5)))
      || tabs.find((one) => one.key === ("rich" in root.dataset ? "side" : "all")) || tabs[0];
    const put = (e, key, end) => {
      const [x, y] = state.tops[key] || [0, end ? "end" : 0];
      e.scrollLeft = x;
      e.scrollTop = y === "end" ? e.scrollHeight : y;
    };
    const note = (e, key) => {
      const atEnd = e.scrollHeight > e.clientHeight && e.scrollTop + e.clientHeight > e.scrollHeight - 4;
      state.tops[key] = [e.scrollLeft, live && atEnd ? "end" : e.scrollTop];
    };
    // What an application shows, such as a widget, is an output of its own: it follows, each below a line with its ranks
    let view = "all";
    const CELL = ".jp-OutputArea-child, .output_area", LABEL = /^ranks? (\d[\d–, ]*?)( Out)? *│/;
    const ranksOf = (words) => words.split(",").flatMap((part) => {
      const [low, high = low] = part.split("–").map(Number);
      return Array.from({ length: high - low + 1 }, (_, i) => low + i);
    });
    const output = root.closest(CELL);
    const followOutputs = () => {
      const pane = chosen().pane, wanted = pane?.dataset.ranks.split(" ").map(Number);
      const side = view === "side", columns = new Map(), rows = new Map(), area = output?.parentElement;
      const above = area ? [...area.children].indexOf(output) + 1 : 0; // with this view itself
      let shows = true, labelled = false, ranks = "";
      for (let e = output?.nextElementSibling; e; e = e.nextElementSibling) {
        const label = LABEL.exec(e.matches(CELL) && e.querySelector("pre")?.textContent || "");
        if (label) shows = !wanted || ranksOf(label[1]).some((rank) => wanted.includes(rank));
        if (label) ranks = label[1];
        if (label || labelled) {
          e.classList.toggle("nbddp-elsewhere", !shows);
          e.classList.toggle("nbddp-column", side);
          if (!columns.has(ranks)) columns.set(ranks, columns.size + 1);
          rows.set(ranks, (rows.get(ranks) ?? above) + 1);
          e.style.gridArea = side ? `${rows.get(ranks)} / ${columns.get(ranks)}` : "";
        } else e.style.gridArea = side ? "auto / 1 / auto / -1" : "";
        labelled = label !== null; // its display comes next
      }
      [...(area?.children || [])].slice(0, above).forEach((e, i) => {
        e.style.gridArea = side ? `${i + 1} / 1 / auto / -1` : "";
      });
      if (columns.size) inColumns(area, side && columns.size > 1, columns.size);
    };
    // Those of ranks side by side: a column for each, below the view
    const inColumns = (area, side, count) => {
      const was = area.classList.contains("nbddp-columns");
      area.classList.toggle("nbddp-columns", side);
      area.style.setProperty("--nbddp-columns", count);
      if (was !== side) window.dispatchEvent(new Event("resize")); // a figure fits itself into its place then
    };
    if (output?.parentElement && !live) {
      new MutationObserver(followOutputs).observe(output.parentElement, { childList: true });
    }

    const show = () => {
      const now = chosen();
      view = now.key;
      root.dataset.view = now.pane ? "rank" : now.key;
      for (const pane of panes) pane.hidden = view === "differences" || Boolean(now.pane && now.pane !== pane);
      if (differs) differs.hidden = view !== "differences";
      if (!live) followOutputs();
      for (const { tab } of tabs) {
        tab.setAttribute("aria-selected", tab === now.tab);
        tab.tabIndex = tab === now.tab ? 0 : -1;
      }
      body.setAttribute("aria-label", now.tab.getAttribute("aria-label"));
      put(body, view, live && now.pane);
      for (const pane of panes) if (view === "side") put(pane, `side ${first(pane)}`, live);
      reach();
    };
    // What scrolls by itself can be scrolled by keys, in browsers that do not see to that, too
    const reachable = (e, scrolls, name) => {
      if (!scrolls) return e.removeAttribute("tabindex");
      e.tabIndex = 0;
      e.setAttribute("aria-label", name);
      e.setAttribute("role", "group");
    };
    const reach = () => {
      for (const pane of panes) reachable(pane, view === "side", pane.querySelector("summary").textContent);
      for (const rich of body.querySelectorAll(".nbddp-rich")) reachable(rich, rich.scrollWidth > rich.clientWidth, "display");
    };
    const choose = (one) => { state.tab = one.key; show(); };
    for (const one of tabs) one.tab.addEventListener("click", () => choose(one));
    strip.addEventListener("keydown", (event) => {
      const i = tabs.findIndex(({ tab }) => tab === event.target), last = tabs.length - 1;
      const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: last }[event.key];
      if (i < 0 || to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      event.stopPropagation();
      const next = tabs[(to + last + 1) % (last + 1)];
      choose(next);
      next.tab.focus();
    });
    body.tabIndex = 0;
    body.setAttribute("role", "tabpanel");
    body.addEventListener("scroll", () => body.isConnected && note(body, view), { passive: true });
    for (const pane of panes)
      pane.addEventListener("scroll", () => pane.isConnected && note(pane, `side ${first(pane)}`), { passive: true });

    // -- search
    const find = made("nbddp-find", "label"), count = made("nbddp-count", "span");
    const input = made("", "input", { type: "search", placeholder: "search lines", value: state.search });
    input.setAttribute("aria-label", "search lines");
    count.setAttribute("role", "status");
    find.append(count, input);
    const lines = new Map();
    const filter = () => {
      const word = state.search.toLowerCase();
      let hits = 0;
      root.classList.toggle("nbddp-searching", word !== "");
      for (const pane of panes) {
        let mine = 0;
        for (const pre of pane.querySelectorAll(".nbddp-lines > pre")) {
          if (!lines.has(pre)) lines.set(pre, pre.innerHTML.split("\n"));
          const all = lines.get(pre).map((line) => [line, line.replace(/<[^>]*>/g, "")
            .replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&nbsp;/g, " ").replace(/&amp;/g, "&")]);
          const left = all.filter(([, text]) => text.toLowerCase().includes(word));
          mine += left.length;
          pre.innerHTML = left.map(([line, text]) => {
            const at = text.toLowerCase().indexOf(word), end = at + word.length;
            if (!word || line.includes("<a ")) return line;
            const [, open, close] = line.match(/^(<[ibu]>)?.*?(<\/[ibu]>)?$/s);
            const marked = `<mark>${markup(text.slice(at, end))}</mark>`;
            return (open || "") + markup(text.slice(0, at)) + marked + markup(text.slice(end)) + (close || "");
          }).join("\n");
          pre.hidden = left.length === 0;
        }
        hits += mine;
        pane.style.display = word && !mine ? "none" : "";
      }
      count.textContent = word ? `${hits} ${hits === 1 ? "line" : "lines"}` : "";
    };
    input.addEventListener("input", () => { state.search = input.value; filter(); });
    head.append(strip, find);
    root.prepend(head);
    if (live) root.append(made("nbddp-foot", "p", { textContent: root.dataset.below }));
    root.classList.add("nbddp-on");
    if (state.search) filter();
    show();

    // -- focus
    const stops = () => [input, body, ...panes];
    if (state.focus !== undefined) {
      const at = state.focus === "tab" ? chosen().tab : stops()[state.focus];
      at?.focus({ preventScroll: true });
      if (at === input && state.caret) input.setSelectionRange(...state.caret);
    }
    const caret = () => { state.caret = [input.selectionStart, input.selectionEnd]; };
    for (const kind of ["input", "keyup", "click"]) input.addEventListener(kind, caret);
    root.addEventListener("focusin", (event) => {
      const i = stops().indexOf(event.target);
      state.focus = strip.contains(event.target) ? "tab" : i < 0 ? undefined : i;
    });
    root.addEventListener("focusout", () => setTimeout(() => { // an update that removes the element is no such thing
      if (root.isConnected && !root.contains(document.activeElement)) delete state.focus;
    }));
  };
  for (const root of document.querySelectorAll(".nbddp-tabs:not([data-on])")) begin(root);
})()
