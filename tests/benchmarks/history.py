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
import textwrap
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
    """One small plot for each thing measured: its ratio at each commit, and the line that it must not cross."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys((f["benchmark"], f["measured"]) for f in figures))
    machines = list(dict.fromkeys(machine(f) for f in figures))
    columns = 3
    rows = -(-len(names) // columns)
    picture = Figure(figsize=(11, 2.1 * rows), layout="constrained")
    for axes, (benchmark, measured) in zip(picture.subplots(rows, columns, squeeze=False).flat, names, strict=False):
        mine = [f for f in figures if (f["benchmark"], f["measured"]) == (benchmark, measured)]
        runs = list(dict.fromkeys((f["date"], f["commit"]) for f in mine))
        for colour, name in enumerate(machines):
            dots = [(runs.index((f["date"], f["commit"])), f["ratio"]) for f in mine if machine(f) == name]
            if dots:
                axes.plot(*zip(*dots, strict=True), "o", color=f"C{colour}", markersize=4)
        bounds = {bound: mine[-1][bound] for bound in ("at most", "at least") if bound in mine[-1]}
        for bound, at in bounds.items():
            axes.axhline(at, color="C3", linewidth=1)
            axes.annotate(f"{bound} {at:g}", (0.01, at), (0, 2), ("axes fraction", "data"), "offset points", fontsize=7)
        axes.set_title("\n".join(textwrap.wrap(f"{benchmark}: {measured}", 48)), fontsize=7)
        axes.set_xticks(range(len(runs)), [f"{date[5:]}\n{commit[:8]}" for date, commit in runs])
        axes.set_xlim(-0.5, len(runs) - 0.5)
        axes.tick_params(labelsize=7)
        axes.set_ylim(0, 1.25 * max(*bounds.values(), *(f["ratio"] for f in mine), 0))
    for axes in picture.axes[len(names) :]:
        axes.remove()
    picture.suptitle("Ratio to what was measured beside it, by date and commit; " + "; ".join(machines), fontsize=9)
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
