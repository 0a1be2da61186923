"""Several figures as one still picture, one above the other, each under a line that says what it shows."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont

from nbddp.figures.figure import DPI, DescribedFigure
from nbddp.figures.palette import MUTED, PAPER

CAPTION = 8.5  # points
RULE = "#d0d0d0"  # between one still and the next
MARGIN = 0.12  # inches, as around a picture


def stills(figures: Sequence[DescribedFigure], captions: Sequence[str]) -> bytes:
    """PNG of the figures from top to bottom, each under its caption."""
    font_file = Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    font = ImageFont.truetype(str(font_file), round(CAPTION * DPI / 72))
    margin, line = round(MARGIN * DPI), round(CAPTION * 1.4 * DPI / 72)
    pictures = [Image.open(io.BytesIO(f.png())).convert("RGB") for f in figures]
    widths = [*(p.width for p in pictures), *(round(font.getlength(c)) + 2 * margin for c in captions)]
    height = sum(p.height + line + margin for p in pictures)
    whole = Image.new("RGB", (max(widths), height), PAPER)
    pen = ImageDraw.Draw(whole)
    y = 0
    for picture, caption in zip(pictures, captions, strict=True):
        if y:
            pen.line((margin, y, whole.width - margin, y), fill=RULE, width=2)
        pen.text((margin, y + margin), caption, font=font, fill=MUTED)
        y += line + margin
        whole.paste(picture, (0, y))
        y += picture.height
    buffer = io.BytesIO()
    whole.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
