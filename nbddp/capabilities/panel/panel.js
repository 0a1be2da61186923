// What the panel's page does by itself: tabs, the debugger's line as in a terminal, copying, keys on the curve.
(root) => {
  if (root.nbddpPanel) return;
  root.nbddpPanel = true;
  const all = (selector) => [...root.querySelectorAll(selector)];
  const set = (element, name, value) => {
    if (element.getAttribute(name) !== value) element.setAttribute(name, value);
  };

  // -- pages ------------------------------------------------------------------------------------
  const key = `nbddp-${Math.random().toString(36).slice(2)}`;
  const tabs = () => all(".nbddp-pages button");
  const showTabs = () => {
    const buttons = tabs(), pages = all(".nbddp-page");
    if (!buttons.length || buttons.length !== pages.length) return;
    set(buttons[0].parentElement, "role", "tablist");
    set(buttons[0].parentElement, "aria-label", "pages of the panel");
    buttons.forEach((tab, i) => {
      const active = tab.classList.contains("mod-active");
      tab.id ||= `${key}-tab-${i}`;
      pages[i].id ||= `${key}-page-${i}`;
      set(tab, "role", "tab");
      set(tab, "aria-selected", String(active));
      set(tab, "aria-controls", pages[i].id);
      set(tab, "tabindex", active ? "0" : "-1");
      set(pages[i], "role", "tabpanel");
      set(pages[i], "aria-labelledby", tab.id);
    });
  };
  const MOVES = { ArrowRight: 1, ArrowLeft: -1 };
  const moveTab = (event) => {
    const buttons = tabs(), at = buttons.indexOf(event.target.closest("[role=tab]"));
    if (at < 0) return false;
    const to = event.key === "Home" ? 0 : event.key === "End" ? buttons.length - 1
      : event.key in MOVES ? (at + MOVES[event.key] + buttons.length) % buttons.length : -1;
    if (to < 0) return false;
    buttons[to].focus();
    buttons[to].click();
    return true;
  };

  // -- the debugger's line ------------------------------------------------------------------------
  const history = [];
  let place = 0, asked = 0;
  const give = (input, value) => {
    input.value = value;
    input.dispatchEvent(new Event("change", { bubbles: true }));
  };
  const send = (input) => {
    const line = input.value.trim() || history.at(-1);
    if (!line) return;
    if (history.at(-1) !== line) history.push(line);
    place = history.length;
    offer([]);
    give(input, line);
    root.querySelector(".nbddp-send")?.click();
  };
  const recall = (input, by) => {
    place = Math.min(Math.max(place + by, 0), history.length);
    input.value = history[place] ?? "";
    input.setSelectionRange(input.value.length, input.value.length);
  };
  const offer = (names) => {
    const shown = root.querySelector(".nbddp-names");
    if (shown) shown.textContent = names.join("   ");
  };
  const word = (text) => /[\p{L}\p{N}_.]*$/u.exec(text)[0];
  const complete = (input) => {
    asked += 1;
    give(root.querySelector(".nbddp-ask input"), `${asked}:${input.value}`);
  };
  const take = () => {
    const told = root.querySelector(".nbddp-told"), input = root.querySelector(".nbddp-line input");
    const found = told?.textContent ? JSON.parse(told.textContent) : null;
    if (!found || found.asked !== asked || found.line !== input?.value) return;
    asked += 1; // once
    let common = found.names[0] ?? "";
    for (const name of found.names) while (!name.startsWith(common)) common = common.slice(0, -1);
    const before = word(input.value);
    if (common.startsWith(before)) input.value = input.value.slice(0, input.value.length - before.length) + common;
    offer(found.names.length > 1 ? found.names : []);
  };
  const editLine = (event, input) => {
    const plain = !(event.ctrlKey || event.altKey || event.metaKey || event.shiftKey);
    if (!plain) return false;
    if (event.key === "Enter") send(input);
    else if (event.key === "ArrowUp") recall(input, -1);
    else if (event.key === "ArrowDown") recall(input, 1);
    else if (event.key === "Tab" && word(input.value)) complete(input);
    else return false;
    return true;
  };

  // -- the curve ----------------------------------------------------------------------------------
  // What the step is where the pointer is, or where the slider of the keyboard stands: a card beside it
  let pointed = null;
  const steps = () => JSON.parse(root.querySelector(".nbddp-curve")?.dataset.steps || "[]");
  const card = Object.assign(document.createElement("div"), { className: "nbddp-step-card" });
  card.setAttribute("aria-hidden", "true"); // the slider says the same
  const tell = () => {
    const plot = root.querySelector(".nbddp-plot"), slider = plot?.querySelector("[role=slider]"), all = steps();
    if (!slider || !all.length) return card.remove();
    const from = all[0][0], to = all.at(-1)[0], focused = slider === document.activeElement;
    const at = pointed === null ? +slider.getAttribute("aria-valuenow") : from + pointed * (to - from);
    const near = (step) => all.reduce((a, b) => (Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a));
    set(slider, "aria-valuetext", near(+slider.getAttribute("aria-valuenow"))[1]);
    if (pointed === null && !focused) return card.remove();
    const [step, words] = near(at);
    if (card.textContent !== words) card.textContent = words;
    if (card.parentElement !== plot) plot.append(card);
    const share = (step - from) / (to - from || 1), room = plot.clientWidth - card.offsetWidth;
    const beside = share * plot.clientWidth + (share < 0.5 ? 10 : -10 - card.offsetWidth);
    card.style.left = `${Math.max(0, Math.min(room, beside))}px`;
  };
  const point = (event) => {
    const plot = event.type === "pointerleave" ? null : event.target.closest?.(".nbddp-plot");
    const box = plot?.getBoundingClientRect();
    pointed = box ? Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) : null;
    tell();
  };
  for (const name of ["pointermove", "pointerleave"]) root.addEventListener(name, point);
  for (const name of ["focusin", "focusout", "keyup"]) root.addEventListener(name, () => setTimeout(tell));

  // -- all keys and clicks ------------------------------------------------------------------------
  root.addEventListener("keydown", (event) => {
    const input = event.target.closest(".nbddp-line input");
    if (input ? editLine(event, input) : moveTab(event)) {
      event.preventDefault();
      event.stopPropagation();
    }
  }, true);
  root.addEventListener("click", (event) => {
    const button = event.target.closest(".nbddp-copy");
    if (!button) return;
    const field = button.parentElement.querySelector("input");
    field.select();
    const copied = () => {
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    };
    const old = () => document.execCommand("copy") && copied();
    navigator.clipboard ? navigator.clipboard.writeText(field.value).then(copied, old) : old();
  });
  root.addEventListener("pointerup", (event) => {
    event.target.closest(".nbddp-steps")?.querySelector("[role=slider]")?.focus({ preventScroll: true });
  });
  const attributeFilter = ["class", "aria-valuenow"]; // a slider that has moved takes the step's words for its number
  new MutationObserver(() => { showTabs(); take(); tell(); })
    .observe(root, { subtree: true, childList: true, characterData: true, attributes: true, attributeFilter });
  showTabs();
}
