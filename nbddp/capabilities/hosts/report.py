"""The report of `%ddp doctor` on a pool's hosts: facts of each → tables, and findings with their repair. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from nbddp.capabilities.hosts.reachability import ADVICE, NO_ROUTE, Endpoint, Tried, joined
from nbddp.compat.extra.versions import CUDA, DRIVER, NONE, differing
from nbddp.errors import counted
from nbddp.figures.table import Table

LEAST_SHM = 1 << 30  # bytes; a container has 64 MiB by default
LEAST_FILES, LEAST_TASKS = 4096, 4096
MOST_SKEW = 0.5  # seconds
UNLIMITED = -1
NAMES = ("nbddp", "Python", "torch", "ipyparallel", CUDA, DRIVER)
OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}  # CUDA's release notes, "minor version compatibility"

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class HostReport:
    """A host. facts: as `capabilities.hosts.facts` has them; gpus: names of its GPUs; offer: where others reach it;
    skew: how many seconds its clock is ahead of the notebook's machine, give or take `within`."""

    facts: Facts
    gpus: Sequence[str] = ()
    untold: Sequence[str] = ()
    offer: Endpoint = field(default_factory=lambda: Endpoint("", ""))
    skew: float = 0.0
    within: float = 0.0


@dataclass(frozen=True)
class HostsReport:
    """The hosts by name. offered, tried: the addresses of each, and whether others reach them
    (`capabilities.hosts.reachability`); home: host → why it does not reach the notebook's machine, or empty."""

    hosts: Mapping[str, HostReport]
    offered: Sequence[Sequence[Endpoint]] = ()
    tried: Tried = field(default_factory=dict)
    home: Mapping[str, str] = field(default_factory=dict)

    def tables(self) -> list[Table]:
        """Versions, and the rest."""
        versions = [[name, *(one.facts["versions"].get(n, NONE) for n in NAMES)] for name, one in self.hosts.items()]
        return [Table(["host", *NAMES], versions), Table(COLUMNS, [self._row(i) for i in range(len(self.hosts))])]

    def _row(self, i: int) -> list[str]:
        name, one = list(self.hosts.items())[i]
        limits = one.facts["limits"]
        return [
            name, gpus_words(one.gpus), p2p_words(one), f"{one.offer.interface} {one.offer.address}".strip(),
            self._reached(i), amount(one.facts["shm"][1]) if one.facts["shm"] else "none",
            bound(limits["nofile"][0]), bound(limits["nproc"][0]), memory(limits["memlock"][0]), clock(one),
        ]  # fmt: skip

    def unreached(self, i: int) -> list[str]:
        """The hosts that do not reach host number i."""
        address = list(self.hosts.values())[i].offer.address
        return [who for j, who in enumerate(self.hosts) if j != i and self.tried.get((j, i, address), "")]

    def _reached(self, i: int) -> str:
        lost = self.unreached(i)
        return f"not {', '.join(lost)}" if lost else "all" if len(self.hosts) > 1 else "–"

    def findings(self) -> list[str]:
        """A sentence for each thing that is not as it should be, and what to do."""
        found = differing({name: one.facts["versions"] for name, one in self.hosts.items()}, NAMES)
        found = [f"{line}; install the same version on all" for line in found]
        kinds = {gpus_words(one.gpus) for one in self.hosts.values()}
        if len(kinds) > 1:
            said = "; ".join(f"{gpus_words(one.gpus)} on {name}" for name, one in self.hosts.items())
            found.append(f"the hosts have different GPUs: {said}; in each step DDP waits for the slowest")
        for name, one in self.hosts.items():
            found += [f"{name}{words}" for rule in RULES for words in rule(one)]
        return found + list(self._ways())

    def _ways(self) -> Iterator[str]:
        names, checked = list(self.hosts), list(self.hosts.values())
        for i, one in enumerate(checked):
            for j, who in enumerate(names):
                why = self.tried.get((j, i, one.offer.address), "") if i != j else ""
                if why:
                    where = f"{one.offer.address} ({one.offer.interface})"
                    yield f"{who} cannot reach {names[i]} at {where}: {why}; {ADVICE.get(why, NO_ROUTE)}"
        for who, why in self.home.items():
            if why:
                yield f"{who} cannot reach the notebook's machine: {why}; allow TCP connections from {who} there"
        faster = self._faster()
        if faster is not None:
            yield (
                f"{faster.interface} also connects all hosts and is faster ({speed(faster)}, "
                f"{checked[0].offer.interface} "
                f"{speed(checked[0].offer)}); %ddp stop, then start with --interface {faster.interface}"
            )

    def _faster(self) -> Endpoint | None:
        """An interface of all hosts that joins them, and is faster than the one in use, as far as that is known."""
        if not self.offered or len(self.hosts) < 2:
            return None
        now = min(one.offer.speed for one in self.hosts.values())
        for offer in self.offered[0]:
            same = [next((o for o in own if o.interface == offer.interface), None) for own in self.offered]
            found = [o for o in same if o is not None]
            better = len(found) == len(same) and 0 < now < min(o.speed for o in found)
            if better and all(joined(i, o, len(same), self.tried) for i, o in enumerate(found)):
                return offer
        return None

    def __repr__(self) -> str:
        return "\n".join([*(f"{table!r}\n" for table in self.tables()), *self._words()])

    def _repr_html_(self) -> str:
        words = "".join(f"<div>{escape(line)}</div>" for line in self._words())
        return "".join(table._repr_html_() for table in self.tables()) + words

    def _words(self) -> list[str]:
        found = self.findings()
        count = counted(len(self.hosts), "host")
        return [f"{count}: {counted(len(found), 'finding')}", *found] if found else [f"{count}: nothing to improve"]


