"""A sheet as one SVG: in an <img> it is complete, and in a page its style concerns nothing else."""

from __future__ import annotations

from html import escape

from nbddp.figures.document.sheet import (
    AREAS,
    FRAME,
    GRID,
    INKS,
    KINDS,
    SERIES,
    SMALL,
    TEXT,
    WIDTHS,
    Sheet,
    dashes,
    num,
)

CLASS = "nbddp-svg"
HATCH = "nbddp-hatch"  # the id of the lines; `live.js` numbers it, for ids are the page's
CODES = (("%", "%25"), ("#", "%23"), ("\n", "%0A"), ('"', "%22"), ("<", "%3C"), (">", "%3E"), ("&", "%26"))
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans','DejaVu Sans',sans-serif"
DASHES = ("none", "6 3", "2 3", "8 3 2 3")  # of lines, so that they differ without colours


def style() -> str:
    """The rules of all drawings. A page's own `svg` is not `:root`, so the rules of widths are those of an <img>."""
    rules = [
        ("", f"color-scheme:light dark;font:{TEXT}px {FONT};overflow:visible;display:block"),
        ("text", INKS["ink"].css("fill")),
        (".muted", INKS["muted"].css("fill")),
        (".s", f"font-size:{SMALL}px"),
        (".bold", "font-weight:700"),
        (".c", "text-anchor:middle"),
        (".e", "text-anchor:end"),
        (".grid", GRID.css("fill")),
        (".rule,.tick", FRAME.css("fill")),
        (".halo", "paint-order:stroke;stroke:Canvas;stroke-width:3px;stroke-linejoin:round"),
        (".dashed", "stroke-dasharray:4 3"),
        (".hit", "fill:transparent"),
        (".now", f"{FRAME.css('fill')};fill-opacity:.35"),
        (".line", "fill:none;stroke-width:2;vector-effect:non-scaling-stroke;stroke-linejoin:round"),
        (".dot", "fill:none;stroke-width:7;stroke-linecap:round;vector-effect:non-scaling-stroke"),
        (".hatch", f"fill:url(#{HATCH});pointer-events:none"),
        (".lines", f"{INKS['muted'].css('stroke')};stroke-width:1.2"),
        (".m text", "pointer-events:none"),
        (".m:is(:hover,:focus,.pinned)>:first-child", f"{INKS['ink'].css('stroke')};stroke-width:2.5"),
        (".m", "outline:none"),
    ]
    for name, kind in KINDS.items():
        edge = f";{kind.edge.css('stroke')};stroke-width:1" if kind.edge else ""
        rules += [(f".k-{name}", kind.fill.css("fill") + edge), (f".t-{name}", kind.ink.css("fill"))]
    for i, (line, area) in enumerate(zip(SERIES, AREAS, strict=True)):
        rules += [(f".l{i},.d{i}", line.css("stroke")), (f".x{i}", f"stroke-dasharray:{DASHES[i]}")]
        rules += [(f".a{i}", area.css("fill"))]
    own = "".join(f"{_scoped(names)}{{{rule}}}" for names, rule in rules)
    return own + "".join(f"@media {q}{{svg:root {c}{{display:none}}}}" for q, c in _by_width())


def _scoped(names: str) -> str:
    """Selectors inside a drawing; the comma of an `:is()` ends none."""
    if ":is(" in names:
        return f".{CLASS} {names}"
    return ",".join(f".{CLASS} {name}".rstrip() for name in names.split(","))


def _by_width() -> list[tuple[str, str]]:
    below = [(f"(max-width:{w - 0.1:.1f}px)", f".w{w}") for w in WIDTHS]
    return [*below, *((f"(min-width:{w}px)", f".u{w}") for w in WIDTHS)]


def sheet_style() -> str:
    """The rules of widths for a drawing in the page, whose sheet is the container."""
    return "".join(f"@container nbddp-drawing {q}{{.{CLASS} {c}{{display:none}}}}" for q, c in _by_width())


def svg(sheet: Sheet) -> str:
    """The whole picture. Without a viewBox nothing of it is scaled, so text keeps its size."""
    lines = f'<pattern id="{HATCH}" width="6" height="6" patternUnits="userSpaceOnUse"><path class="lines" d="M-1 1L1 -1M0 6L6 0M5 7L7 5"/></pattern>'  # noqa: E501
    width = sheet.width or "100%"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{CLASS}" width="{width}" height="{num(sheet.height)}">'
        f"<style>{escape(style(), quote=False)}</style><defs>{lines}</defs>{''.join(sheet.body)}</svg>"
    )


def data_uri(picture: str) -> str:
    """The picture in an address; encoded where an address or an attribute needs it."""
    for raw, code in CODES:
        picture = picture.replace(raw, code)
    return f"data:image/svg+xml,{picture}"


def swatch(kind: str) -> str:
    """The picture of a legend's entry."""
    of = KINDS[kind]
    edge = f";{of.edge.css('stroke')}" if of.edge else ""
    lines = f'<path d="M0 12L5 7M5 12L10 7M10 12L15 7" style="{INKS["muted"].css("stroke")}"/>' if of.hatched else ""
    return _small(f'<rect x=".5" y=".5" width="15" height="11" style="{of.fill.css("fill")}{edge}"/>{lines}', 16)


def stroke(number: int, dot: bool = False, dashed: bool | None = None) -> str:
    """The picture of a line in a legend. dot: with a dot on it; dashed: whether it is, if its number does not say."""
    dash = DASHES[dashes(number) if dashed is None else int(dashed)]
    colour = SERIES[number % len(SERIES)]
    look = f"fill:none;stroke-width:2;{colour.css('stroke')};stroke-dasharray:{dash}"
    mark = f'<circle cx="14" cy="6" r="3.5" style="{colour.css("fill")}"/>' if dot else ""
    return _small(f'<path d="M0 6H28" style="{look}"/>{mark}', 28)


def _small(body: str, width: int) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="12" style="color-scheme:light dark">'
    return data_uri(f"{head}{body}</svg>")
