"""What a real GPU answered beside what simulated ones did: `python -m tests.gpu.compare REAL.json SIMULATED.json`.

Prints a table of the groups and of the trainings; `--list GROUP` prints each difference of a group.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Said = dict[str, Any]
CHANGING = (  # what differs from one run to the next, also on one GPU
    (r"\n?Exception raised from .*", ""),
    (r"0x[0-9a-f]+", "0x?"),
    (r"(?<=process )\s*\d+|(?<=Process )\d+|(?<=pid[ =])\d+", "?"),
    (r"/\S*/(site|dist)-packages/", ""),
    (r"\[rank\d+\]:?", ""),
    (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22,}", "UUID"),
    (r"(?<=of which )[\d.]+ [KMG]iB", "?"),
    (r"(?<=this process has )[\d.]+ [KMG]iB", "?"),
    (r"/tmp/\S+", "FILE"),
    (r"127\.0\.0\.1:\d+|localhost:\d+", "HOST"),
    (r"line \d+", "line ?"),
    (r"registered at \S+", "registered"),
    (r" +\n", "\n"),
    (r"(?<=both on CUDA device )\w+", "?"),  # its place on the PCI bus
    (r"\{'cpu', 'cuda'\}", "{'cuda', 'cpu'}"),  # a set
    (r"(?<='master_port': ')\d+", "?"),
    (r"(?<='address': )\d+", "?"),
    (r"\('([\w.]+)', (\d+)\)", r"'\1': \2"),  # an OrderedDict before Python 3.12, and since
    (r"OrderedDict\(\[", "OrderedDict({"),
    (r"(?<=\d)\]\)$", "})"),
)


LEFT_OUT = ("frames", "seconds", "seconds of steps", "program", "stats")  # of a case that is kept as a fact
OF_ONE_MACHINE = ("get_env_info", "uuid", "__config__", "nvml_device")  # questions whose answer says nothing of GPUs


def keep(record: Path, to: Path) -> None:
    """Writes the part of a record that tests compare with, compressed."""
    whole = json.loads(record.read_text())
    for group, cases in whole["answers"].items():
        for name, said in list(cases.items()):
            if any(word in name for word in OF_ONE_MACHINE):
                del cases[name]
            cut = {what: value for what, value in said.items() if what not in LEFT_OUT and value != ""}
            cases[name] = {what: shortened(value) for what, value in cut.items()} if name in cases else {}
        whole["answers"][group] = {name: said for name, said in cases.items() if said}
    to.write_bytes(gzip.compress(json.dumps(whole, separators=(",", ":")).encode(), 9, mtime=0))


def shortened(value: Any) -> Any:
    """Texts without what names a machine, and not longer than is compared."""
    if isinstance(value, list):
        return [shortened(one) for one in value]
    if not isinstance(value, str):
        return value
    return re.sub(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22,}", "UUID", value)[:1500]


def read(path: Path) -> dict[str, dict[str, Said]]:
    """The answers of a record, by group and case."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found: dict[str, dict[str, Said]] = json.loads(raw)["answers"]
    return found


def words(said: Said) -> str:
    """What a case said, without what changes from run to run."""
    if "ended" in said:
        return "the process ended"
    text = (
        f"{said['type']}: {shortened(said['message'])}" if "message" in said else shortened(str(said.get("answer", "")))
    )
    for pattern, instead in CHANGING:
        text = re.sub(pattern, instead, text, flags=re.S)
    return text.strip()


@dataclass(frozen=True)
class Pair:
    """One case, there and here."""

    group: str
    name: str
    real: Said
    simulated: Said

    @property
    def equal(self) -> bool:
        """Whether both said the same."""
        return words(self.real) == words(self.simulated)


def pairs(real: dict[str, dict[str, Said]], simulated: dict[str, dict[str, Said]]) -> Iterator[Pair]:
    """The cases that both were asked."""
    for group, cases in real.items():
        for name, said in cases.items():
            if name in simulated.get(group, {}):
                yield Pair(group, name, said, simulated[group][name])


def groups(found: list[Pair]) -> str:
    """A table: group, cases, how many are equal."""
    rows = ["| group | cases | equal |", "|---|---|---|"]
    for group in dict.fromkeys(p.group for p in found):
        mine = [p for p in found if p.group == group]
        if group not in ("sequences", "operators", "trainings", "programs"):
            rows.append(f"| {group} | {len(mine)} | {sum(p.equal for p in mine)} |")
    return "\n".join(rows)


def trainings(found: list[Pair]) -> str:
    """A table: model, steps that both ran, peaks there and here, how far off."""
    rows = ["| training | steps | peak allocated, MiB | simulated | off | peak reserved, MiB | simulated | off |"]
    rows.append("|---|---|---|---|---|---|---|---|")
    for p in found:
        if p.group == "trainings" and "notes" in p.real and "notes" in p.simulated:
            there, here = {row[0]: row for row in p.real["notes"]}, {row[0]: row for row in p.simulated["notes"]}
            last = [name for name in there if name in here][-1]
            cells = [p.name, str(int(last.split()[1]) + 1)]
            for at in (3, 4):
                a, b = there[last][at], here[last][at]
                cells += [f"{a / 2**20:,.0f}", f"{b / 2**20:,.0f}", f"{100 * (b / a - 1):+.1f} %"]
            rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def differences(found: list[Pair], group: str) -> str:
    """Each difference of a group: the program and both answers."""
    lines = []
    for p in found:
        if p.group == group and group in ("sequences", "operators"):
            lines += list(numbers(p))
        elif p.group == group and not p.equal:
            lines.append(f"{p.name}  [{p.real.get('program', '')}]")
            lines += [f"  real {words(p.real)}", f"  here {words(p.simulated)}"]
    return "\n".join(lines)


def numbers(p: Pair) -> Iterator[str]:
    """The rows of counters that differ."""
    key = "rows" if p.group == "sequences" else "turns"
    if key not in p.real or key not in p.simulated:
        yield f"{p.name}: real {words(p.real)[:300]} here {words(p.simulated)[:300]}"
        return
    for there, here in zip(p.real[key], p.simulated[key], strict=False):
        cut = 1 if key == "rows" else 0
        last = -1 if key == "rows" else None
        if there[cut:last] != here[cut:last]:
            yield f"{p.name}: {there[0] if cut else ''}\n  real {there[cut:]}\n  here {here[cut:]}"


def main() -> None:
    """Prints the tables, or the differences of some groups."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("real", type=Path)
    parser.add_argument("simulated", type=Path, nargs="+")
    parser.add_argument("--list", nargs="*", default=[], help="groups whose differences are printed")
    parser.add_argument("--keep", type=Path, help="writes what tests need of the real record there")
    a = parser.parse_args()
    if a.keep:
        keep(a.real, a.keep)
    real = read(a.real)
    found = [p for record in a.simulated for p in pairs(real, read(record))]
    if not a.list:
        print(groups(found), trainings(found), sep="\n\n")
    for group in a.list:
        print(differences(found, group))


if __name__ == "__main__":
    main()
