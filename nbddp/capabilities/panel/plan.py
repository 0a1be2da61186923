"""The panel's launch controls: values → a layout, or a refusal with the control that causes it.

The controls have no language of their own. Their values become a `%%ddp` line, which `launch.options` reads like a
typed one, and `Topology.plan` places the workers. So the panel refuses what the line refuses. Pure.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from nbddp.analysis.placement import planned
from nbddp.capabilities.export.torchrun_line import Launch, torchrun_line
from nbddp.capabilities.hosts.names import hosts_of
from nbddp.errors import BadInput
from nbddp.launch import options
from nbddp.launch.machine import Device, Node
from nbddp.launch.options import LaunchSpec
from nbddp.launch.topology import Topology

SCRIPT = "train.py"  # a panel plans for cells; torchrun wants a file
EMPTIED = {"simulate_gpus": "0"}  # a line without the option keeps what the pool has → what is typed for none
REAL = "the torchrun line is for real GPUs: torchrun simulates none"
Place = Callable[[LaunchSpec, Sequence[Node]], Sequence[Node]]  # machines that there are → those that a plan is for


def as_they_are(spec: LaunchSpec, nodes: Sequence[Node]) -> Sequence[Node]:
    """The machines that there are."""
    return nodes


@dataclass(frozen=True)
class PanelPlan:
    """The values of the launch controls. `hang_after` and `timeout` are as typed, in seconds; an empty `timeout` means
    none, as an empty `hosts` means this machine. `simulate_gpus` is as typed too, such as `4` or `4xA100-80GB`; empty
    means none."""

    nproc: int = 2
    nnodes: int = 1
    hosts: str = ""
    gpus_per_proc: int = 1
    device: str = "auto"
    simulate_gpus: str = ""
    visible: str = "all"
    oversubscribe: bool = False
    hang_after: str = "5"
    timeout: str = ""
    max_restarts: int = 0

    def pool_words(self, gpus: bool = True) -> list[str]:
        """Options of `%ddp start`. gpus: whether GPUs may be used, so that their options say something."""
        place = "hosts" if self.hosts.strip() else "nnodes"
        names = [place, "device", "simulate_gpus", "gpus_per_proc", *["visible"] * gpus, "oversubscribe"]
        return options.typed("nproc", self.nproc) + self._words(names)

    def run_words(self) -> list[str]:
        """Options of a cell alone."""
        return self._words(OF_CELLS)

    def _words(self, names: Sequence[str]) -> list[str]:
        values = {name: getattr(self, name) for name in names}
        values |= {name: value.strip() for name, value in values.items() if isinstance(value, str)}
        return [word for n, value in values.items() if value != getattr(DEFAULT, n) for word in options.typed(n, value)]

    def cell_line(self, gpus: bool = True) -> str:
        """The `%%ddp` line that asks for the same."""
        return shlex.join(["%%ddp", *self.pool_words(gpus), *self.run_words()])

    def spec(self) -> LaunchSpec:
        """For a pool; what a standing pool has otherwise is changed. Raises BadInput."""
        emptied = [name for name in EMPTIED if name in options.known() and not getattr(self, name).strip()]
        spec = self._parsed([word for name in emptied for word in options.typed(name, EMPTIED[name])])
        nnodes = None if self.hosts.strip() else self.nnodes
        return replace(spec, nnodes=nnodes, device=self.device, visible=self.visible)

    def asked(self) -> LaunchSpec:
        """What its line asks for. Raises BadInput."""
        return self._parsed([])

    def _parsed(self, more: Sequence[str]) -> LaunchSpec:
        return options.parse_cell(shlex.join([*self.pool_words(), *self.run_words(), *more]))


DEFAULT = PanelPlan()
CONTROLS = tuple(f.name for f in fields(PanelPlan))
OF_CELLS = ("hang_after", "timeout", "max_restarts")  # what a pool knows nothing of


@dataclass(frozen=True)
class Considered:
    """What comes of a plan: `topology`, or why there is none (`refusal`) and which control causes it (`culprit`).

    `cell` and `torchrun` are lines to copy, empty where there is no layout. `note`: what is not known yet.
    """

    topology: Topology | None = None
    refusal: str = ""
    culprit: str = ""
    cell: str = ""
    torchrun: str = ""
    note: str = ""

    def of_torchrun(self) -> str:
        """What is to be said of torchrun's line, or empty."""
        return REAL if self.topology is not None and self.topology.simulates_gpus else ""