# -- rules of one host: what follows its name ---------------------------------------------------------


def cuda(one: HostReport) -> Iterator[str]:
    has, driver = one.facts["versions"].get(CUDA, ""), one.facts["versions"].get(DRIVER, "")
    if driver and not has:
        yield " has NVIDIA's driver, but its torch was built without CUDA; install torch with CUDA (pytorch.org)"
    oldest = OLDEST_DRIVER.get(int(has.split(".")[0])) if has else None
    if oldest and driver and tuple(int(part) for part in driver.split(".")[:2]) < oldest:
        yield (
            f"'s driver {driver} is too old for torch's CUDA {has}, which needs {oldest[0]}.{oldest[1]} or newer; "
            "update the driver, or install a torch built for an older CUDA"
        )
    yield from (f": {words}" for words in one.untold)


def peers(one: HostReport) -> Iterator[str]:
    rows = one.facts["p2p"]
    for i, j, why in rows[:3]:
        yield (
            f": GPUs {i} and {j} cannot read each other's memory ({why}), so NCCL copies through host memory; this is "
            "usual in virtual machines and with the IOMMU on; nvidia-smi topo -p2p r shows all pairs"
        )
    if len(rows) > 3:
        yield f": {counted(len(rows) - 3, 'more pair')} of GPUs cannot either"
    if one.facts["p2p_untold"]:
        yield f": NVML does not report which GPUs can read each other's memory ({one.facts['p2p_untold']})"


def shm(one: HostReport) -> Iterator[str]:
    found = one.facts["shm"]
    if found and found[1] < LEAST_SHM:
        full = found[0] >= LEAST_SHM
        advice = "Remove leftover files (ls -lt /dev/shm)" if full else "Use docker run --shm-size=8g or --ipc=host"
        yield (
            f" has {amount(found[1])} of {amount(found[0])} free in /dev/shm; data loaders and NCCL use it, and are "
            f"killed by SIGBUS when it is full. {advice}"
        )


def limits(one: HostReport) -> Iterator[str]:
    for name, least, letter, lost in (
        ("nofile", LEAST_FILES, "n", "data loaders and gloo fail with 'Too many open files'"),
        ("nproc", LEAST_TASKS, "u", "threads cannot be started"),
    ):
        now, most = one.facts["limits"][name]
        if now == UNLIMITED or now >= least or (name == "nproc" and one.facts["root"]):  # root is not bound by it
            continue
        enough = most == UNLIMITED or most >= least
        how = (
            f"Start with --setup 'ulimit -{letter} {least}'"
            if enough
            else f"Ask its administrator to raise {name} in limits.conf"
        )
        yield f" allows {now} (ulimit -{letter}); with fewer than {least} {lost}. {how}"
    locked = one.facts["limits"]["memlock"][0]
    if one.facts["infiniband"] and locked != UNLIMITED:
        yield (
            f" has InfiniBand but allows only {amount(locked)} of locked memory (ulimit -l); NCCL needs unlimited. "
            "Ask its administrator to raise memlock in limits.conf"
        )


def skew(one: HostReport) -> Iterator[str]:
    if abs(one.skew) - one.within > MOST_SKEW:
        way = "ahead of" if one.skew > 0 else "behind"
        yield (
            f"'s clock is {abs(one.skew):.1f} s {way} the notebook's machine; times in logs and of files cannot be "
            "compared. Run chrony or systemd-timesyncd there (nbddp aligns its own timelines)"
        )


def own_name(one: HostReport) -> Iterator[str]:
    name, found = one.facts["name"], one.facts["name_at"]
    looped = bool(found) and all(a.startswith("127.") or a == "::1" for a in found)
    if not looped and found:
        return
    what = f"resolves to {found[0]}, which no other host can reach" if looped else "does not resolve there"
    yield (
        f": its own name {name} {what}. The pool's ranks use MASTER_ADDR and are not affected, but a program that "
        f"sends this name to other hosts is. Add {one.offer.address or 'its address'} {name} to /etc/hosts there"
    )


RULES: tuple[Callable[[HostReport], Iterator[str]], ...] = (cuda, peers, shm, limits, skew, own_name)
COLUMNS = ("host", "GPUs", "P2P", "interface", "reached by", "/dev/shm", "nofile", "nproc", "memlock", "clock")


# -- words ----------------------------------------------------------------------------------------------


def gpus_words(gpus: Sequence[str]) -> str:
    """`4 NVIDIA H100`, `none`."""
    kinds = dict.fromkeys(gpus)
    return ", ".join(f"{[*gpus].count(kind)} {kind}".strip() for kind in kinds) or NONE


def p2p_words(one: HostReport) -> str:
    if len(one.gpus) < 2:
        return "–"
    return "unknown" if one.facts["p2p_untold"] else f"not {len(one.facts['p2p'])}" if one.facts["p2p"] else "all pairs"


def bound(value: int) -> str:
    return "no limit" if value == UNLIMITED else str(value)


def memory(value: int) -> str:
    return "no limit" if value == UNLIMITED else amount(value)


def amount(count: float) -> str:
    """Bytes by powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def clock(one: HostReport) -> str:
    """`+0.002 s`."""
    return f"{one.skew:+.3f} s"


def speed(offer: Endpoint) -> str:
    return f"{offer.speed / 1000:g} Gbit/s"
