"""Run the benchmarks whose ratios are kept, add their figures to history.jsonl, and draw all of them over time.

    python -m tests.benchmarks.history                     run all, some fifteen minutes on a quiet machine
    python -m tests.benchmarks.history launch sanitizer    run these
    python -m tests.benchmarks.history --draw              draw docs/benchmarks.png alone

A line of history.jsonl is one figure: date, commit, cores, the load before, the versions of Python and torch, the
benchmark, what was measured, its ratio to what was measured beside it, and the ratio it must stay under, if there is
one. Ratios of different machines can be compared better than their times; the figure has a colour for each machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DATA, PICTURE = HERE / "history.jsonl", ROOT / "docs" / "benchmarks.png"
RUNS = {
    "launch": ["--rounds", "3"],
    "simulated_gpus": ["--rounds", "40"],
    "sanitizer": ["--rounds", "15", "--runs", "6"],
    "hints": ["--rounds", "10", "--cells", "20"],
}
FIGURES = (  # how a line of a benchmark says a ratio; the first that fits is taken
    re.compile(r"^(?P<name>[^|:][^|]*): .*\bratio (?P<value>[\d.]+)"),
    re.compile(r"^(?P<name>[^|:]+): .* (?P<value>[\d.]+) times \(at most (?P<limit>[\d.]+)\)"),
    re.compile(r"^(?P<name>[^|:]+): .*(?:recorded|hook|sanitize [\d.]+ ms,) (?P<percent>[+-][\d.]+)%"),
)
ROW = re.compile(r"^\| (?P<name>.+?) \| .* \| [\d.]+ \| (?P<sign>[≤≥]) (?P<limit>[\d.]+) \|$")  # the limits of launch


def read(text: str) -> list[dict[str, Any]]:
    """The figures in what a benchmark printed."""
    found: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        if row := ROW.match(line):
            if row["name"] in found:
                found[row["name"]]["at least" if row["sign"] == "≥" else "at most"] = float(row["limit"])
            continue
        match = next(filter(None, (figure.match(line) for figure in FIGURES)), None)
        if match is None:
            continue
        parts = match.groupdict()
        ratio = float(parts["value"]) if parts.get("value") else 1 + float(parts["percent"]) / 100
        found[parts["name"]] = {"measured": parts["name"], "ratio": round(ratio, 4)}
        if parts.get("limit"):
            found[parts["name"]]["at most"] = float(parts["limit"])
    return list(found.values())


def run(name: str) -> list[dict[str, Any]]:
    """The figures of one benchmark, each with when and where it was measured."""
    facts = {
        "date": f"{datetime.date.today()}",
        "commit": subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": version("torch"),
        "benchmark": name,
    }
    print(f"== {name}, load {facts['load']}", flush=True)
    words = [sys.executable, "-u", str(HERE / f"{name}.py"), *RUNS[name]]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, flush=True)
    figures = [facts | figure for figure in read(done.stdout)]
    if not figures:
        raise SystemExit(f"{name}.py ended with status {done.returncode} and printed no ratio")
    return figures


def draw(figures: list[dict[str, Any]]) -> None:
    """One small plot for each thing measured: its ratio by date, and the line that it must not cross."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.figure import Figure

    names = list(dict.fromkeys((f["benchmark"], f["measured"]) for f in figures))
    machines = list(dict.fromkeys(machine(f) for f in figures))
    columns = 3
    rows = -(-len(names) // columns)
    picture = Figure(figsize=(11, 2.1 * rows), layout="constrained")
    for axes, (benchmark, measured) in zip(picture.subplots(rows, columns, squeeze=False).flat, names, strict=False):
        mine = [f for f in figures if (f["benchmark"], f["measured"]) == (benchmark, measured)]
        for colour, name in enumerate(machines):
            dots = [(datetime.date.fromisoformat(f["date"]), f["ratio"]) for f in mine if machine(f) == name]
            if dots:
                axes.plot(*zip(*dots, strict=True), "o", color=f"C{colour}", markersize=4)
        for bound in ("at most", "at least"):
            if bound in mine[-1]:
                axes.axhline(mine[-1][bound], color="C3", linewidth=1)
                axes.annotate(bound, (0, mine[-1][bound]), xycoords=("axes fraction", "data"), fontsize=7, color="C3")
        axes.set_title(f"{benchmark}: {measured}", fontsize=7, wrap=True)
        axes.xaxis.set_major_locator(locator := AutoDateLocator(maxticks=4))
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
        axes.tick_params(labelsize=7)
        axes.set_ylim(bottom=0)
    for axes in picture.axes[len(names) :]:
        axes.remove()
    picture.supylabel("ratio to what was measured beside it", fontsize=8)
    picture.savefig(PICTURE, dpi=110)


def machine(figure: dict[str, Any]) -> str:
    return f"{figure['cores']} cores, Python {figure['python']}, torch {figure['torch']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", nargs="*", help=", ".join(RUNS))
    parser.add_argument("--draw", action="store_true", help="draw what is kept, and run nothing")
    asked = parser.parse_args()
    if strange := [name for name in asked.benchmark if name not in RUNS]:
        parser.error(f"there is no benchmark {strange[0]!r} here; type one of {', '.join(RUNS)}")
    for name in [] if asked.draw else asked.benchmark or RUNS:
        with open(DATA, "a", encoding="utf-8") as kept:
            kept.writelines(json.dumps(figure, ensure_ascii=False) + "\n" for figure in run(name))
    if not DATA.exists():
        parser.error("no benchmark has been kept yet: run without --draw")
    draw([json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()])


if __name__ == "__main__":
    main()
