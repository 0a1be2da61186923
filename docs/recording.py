"""Records the first minute: cells are typed and run in JupyterLab, and the pictures become docs/first-minute.gif.

`python -m docs.recording` from the checkout's root; it needs what tests of the browser need.
"""

from __future__ import annotations

import io
import tempfile
import time
from pathlib import Path

from PIL import Image

from tests.looks.front_ends import Page, opened
from tests.looks.outputs import Output

PLACE = Path(__file__).with_name("first-minute.gif")
SIZE = {"width": 900, "height": 620}
MOST = 3_000_000  # bytes
TYPED, SEEN, READ = 90, 250, 3500  # milliseconds: a piece of code, a picture while a cell runs, a result
PIECE = 4  # characters of code in a picture
HELLO = """%%ddp --nproc 4
import torch, torch.distributed as dist
dist.init_process_group()
t = torch.ones(1) * dist.get_rank()
dist.all_reduce(t)
t"""
FAILS = """%%ddp
if dist.get_rank() == 2:
    raise ValueError("bad batch")
dist.all_reduce(t)"""
HANGS = """%%ddp --hang-after 2
dist.init_process_group()
if dist.get_rank() != 2:
    dist.barrier()"""
CELLS = [Output(f"cell {n}", code) for n, code in enumerate(("%load_ext nbddp", HELLO, FAILS, HANGS, "%ddp topology"))]
WRITE = "([number, text]) => jupyterapp.shell.currentWidget.content.widgets[number].model.sharedModel.setSource(text)"
BARE = """() => {
    const style = document.createElement("style");
    style.textContent = ".jp-Notebook-footer, .jp-cell-toolbar {display: none !important}";
    document.head.append(style);
}"""


class Film:
    """Pictures, and how long each is seen in milliseconds."""

    def __init__(self, page: Page):
        self.page, self.pictures, self.times = page, list[Image.Image](), list[int]()

    def take(self, shown: int) -> None:
        """A picture; one that is equal to the last makes that longer."""
        picture = Image.open(io.BytesIO(self.page.page.locator(".jp-NotebookPanel").screenshot())).convert("RGB")
        if self.pictures and picture.tobytes() == self.pictures[-1].tobytes():
            self.times[-1] += shown
        else:
            self.pictures.append(picture)
            self.times.append(shown)

    def save(self, place: Path) -> None:
        few = [picture.quantize(64, dither=Image.Dither.NONE) for picture in self.pictures]
        few[0].save(place, save_all=True, append_images=few[1:], duration=self.times, loop=0, optimize=True)


def record(page: Page, film: Film) -> None:
    page.page.set_viewport_size(SIZE)
    page.page.evaluate(BARE)
    for number in range(len(CELLS)):
        page.page.evaluate(WRITE, [number, ""])
    for number, cell in enumerate(CELLS):
        shown = page.select(number)
        for end in range(PIECE, len(cell.code) + PIECE, PIECE):
            page.page.evaluate(WRITE, [number, cell.code[:end]])
            _to_the_end(shown)
            film.take(TYPED)
        running = page.begin(number)
        prompt = running.locator(".jp-InputPrompt")
        while "*" in prompt.inner_text():
            _to_the_end(running)
            film.take(SEEN)
            time.sleep(SEEN / 1000)
        page.page.wait_for_timeout(400)
        _to_the_end(shown)
        film.take(READ)


def _to_the_end(cell: object) -> None:
    cell.evaluate("cell => cell.scrollIntoView({block: 'end'})")  # type: ignore[attr-defined]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, opened("lab", CELLS, Path(folder, "lab"), scale=1) as page:
        film = Film(page)
        record(page, film)
        film.save(PLACE)
    size = PLACE.stat().st_size
    print(f"{PLACE}: {len(film.pictures)} pictures, {sum(film.times) / 1000:.0f} s, {size / 1e6:.1f} MB")
    if size > MOST:
        raise SystemExit(f"it has more than {MOST / 1e6:.0f} MB; show less")


if __name__ == "__main__":
    main()
