// What JupyterLab 4 and Notebook 7 load from nbddp. They remove <style> from notebooks that they do not trust, so this
// puts the rules of nbddp's pictures into the page. And they take the arrow keys for headings and cells, Notebook 7 also
// those pressed on a slider; nbddp's sliders keep theirs. A prebuilt extension without a build: it needs no other module,
// so it registers itself in the form that webpack's module federation gives to a container: init, and get.
(() => {
  "use strict";

  // STYLE + POINTED of nbddp/figures/html.py; tests/browser/test_figures.py compares them, and says what to write here
  const RULES = "[data-jp-theme-light=\"false\"] .nbddp-picture, .vscode-dark .nbddp-picture, .vscode-high-contrast:not(.vscode-high-contrast-light) .nbddp-picture {filter: invert(1) hue-rotate(180deg); mix-blend-mode: screen} [data-jp-theme-light=\"false\"] .nbddp-sheet, .vscode-dark .nbddp-sheet, .vscode-high-contrast:not(.vscode-high-contrast-light) .nbddp-sheet {background: var(--jp-layout-color0, var(--vscode-editor-background, transparent))} .nbddp-spot {position: absolute} .nbddp-spot:hover {outline: 2px solid currentColor; outline-offset: -1px} ";

  const SLIDERS = ":is(.nbddp-panel, .nbddp-explorer) [role=slider]";
  const MOVES = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End", "PageUp", "PageDown"];

  // Shortcuts look for an attribute on what has the focus. Notebook 7 looks when a key comes down to the document, so
  // this is done before, and again with each key: Ctrl+S on a slider still saves.
  function keepKeys(event) {
    const slider = event.target instanceof Element && event.target.closest(SLIDERS);
    if (!slider) return;
    const held = event.ctrlKey || event.altKey || event.metaKey || event.shiftKey;
    slider.toggleAttribute("data-lm-suppress-shortcuts", MOVES.includes(event.key) && !held);
  }

  const plugin = {
    id: "nbddp:page",
    description: "nbddp's pictures follow the page's theme, and its sliders keep the arrow keys",
    autoStart: true,
    activate() {
      try {
        const style = document.createElement("style");
        style.textContent = RULES;
        document.head.append(style);
      } catch (failure) {
        console.warn("nbddp: pictures of notebooks that are not trusted stay light", failure);
      }
      window.addEventListener("keydown", keepKeys, true);
    },
  };

  window._JUPYTERLAB = window._JUPYTERLAB || {};
  window._JUPYTERLAB.nbddp = {
    init() {}, // with the modules that the page shares: none is used
    async get(module) {
      if (module !== "./extension") throw new Error(`nbddp has no module ${module}`);
      return () => ({ __esModule: true, default: plugin });
    },
  };
})();
