"""Several figures as one still picture, one above the other, each under a line that says what it shows."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont

from nbddp.draw.palette import MUTED, PAPER
from nbddp.draw.shown import DPI, Shown

CAPTION = 8.5  # points
GAP = 0.16  # inches above a caption, and below it


def stills(figures: Sequence[Shown], captions: Sequence[str]) -> bytes:
    """PNG of the figures from top to bottom, each under its caption."""
    font_file = Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    font = ImageFont.truetype(str(font_file), round(CAPTION * DPI / 72))
    gap, line = round(GAP * DPI), round(CAPTION * 1.4 * DPI / 72)
    pictures = [Image.open(io.BytesIO(f.png())).convert("RGB") for f in figures]
    widths = [*(p.width for p in pictures), *(round(font.getlength(c)) + 2 * gap for c in captions)]
    height = sum(p.height + line + 2 * gap for p in pictures)
    whole = Image.new("RGB", (max(widths), height), PAPER)
    pen = ImageDraw.Draw(whole)
    y = 0
    for picture, caption in zip(pictures, captions, strict=True):
        pen.text((gap // 2, y + gap), caption, font=font, fill=MUTED)
        y += line + 2 * gap
        whole.paste(picture, (0, y))
        y += picture.height
    buffer = io.BytesIO()
    whole.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