def considered(plan: PanelPlan, machine: Sequence[Node], moved: str = "", place: Place = as_they_are) -> Considered:
    """What comes of a plan on these machines; on none as long as nobody knows them.

    moved: the control that was moved last. It is the culprit of an impossible plan, if its default would make the plan
    possible; else the first control of which that is true.
    """
    if not machine:
        return Considered(note="checking this machine's devices …")
    try:
        topology = layout(plan, machine, place)
    except BadInput as e:
        return Considered(refusal=str(e).removeprefix("%%ddp "), culprit=_culprit(plan, machine, moved, place))
    gpus = any(w.devices for w in topology.workers)
    named = bool(plan.hosts.strip()) and not _are(machine, plan)
    note = "the hosts' GPUs are counted when they are connected" if named and not gpus else ""
    return Considered(topology, cell=plan.cell_line(gpus), torchrun=_torchrun(plan, topology), note=note)


def layout(plan: PanelPlan, machine: Sequence[Node], place: Place = as_they_are) -> Topology:
    """Who is where. Raises BadInput with what to type where that is impossible."""
    spec = plan.asked()
    nodes = place(spec, _nodes(plan, machine))
    return _placed(plan, spec, nodes, len(nodes) if plan.hosts.strip() else plan.nnodes)


def _placed(plan: PanelPlan, spec: LaunchSpec, nodes: Sequence[Node], nnodes: int) -> Topology:
    return Topology.plan(
        nodes,
        nproc=spec.nproc,
        nnodes=nnodes,
        gpus_per_proc=spec.gpus_per_proc,
        oversubscribe=spec.oversubscribe,
        device=plan.device,
    )


def on_paper(plan: PanelPlan, place: Place = as_they_are) -> Topology | None:
    """The layout of a plan whose machine is not known yet; None where it is impossible."""
    try:
        spec = plan.asked()
        paper = planned(nnodes=plan.nnodes, nproc=spec.nproc)
        nodes = place(spec, paper.nodes)
        return _placed(plan, spec, nodes, len(nodes)) if any(node.devices for node in nodes) else paper
    except BadInput:
        return None


def _nodes(plan: PanelPlan, machine: Sequence[Node]) -> Sequence[Node]:
    """The machines that a plan is for: those that are there, or hosts of which only the names are known. Of those as
    many GPUs are taken for there as the plan needs, if it says that there are any."""
    if not plan.hosts.strip():
        return machine[:1]
    if _are(machine, plan):
        return machine
    insists = plan.device == "cuda" or plan.gpus_per_proc > 1
    gpus = plan.nproc * plan.gpus_per_proc if insists else 0
    devices = tuple(Device(i, str(i)) for i in range(gpus))
    return [Node(i, host.name, devices) for i, host in enumerate(hosts_of(plan.hosts))]


def _are(machine: Sequence[Node], plan: PanelPlan) -> bool:
    """Whether these machines are the hosts that a plan names."""
    return [node.host for node in machine] == [host.name for host in hosts_of(plan.hosts)]


def _torchrun(plan: PanelPlan, topology: Topology) -> str:
    launch = Launch(
        script=SCRIPT, nnodes=topology.nnodes, nproc=topology.nproc_per_node, gpus_per_proc=topology.gpus_per_proc,
        max_restarts=plan.max_restarts,
    )  # fmt: skip
    if plan.hosts.strip():
        launch = replace(launch, host=topology.nodes[0].host)
    return torchrun_line(launch)


def _culprit(plan: PanelPlan, machine: Sequence[Node], moved: str, place: Place) -> str:
    for name in (*([moved] if moved else []), *(n for n in CONTROLS if n != moved)):
        if _is_possible(replace(plan, **{name: getattr(DEFAULT, name)}), machine, place):
            return name
    return moved or CONTROLS[0]


def _is_possible(plan: PanelPlan, machine: Sequence[Node], place: Place) -> bool:
    try:
        layout(plan, machine, place)
    except BadInput:
        return False
    return True


def plan_of(spec: LaunchSpec, topology: Topology | None) -> PanelPlan:
    """The controls' values for a pool, standing or described by its arguments."""
    nproc = topology.nproc_per_node if topology is not None else spec.nproc
    found: dict[str, Any] = {
        "nproc": nproc if isinstance(nproc, int) else None,
        "nnodes": topology.nnodes if topology is not None else spec.nnodes,
        "hosts": spec.hosts, "gpus_per_proc": spec.gpus_per_proc, "device": spec.device, "visible": spec.visible,
        "simulate_gpus": getattr(spec, "simulate_gpus", None),
    }  # fmt: skip
    return replace(PanelPlan(oversubscribe=spec.oversubscribe), **{k: v for k, v in found.items() if v})
