"""Pictures of every output in JupyterLab, Notebook 7 and a terminal, light and dark: `python -m tests.looks`.

One notebook has a cell for each kind of output. It is run in each front end, and each cell is looked at when it has
ended, some also while they run. What is seen is compared with the structure that is kept in tests/looks/kept (its
elements and words, without what changes from run to run), and the contrast of every text is computed.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

from tests.looks import front_ends, terminal
from tests.looks.outputs import NAMES, OUTPUTS, Output, chosen
from tests.looks.structure import Seen, kept

FRONT_ENDS = (*front_ends.FRONT_ENDS, "terminal")
COLOURS = 256
DOCS = Path(__file__).parents[2] / "docs"
CELLS, REPORTS = ("folded", "differs", "warnings", "bar-live"), ("error", "deadlock", "stop", "breakpoint-live")
# docs/gallery.md has these; of real runs the figures alone, too
GALLERY = {
    "lab-light": (*CELLS, *REPORTS, "status", "panel", "bench-live", "check", "checked"),
    "lab-dark": ("error", "timings", "timeline", "explorer"),
    "notebook-light": ("memory",),
    "terminal-dark": ("folded", "error", "timings"),
}
FIGURES = ("timings", "bench", "memory")


class Keeper:
    """Writes pictures, and compares what was seen. `found`: a line for each thing that is not as it should be."""

    def __init__(self, front: str, folder: Path | None, keep: bool = False, gallery: bool = False):
        self.front, self.folder, self.keep, self.gallery = front, folder, keep, gallery
        self.found: list[str] = []
        self.least = 21.0

    def look(self, theme: str, name: str, png: bytes, seen: Seen) -> None:
        for folder in self._folders(theme, name):
            folder.mkdir(parents=True, exist_ok=True)
            picture = Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS)
            picture.save(folder / f"{name}-{self.front}-{theme}.png", optimize=True)
        if self.gallery and seen.figure and name in FIGURES and (self.front, theme) == ("lab", "light"):
            (DOCS / f"{name}.png").write_bytes(seen.figure)
        where = f"{name} in {self.front}, {theme}"
        self.least = min(self.least, seen.least())
        self.found += [f"{where}: contrast {line}" for line in seen.too_faint()]
        self._compare(where, name, seen)

    def _folders(self, theme: str, name: str) -> list[Path]:
        shown = self.gallery and name in GALLERY.get(f"{self.front}-{theme}", ())
        return [*([self.folder] if self.folder is not None else []), *([DOCS / "looks"] if shown else [])]

    def _compare(self, where: str, name: str, seen: Seen) -> None:
        output = next((o for o in OUTPUTS if o.name == name), None)
        if output is None or output.loose:  # while a cell runs there is more or less of it
            return
        path, now = kept(self.front, name), seen.description(output.measured)
        if self.keep:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(now, encoding="utf-8")
        elif not path.exists():
            self.found.append(f"{where}: nothing is kept; --keep keeps it")
        elif path.read_text(encoding="utf-8") != now:
            self.found.append(f"{where}: differs from {path}:\n{now}")


def look_at(
    front: str,
    outputs: list[Output],
    themes: list[str],
    keeper: Keeper,
    *,
    python: str = sys.executable,
    scale: float = 2,
) -> None:
    """Run the outputs in a front end and give all that is seen to the keeper."""

    def say(text: str) -> None:
        print(f"{front}: {text}", file=sys.stderr, flush=True)

    def missed(line: str) -> None:
        keeper.found.append(f"{front}: {line}")

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as base:
        if front != "terminal":
            with front_ends.opened(front, outputs, Path(base), python=python, scale=scale) as page:
                front_ends.run(page, themes, keeper.look, say, missed)
            return
        shell = terminal.Terminal(Path(base))
        try:
            with terminal.painter(scale) as paint:
                terminal.run(shell, outputs, lambda name, said: paint(name, said, keeper.look, themes), say, missed)
        finally:
            shell.close()


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.looks", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("outputs", nargs="*", metavar="OUTPUT", help=f"which; by default all: {', '.join(NAMES)}")
    parser.add_argument("--front-end", "-f", action="append", choices=FRONT_ENDS, help="may be repeated; default: all")
    parser.add_argument("--theme", "-t", action="append", choices=[*front_ends.THEMES], help="default: both")
    parser.add_argument("--out", "-o", type=Path, default=Path("looks"), help="folder of the pictures; default: looks")
    parser.add_argument("--keep", action="store_true", help="keep the structures that are seen, for later comparison")
    parser.add_argument("--gallery", action="store_true", help="draw the pictures of docs/gallery.md anew, too")
    parser.add_argument("--scale", type=float, default=2.0, help="pixels of a picture to one of the page's; default: 2")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has Notebook 7")
    asked = parser.parse_args(words)
    unknown = set(asked.outputs) - set(NAMES)
    if unknown:
        parser.error(f"there is no output {min(unknown)}; the outputs are {', '.join(NAMES)}")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as runtime:  # of pools; tests have one of pytest's
        os.environ.setdefault("NBDDP_RUNTIME_DIR", runtime)
        return look_everywhere(asked)


def look_everywhere(asked: argparse.Namespace) -> int:
    found: list[str] = []
    for front in asked.front_end or FRONT_ENDS:
        if front == "notebook" and asked.python == sys.executable and find_spec("notebook") is None:
            print("notebook: left out; pip install 'notebook>=7', or --python PATH of an interpreter that has it")
            continue
        keeper = Keeper(front, asked.out, asked.keep, asked.gallery)
        outputs = list(chosen(asked.outputs or NAMES))
        python = asked.python if front == "notebook" else sys.executable
        look_at(front, outputs, asked.theme or [*front_ends.THEMES], keeper, python=python, scale=asked.scale)
        print(f"{front}: {len(outputs)} cells; the least contrast of a text is {keeper.least:.2f}:1")
        found += keeper.found
    print(*found, sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
