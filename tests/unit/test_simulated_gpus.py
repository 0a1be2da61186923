"""`--simulate-gpus`: what is typed, which GPUs a process sees, and what is said of errors. No process, no torch."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from nbddp import capabilities
from nbddp.analysis.placement import describe
from nbddp.capabilities.export.command import carry_out
from nbddp.capabilities.hosts.elastic import Members, NodePlace
from nbddp.capabilities.hosts.names import Host
from nbddp.capabilities.hosts.remote_nodes import RemoteNodes
from nbddp.capabilities.simulated_gpus import on_worker, options, probe
from nbddp.capabilities.simulated_gpus.advice import without_gpus
from nbddp.capabilities.simulated_gpus.cards import CARDS, MOST, cards_of, link_matrix, typed, visible, words
from nbddp.capabilities.simulated_gpus.on_worker import Placed
from nbddp.capabilities.simulated_gpus.part import COUNTED, TIMED, SimulatedGpusPart
from nbddp.capabilities.topology.figure import draw_topology
from nbddp.compat.extra.versions import versions
from nbddp.errors import BadInput, Cause, Frame, Raised
from nbddp.figures.figure import _captioned
from nbddp.figures.html import Spot
from nbddp.launch import torchrun_env
from nbddp.launch.machine import Device, Node
from nbddp.launch.options import LaunchSpec, merged, parse_cell
from nbddp.launch.topology import Topology
from nbddp.notebook.commands import parse_command
from nbddp.notebook.history import CellHistory
from nbddp.pool.change import RankLayout, plan_change
from nbddp.pool.pool import WorkerPool

MODELS = {"4": ("4xT4", "Tesla T4"), "8xH100": ("8xH100", "NVIDIA H100 80GB HBM3"),
          "4xA100-80GB": ("4xA100-80GB", "NVIDIA A100-SXM4-80GB"), "2xv100": ("2xV100-16GB", "Tesla V100-SXM2-16GB"),
          "1xRTX 4090": ("1xRTX-4090", "NVIDIA GeForce RTX 4090")}  # fmt: skip


@pytest.mark.parametrize("text", MODELS)
def test_a_model_is_read(text: str) -> None:
    form, name = MODELS[text]
    cards = cards_of(text)
    assert (typed(cards), cards[0].name) == (form, name)
    assert cards_of(form) == cards
    assert len(cards) == int(text[0])


WRONG = {"0": "a node has 1 to 16", "99": "not 99", "99999999": "not 99999999", "4xB200": "no GPU 'B200' is known",
         "4xA100-80": "did you mean A100-80GB?", "x": "does not name simulated GPUs", "-1": "does not name",
         "4x": "does not name", "²": "does not name", "H100": "does not name"}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_what_is_none_says_what_to_type(text: str) -> None:
    with pytest.raises(BadInput) as refused:
        cards_of(text)
    said = str(refused.value)
    assert WRONG[text] in said
    assert f"write it as 4 or 4xT4, with one of {', '.join(CARDS)}" in said


def test_every_model_is_offered_by_tab_and_has_an_own_name() -> None:
    (option,) = [o for row in capabilities.ROWS for o in row.options if o.name == "simulate_gpus"]
    assert {cards_of(text)[0] for text in option.offers} == set(CARDS.values())
    assert len({card.name for card in CARDS.values()}) == len(CARDS)
    assert all(words(cards_of(typed([card]))) for card in CARDS.values())


def test_the_words() -> None:
    said = "computed on the CPU; times are not a GPU's"
    assert words(cards_of("4")) == f"4 simulated GPUs (T4, 16 GB; {said})"
    assert words(cards_of("1xA100-80GB")) == f"1 simulated GPU (A100, 80 GB; {said})"


@pytest.mark.parametrize("text", ["8xV100", "8xH100", "8xT4", "16xA10G"])
def test_links_are_the_same_both_ways(text: str) -> None:
    links = link_matrix(cards_of(text))
    assert [*zip(*links, strict=True)] == [tuple(row) for row in links]
    assert all((code == "X") == (a == b) for a, row in enumerate(links) for b, code in enumerate(row))


def test_a_v100_has_six_nvlinks() -> None:
    for row in link_matrix(cards_of("8xV100")):
        assert sum(int(code[2:]) for code in row if code.startswith("NV")) == 6


@pytest.mark.parametrize(
    ("listed", "sees"),
    [(None, (0, 1, 2, 3)), ("2,0", (2, 0)), ("", ()), ("1,9,2", (1,)), ("1,1", ()), ("GPU-7", ()), (" 3 ", (3,))],
)
def test_cuda_visible_devices_selects(listed: str | None, sees: tuple[int, ...]) -> None:
    assert visible(cards_of("4"), listed).visible == sees
    assert len(visible(cards_of("4"), listed).seen) == len(sees)


# -- the option ------------------------------------------------------------------------------------


def test_every_line_takes_it() -> None:
    assert parse_cell("--simulate-gpus 4").simulate_gpus == "4xT4"
    for line in (
        "start --simulate-gpus 2xH100",
        "run --simulate-gpus 2xH100 t.py",
        "torchrun --simulate-gpus 2xH100 t.py",
        "torchrun --nproc-per-node 2 --simulate-gpus=2xH100 t.py --simulate-gpus 9",
    ):
        assert parse_command(line).launch.simulate_gpus == "2xH100", line
    assert WorkerPool(simulate_gpus=4).spec.simulate_gpus == "4xT4"
    with pytest.raises(BadInput, match=r"%%ddp --simulate-gpus: '4xB200'"):
        parse_cell("--simulate-gpus 4xB200")
    with pytest.raises(BadInput, match="simulate_gpus: 'x'"):
        WorkerPool(simulate_gpus="x")


def test_a_line_keeps_changes_and_takes_away() -> None:
    pool = merged(parse_cell("--simulate-gpus 4"), None)
    assert merged(parse_cell("--nproc 2"), pool).simulate_gpus == "4xT4"
    assert merged(parse_cell("--simulate-gpus 2xL4"), pool).simulate_gpus == "2xL4"
    assert merged(parse_cell("--simulate-gpus 0"), pool).simulate_gpus is None
    assert options.given(None) is None


# -- the plan --------------------------------------------------------------------------------------


def planned(line: str, host: Node | None = None, **more: object) -> Topology:
    spec = parse_cell(line)
    (node,) = SimulatedGpusPart(None).machines(spec, [host or Node(0, "here", cores=2)])  # type: ignore[arg-type]
    return Topology.plan([node], nproc=spec.nproc, nnodes=spec.nnodes or 1, gpus_per_proc=spec.gpus_per_proc)


def test_each_node_has_its_own() -> None:
    placed = planned("--nproc 2 --nnodes 2 --gpus-per-proc 2 --simulate-gpus 4")
    assert [[d.index for d in w.devices] for w in placed.workers] == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert placed.simulates_gpus
    assert "each owns 2 simulated GPUs" in placed.equation()
    assert [len(node.devices) for node in placed.nodes] == [4, 4]


def test_a_rank_that_changes_nodes_is_replaced() -> None:
    """It would go on to count its memory with those of the node that it was on."""
    one = planned("--simulate-gpus 2 --nproc 2")
    shared = Topology.plan(one.nodes, nproc=2, nnodes=1, gpus_per_proc=2, oversubscribe=True)
    apart = Topology.plan(one.nodes, nproc=1, nnodes=2, gpus_per_proc=2)
    assert shared.workers[1].device_words() == apart.workers[1].device_words() == "simulated GPUs 0, 1"
    living = {0: True, 1: True}
    change = plan_change(RankLayout(apart, "all"), RankLayout(shared, "all"), living)
    assert change.end == change.start == (1,)
    assert plan_change(RankLayout(apart, "all"), RankLayout(apart, "all"), living).end == ()


def test_masks_list_them_and_never_the_parents() -> None:
    placed = planned("--simulate-gpus 4 --nproc 2")
    masks = [torchrun_env.visible_devices(w, placed.nodes[0], "all") for w in placed.workers]
    assert masks == ["0,1,2,3"] * 2
    assert [torchrun_env.visible_devices(w, placed.nodes[0], "own") for w in placed.workers] == ["0", "1"]


def test_real_gpus_are_set_aside() -> None:
    real = Node(0, "here", (Device(0, "GPU-9", "NVIDIA H200"),), links=(), untold=("of NVML",))
    placed = planned("--simulate-gpus 2", real)
    assert [d.name for d in placed.nodes[0].devices] == ["Tesla T4"] * 2
    assert "of NVML" not in describe(placed)
    assert "the GPUs are simulated" in describe(placed)
    assert SimulatedGpusPart(None).machines(LaunchSpec(), [real]) == [real]  # type: ignore[arg-type]


def test_too_few_are_refused_as_real_ones_are() -> None:
    with pytest.raises(BadInput, match="need 4 GPUs, but there are 2; use --nproc 2"):
        planned("--nproc 4 --simulate-gpus 2")


# -- what is said of errors ------------------------------------------------------------------------

HERE = planned("--nproc 4")
LINE = "No CUDA GPU is visible here; with --simulate-gpus 4 the program runs on simulated GPUs, computed on the CPU."


def cause(kind: str, message: str, line: str = "x = y", function: str = "") -> Cause:
    frames = [Frame("Cell In[1]", 3, "<module>", True, ((3, line),))]
    frames += [Frame("/torch/x.py", 1, function, False)] if function else []
    return Cause(0, 0, "raised", (Raised(kind, message, tuple(frames)),))


NO_CUDA = [
    cause("AssertionError", "Torch not compiled with CUDA enabled"),
    cause("RuntimeError", "Cannot access accelerator device when none is available."),
    cause("RuntimeError", "Distributed package doesn't have NCCL built in"),
    cause("AttributeError", "module 'torch._C' has no attribute '_cuda_setDevice'"),
    cause("RuntimeError", "Found no NVIDIA driver on your system. Please check …"),
    cause("RuntimeError", "No CUDA GPUs are available"),
    cause("TypeError", "device() received … - got (NoneType), but …", function="get_default_backend_for_device"),
    cause("IndexError", "list index out of range", "model = Net().cuda(device_ids[0])"),
]
OTHERS = [
    cause("RuntimeError", "CUDA out of memory. Tried to allocate 2.00 GiB"),
    cause("ValueError", "Torch not compiled with CUDA enabled"),
    cause("RuntimeError", "my own: No CUDA GPUs are available"),
    cause("AttributeError", "module 'torch._C' has no attribute 'cuda'"),
    cause("TypeError", "f() got (NoneType)", function="f"),
    cause("IndexError", "list index out of range", "x = batch[9]"),
    cause("IndexError", "list index out of range", "model.cuda(0)", function="_apply"),
]


@pytest.mark.parametrize("failed", NO_CUDA, ids=lambda c: c.chain[0].message[:30])
def test_a_program_without_a_gpu_is_told_the_option(failed: Cause) -> None:
    assert without_gpus(failed, HERE) == LINE
    (advice,) = [row.advice for row in capabilities.ROWS if row.advice is not None]
    assert re.search(advice.said, failed.chain[-1].message), "only then it is asked"


@pytest.mark.parametrize("failed", OTHERS, ids=lambda c: f"{c.chain[0].type} {c.chain[0].message[:20]}")
def test_no_other_error_names_it(failed: Cause) -> None:
    assert without_gpus(failed, HERE) == ""


def test_where_there_is_a_gpu_it_is_not_named() -> None:
    gpus = planned("--nproc 4 --simulate-gpus 4")
    untold = replace(HERE, nodes=(replace(HERE.nodes[0], untold=("NVML does not list the GPUs: …",)),))
    many = planned("--nproc 17")  # no node can have so many
    for placed in (gpus, untold, replace(HERE, hides_gpus=True), many):
        assert without_gpus(NO_CUDA[0], placed) == ""


MIXED = "Expected all tensors to be on the same device, but found at least two devices, cuda:1 and cpu!"
NET, X, Y = Placed("net", "cuda:1", 8, True), Placed("x", "cpu", 9), Placed("y", "cuda:1")


def test_operands_on_several_devices_are_named() -> None:
    said = "the parameters of net (made in line 8) are on cuda:1 and x (made in line 9) is on cpu"
    assert on_worker.explain(Raised("RuntimeError", MIXED), [[], [NET, X], [X, Y]], 4, 1) == said
    assert on_worker.explain(Raised("RuntimeError", MIXED), [[NET, Y], [X]], 4, 1) == ""
    assert on_worker.explain(Raised("RuntimeError", "bad"), [[NET, X]], 4, 1) == ""


LEFT_OUT = {"y = net(x)": " net(x)", "a, b = c = f(a)": " f(a)", "x[i] = y": "x[i] = y", "x += y": "x += y",
            "f(x=y)": "f(x=y)", "x == y": "x == y", "if x == y:": "if x == y:", "y = x == z": " x == z"}  # fmt: skip


@pytest.mark.parametrize("line", LEFT_OUT)
def test_what_a_line_assigns_is_no_operand_of_it(line: str) -> None:
    assert on_worker.BOUND.sub("", line) == LEFT_OUT[line]


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Raised("AcceleratorError", "CUDA error: invalid device ordinal\nGPU device may be out of range")
    assert on_worker.explain(wrong, [], 2, 0) == "this process sees 2 GPUs, cuda:0 to cuda:1"
    assert on_worker.explain(wrong, [], 1, 0) == "this process sees one GPU, cuda:0"
    shared = Raised("DistBackendError", "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert "its LOCAL_RANK is 1" in on_worker.explain(shared, [], 2, 0)
    assert on_worker.explain(shared, [], 2, 1) == on_worker.explain(shared, [], 1, 0) == ""
    since = Raised(
        "DistBackendError", "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1"
    )
    assert on_worker.explain(since, [], 2, 0) == on_worker.explain(shared, [], 2, 0)
    assert MOST == 16


LACKS = {
    "No module named 'triton'": "simulated GPUs refuse them, with Triton installed too",
    "Cannot find a working triton installation.": "Triton's kernels run on a GPU only",
    "0 active drivers ([]). There should only be one.": "Triton's kernels run on a GPU only",
    "CUDA error: CUDA driver version is insufficient for CUDA runtime version": "asked for NVIDIA's driver itself",
    "aoti_torch_get_current_cuda_stream(device_index, &stream_ptr) API call failed": "asked for NVIDIA's driver itself",
    "Could not find any NVRTC library": "asked for NVIDIA's driver itself",
}


@pytest.mark.parametrize("said", LACKS)
def test_an_error_of_what_no_simulated_gpu_has_says_so(said: str) -> None:
    assert LACKS[said] in on_worker.explain(Raised("RuntimeError", said), [], 2, 0)
    assert on_worker.explain(Raised("RuntimeError", "No module named 'apex'"), [], 2, 0) == ""


# -- what was measured, and what is exported -------------------------------------------------------


def pool_of(line: str, placed: Topology | None, added: tuple[object, ...] = ()) -> SimulatedGpusPart:
    group = SimpleNamespace(can_respawn=True, added=added, topology=placed)
    return SimulatedGpusPart(SimpleNamespace(group=group, spec=parse_cell(line)))  # type: ignore[arg-type]


def test_a_figure_of_times_says_so_below() -> None:
    assert pool_of("--nproc 4", HERE).figure_notes("timings") == ""
    part = pool_of("--simulate-gpus 4", planned("--simulate-gpus 4"))
    assert part.figure_notes("timings") == part.figure_notes("bench") == TIMED
    assert part.figure_notes("memory") == COUNTED
    assert part.figure_notes("topology") == ""  # it is drawn as such


def test_a_line_below_a_figure_moves_no_area() -> None:
    plain, said = draw_topology(HERE), draw_topology(HERE)
    said.caption(f"{TIMED} {TIMED} {TIMED}")
    before, after = (int.from_bytes(f.png()[20:24], "big") for f in (plain, said))
    assert after > before + 20
    assert repr(said).splitlines()[-1].startswith(TIMED)
    spot = Spot(0.1, 0.5, 0.2, 0.4, "words")
    _, (moved,) = _captioned(plain.png(), [spot], TIMED)
    low, high = (round(v * after_height(plain.png())) for v in (moved.top, moved.top + moved.height))
    assert (low, high) == (round(0.5 * before), round(0.9 * before))


def after_height(png: bytes) -> int:
    """The height of a picture once TIMED is below it, in pixels."""
    return int.from_bytes(_captioned(png, [], TIMED)[0][20:24], "big")


def test_an_exported_script_is_for_real_gpus(tmp_path: Path) -> None:
    cells = [{"cell_type": "code", "source": "%%ddp --simulate-gpus 2\nx = 1\n", "metadata": {}, "outputs": []}]
    notebook = tmp_path / "a.ipynb"
    notebook.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}))
    first = notebook.read_text()
    for line, say in (
        ("%%ddp --simulate-gpus 2", True),
        ("%%ddp --nproc 2", False),
        ("%%ddp --simulate-gpus 0", False),
    ):
        notebook.write_text(first.replace("%%ddp --simulate-gpus 2", line))
        asked = parse_command(f"export {tmp_path}/t.py --notebook {notebook} --force")
        printed = carry_out(asked.args, None, CellHistory())  # type: ignore[arg-type]
        sentence = "Its cells ran on simulated GPUs; the script is for real ones, and simulates none."
        assert (sentence in printed) is say
        assert (sentence in (tmp_path / "t.py").read_text()) is say


def test_a_host_with_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def host(torch: str) -> SimpleNamespace:
        return SimpleNamespace(name="nodeb", agent=SimpleNamespace(hello=SimpleNamespace(versions={"torch": torch})))

    monkeypatch.setattr(probe, "unusable", lambda: None)
    spec, placed = parse_cell("--simulate-gpus 4"), planned("--simulate-gpus 4 --nproc 2")
    said = [words(cards_of("4"))]
    assert pool_of("", None, (host(versions()["torch"]),)).planned(spec, placed) == said
    with pytest.raises(BadInput, match=r"nodeb has 1\.13\.0, which has not been tested"):
        pool_of("", None, (host("1.13.0"),)).planned(spec, placed)


def test_a_host_that_would_join_later_is_turned_away_with_another_torch() -> None:
    part = pool_of("--simulate-gpus 4", None)
    assert part.turned_away(versions()) == ""
    assert "it has 1.13.0, which has not been tested" in part.turned_away({"torch": "1.13.0"})
    assert pool_of("", None).turned_away({"torch": "1.13.0"}) == ""
    stopped, asked = [], iter((part, part, pool_of("", None)))

    def agent(place: NodePlace) -> SimpleNamespace:
        return SimpleNamespace(
            host=place.host, hello=SimpleNamespace(versions={"torch": "1.13.0"}), warm=True, closed=False,
            stop=lambda: stopped.append(place.host.name),
        )  # fmt: skip

    parts = SimpleNamespace(turned_away=[lambda there: next(asked).turned_away(there)])
    nodes = RemoteNodes(SimpleNamespace(group=SimpleNamespace(added=[]), parts=parts))  # type: ignore[arg-type]
    places = [NodePlace(Host(name), None) for name in ("nodea", "nodeb", "nodec")]  # type: ignore[arg-type]
    nodes.members = Members(1, 3, 3, places, agent)  # type: ignore[arg-type]
    assert [one.host.name for one in nodes._ready()] == ["nodec"]
    assert stopped == ["nodea", "nodeb"]
    assert {name: why[-26:] for name, why in nodes.members.why.items()} == dict.fromkeys(
        ("nodea", "nodeb"), f"install torch {versions()['torch']} there"[-26:]
    )


def test_a_refusal_is_repeated_and_a_success_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, placed = parse_cell("--simulate-gpus 4"), planned("--simulate-gpus 4 --nproc 2")
    part = pool_of("", None)
    for why in ("torch is another", "torch is another"):
        monkeypatch.setattr(probe, "unusable", lambda: why)  # noqa: B023
        with pytest.raises(BadInput, match=why):
            part.planned(spec, placed)
    assert pool_of("--simulate-gpus 4", placed).planned(spec, placed) == []
    with pytest.raises(BadInput, match=why):  # workers have them too where --device cpu hides them
        part.planned(spec, HERE)
    monkeypatch.setattr(probe, "unusable", lambda: None)
    assert part.planned(spec, HERE) == ["--device cpu hides the simulated GPUs from every process"]
    assert pool_of("--simulate-gpus 4", HERE).planned(spec, HERE) == []
    assert part.planned(LaunchSpec(), HERE) == []
    attached = pool_of("", None)
    vars(vars(attached)["_pool"].group)["can_respawn"] = False
    with pytest.raises(BadInput, match="remove --cluster"):
        attached.planned(spec, placed)
