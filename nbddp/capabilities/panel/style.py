"""How a panel looks, as CSS: the front end's own colours (of VS Code where JupyterLab's are missing), one type scale
(its size, and 0.85 of it for what is secondary), a grid of 8 px, digits of equal width, places of fixed height. Pure.
"""

from __future__ import annotations

STYLE = """<style>
.nbddp-panel {
  --ink: var(--jp-ui-font-color1, var(--vscode-editor-foreground, #1a1a1a));
  --muted: var(--jp-ui-font-color1, var(--vscode-editor-foreground, #595959));
  --paper: var(--jp-layout-color1, var(--vscode-editor-background, #ffffff));
  --frame: var(--jp-layout-color2, var(--vscode-editorWidget-background, #f4f4f4));
  --edge: var(--jp-border-color1, var(--vscode-panel-border, #b0b0b0));
  --brand: var(--jp-brand-color1, var(--vscode-focusBorder, #33608c));
  --code: var(--jp-code-font-family, var(--vscode-editor-font-family, monospace));
  --jp-widgets-font-size: var(--jp-ui-font-size1, 13px);
  color: var(--ink); font-size: var(--jp-ui-font-size1, 13px); line-height: 1.4; overflow: visible;
  font-variant-numeric: tabular-nums; padding: 8px 0;
}
.nbddp-panel .widget-html, .nbddp-panel .widget-html-content { height: auto; line-height: 1.4; color: var(--ink) }
.nbddp-panel .widget-html-content { font-size: inherit; min-width: 0 }
.nbddp-panel small { font-size: 0.85em; color: var(--muted) }
.nbddp-panel b, .nbddp-panel th { font-weight: 600 }
.nbddp-panel .refused { border-left: 3px solid currentColor; padding-left: 8px; margin: 0 0 8px }
.nbddp-panel .nodes, .nbddp-panel .ranks { display: flex; flex-wrap: wrap; gap: 8px; margin-top: 8px }
.nbddp-panel .node { border: 1px solid var(--edge); background: var(--frame); border-radius: 4px; padding: 8px }
.nbddp-panel .rank { border: 1px solid var(--edge); background: var(--paper); border-radius: 4px; padding: 4px 8px }
.nbddp-panel .rank { min-width: 5em; line-height: 1.3 }
.nbddp-panel .line { display: flex; flex-wrap: wrap; gap: 4px 8px; align-items: center; margin-top: 8px }
.nbddp-panel .line label { flex: 0 0 5em }
.nbddp-panel .line input {
  flex: 1 1 32em; min-width: 0; font-family: var(--code); font-size: inherit; color: var(--ink);
  background: var(--frame); border: 1px solid var(--edge); border-radius: 4px; padding: 4px 8px;
}
.nbddp-panel pre {
  white-space: pre-wrap; overflow-wrap: anywhere; word-break: normal; margin: 4px 0; font-size: inherit;
  line-height: 1.4; color: var(--ink); font-family: var(--code);
}
.nbddp-panel ol.stages { display: flex; flex-wrap: wrap; gap: 0 16px; list-style: none; padding: 0; margin: 0 }
.nbddp-panel table.strip { width: 100%; table-layout: fixed; border-collapse: collapse; margin: 0; font-size: inherit }
.nbddp-panel .strip th, .nbddp-panel .strip td {
  text-align: left; height: 24px; padding: 0 8px 0 0; white-space: nowrap; overflow: hidden; text-overflow: ellipsis;
  border-bottom: 1px solid var(--edge); color: var(--ink); background: none;
}
.nbddp-panel .strip th:nth-child(1) { width: 3.5em }
.nbddp-panel .strip th:nth-child(2) { width: 7em }
.nbddp-panel .strip thead th:nth-child(n+4), .nbddp-panel .strip .number { width: 5.5em; text-align: right }
.nbddp-panel .strip.gpus thead th:nth-child(7) { width: 9em }
.nbddp-panel .strip tr.slowest td, .nbddp-panel .strip tr.slowest th { background: var(--frame) }
.nbddp-panel .outputs { display: grid; grid-template-columns: repeat(auto-fit, minmax(15em, 1fr)); gap: 8px }
.nbddp-panel .outputs > * { border: 1px solid var(--edge); border-radius: 4px; padding: 4px 8px; min-width: 0 }
.nbddp-panel .outputs .head { white-space: nowrap; overflow: hidden; text-overflow: ellipsis }
.nbddp-panel .outputs .scrolls { height: 14em; overflow: auto; flex-direction: column-reverse; overflow-anchor: auto }
.nbddp-panel .outputs .scrolls > * { flex: 0 0 auto }
.nbddp-panel mark { background: none; color: inherit; font-weight: 600; text-decoration: underline }
.nbddp-panel .moving { margin: 0 0 8px; overflow: auto }
.nbddp-panel table.bars { border-collapse: collapse; margin: 0; font-family: var(--code); font-size: inherit }
.nbddp-panel .bars th, .nbddp-panel .bars td { text-align: left; padding: 0 8px 0 0; white-space: pre }
.nbddp-panel .bars th, .nbddp-panel .bars td, .nbddp-panel .bars tr { background: none; border: none }
.nbddp-panel svg.curves { width: 100%; max-width: 800px; height: auto; display: block }
.nbddp-panel .curves path, .nbddp-panel .curves polyline { fill: none; stroke: var(--edge) }
.nbddp-panel .curves polyline { stroke: var(--ink); stroke-width: 1.5 }
.nbddp-panel .curves .exposed { stroke: var(--brand); stroke-dasharray: 4 3 }
.nbddp-panel .curves text { fill: var(--ink); font-size: 11px }
.nbddp-panel .nbddp-plot { display: grid; width: 100%; max-width: 800px; min-width: 0 }
.nbddp-panel .nbddp-plot > * { grid-area: 1 / 1; width: auto; margin: 0 }
.nbddp-panel .nbddp-steps { z-index: 1; height: 87.5%; margin-left: 8.75% }
.nbddp-panel .nbddp-steps .slider-container, .nbddp-panel .nbddp-steps .slider { height: 100%; margin: 0 }
.nbddp-panel .nbddp-steps .noUi-target {
  height: 100%; background: none; border: none; box-shadow: none; cursor: crosshair;
}
.nbddp-panel .nbddp-steps :is(.noUi-base, .noUi-connects, .noUi-connect) { background: none !important }
.nbddp-panel .nbddp-steps .noUi-handle {
  width: 2px; height: 100%; top: 0; right: -1px; border: none; border-radius: 0; box-shadow: none; margin: 0;
  background: var(--brand); transform: none;
}
.nbddp-panel .since { padding: 4px 0 }
.nbddp-panel .notice { min-height: 1.4em }
.nbddp-panel :focus-visible { outline: 2px solid var(--brand); outline-offset: 1px }
</style>"""
