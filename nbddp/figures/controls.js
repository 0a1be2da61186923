// What ipywidgets' controls lack for a keyboard and a screen reader. Called with the element that has them all; what is
// added or changed in it later is treated too.
(root) => {
  const set = (element, name, value) => {
    if (element && value && element.getAttribute(name) !== value) element.setAttribute(name, value);
  };
  const text = (element) => (element ? element.textContent.trim() : "");
  const label = (element) => text(element.closest(".jupyter-widgets:has(> .widget-label)")?.querySelector(".widget-label"));
  const beside = (element) => text(element.closest(".nbddp-steps-row")?.querySelector(".widget-label"));

  const ICONS = { "fa-play": "play", "fa-pause": "pause", "fa-stop": "stop", "fa-repeat": "repeat" };
  const nameControls = () => {
    root.querySelectorAll(".widget-play button").forEach((button) => {
      const icon = Object.keys(ICONS).find((name) => button.querySelector(`.${name}`));
      set(button, "aria-label", [beside(button), ICONS[icon]].filter(Boolean).join(": "));
    });
    root.querySelectorAll("[role=slider]").forEach((handle) => set(handle, "aria-label", handle.ariaLabel || label(handle)));
    root.querySelectorAll(".widget-readout").forEach((readout) => {
      set(readout, "role", "textbox");
      set(readout, "aria-label", `${label(readout)}: value`);
    });
    root.querySelectorAll("select, input:not([type=radio]):not([type=hidden])").forEach((field) => {
      if (!text(field.labels?.[0])) set(field, "aria-label", label(field) || field.title || field.placeholder);
    });
    root.querySelectorAll(".widget-radio-box").forEach((group) => {
      set(group, "role", "radiogroup");
      set(group, "aria-label", text(root.querySelector(".nbddp-asks")) || label(group));
    });
    root.querySelectorAll(".widget-toggle-buttons:not(.nbddp-pages)").forEach((group) => {
      set(group, "role", "group");
      set(group, "aria-label", group.title || group.querySelector("[title]")?.title || "choices");
      group.querySelectorAll("button").forEach((b) => set(b, "aria-pressed", String(b.classList.contains("mod-active"))));
    });
    root.querySelectorAll("button").forEach((button) => {
      const off = button.classList.contains("nbddp-off");
      if (off || button.hasAttribute("aria-disabled")) set(button, "aria-disabled", String(off));
      if (off && button.title) set(button, "aria-description", button.title);
      else button.removeAttribute("aria-description");
    });
  };

  // Shortcuts of JupyterLab take arrow keys, unless what has the focus has an attribute: for these keys alone
  const KEEPS = ":is(.nbddp-panel, .nbddp-explorer, .nbddp-question) :is([role=slider], [role=tab], .nbddp-line input)";
  if (!window.nbddpKeepsKeys) {
    window.nbddpKeepsKeys = true;
    window.addEventListener("keydown", (event) => {
      const at = event.target instanceof Element && event.target.closest(KEEPS);
      if (!at) return;
      const held = event.ctrlKey || event.altKey || event.metaKey || event.shiftKey;
      at.toggleAttribute("data-lm-suppress-shortcuts", /^(Arrow|Home|End|Page|Enter|Tab)/.test(event.key) && !held);
    }, true);
  }
  if (root.nbddpControls) return;
  root.nbddpControls = new MutationObserver(nameControls);
  root.nbddpControls.observe(root, { subtree: true, childList: true, attributes: true, attributeFilter: ["class", "title"] });
  nameControls();
}
