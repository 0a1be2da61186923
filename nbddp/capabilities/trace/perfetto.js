// Adds a button to each written trace of the page. It opens Perfetto in a tab of its own and gives it the file's bytes:
// they go from this page to that one, within the browser.
(() => {
  "use strict";
  const VIEWER = "https://ui.perfetto.dev";
  const PATIENCE = 30; // seconds for the viewer to load

  function answers(viewer) {
    return new Promise((resolve, reject) => {
      const asks = setInterval(() => viewer.postMessage("PING", VIEWER), 100);
      const ends = setTimeout(() => end(reject, new Error("it does not answer; it needs a network")), 1000 * PATIENCE);
      const hear = (e) => { if (e.source === viewer && e.origin === VIEWER && e.data === "PONG") end(resolve); };
      const end = (then, what) => {
        clearInterval(asks);
        clearTimeout(ends);
        removeEventListener("message", hear);
        then(what);
      };
      addEventListener("message", hear);
    });
  }

  async function show(link, say) {
    const viewer = window.open(VIEWER); // first of all: after a wait the browser would take it for an advertisement
    if (!viewer) return say("The browser has blocked the new tab.");
    try {
      say("Reading the file …");
      const answer = await fetch(link.href);
      if (!answer.ok) throw new Error(`the file is not where this page looks for it (${answer.status})`);
      const buffer = await answer.arrayBuffer(), title = link.textContent;
      say("Waiting for Perfetto …");
      await answers(viewer);
      viewer.postMessage({ perfetto: { buffer, title, fileName: title.split("/").pop() } }, VIEWER);
      say("Perfetto has the file.");
    } catch (failure) {
      say(`Not opened: ${failure.message}. Download the file, and open it there.`);
    }
  }

  for (const at of document.querySelectorAll(".nbddp-trace:not([data-live])")) {
    at.dataset.live = "1";
    const go = document.createElement("button"), said = document.createElement("span");
    Object.assign(go, { type: "button", textContent: "Open in Perfetto" });
    said.setAttribute("role", "status");
    go.addEventListener("click", () => show(at.querySelector("a[download]"), (words) => { said.textContent = ` ${words}`; }));
    at.append(document.createElement("br"), go, said);
  }
})();
