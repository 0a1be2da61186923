"""The panel while a cell runs: what the strip says of each rank, and buttons that act meanwhile."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import zmq
from jupyter_client.session import Session

from nbddp.capabilities.panel.pump import Pump
from nbddp.compat.extra import ipykernel as ipykernel_extra
from nbddp.execution.supervise import Events
from tests.kernels import Kernel, loaded
from tests.notebook.test_panel import asked, until

LEAST_OF_A_CORE = 0.01


# -- what comes on the shell channel while a cell runs ---------------------------------------------


class Channel:
    """In the place of a kernel's: what was said, and what was left for later."""

    def __init__(self) -> None:
        self.session, self.reply, self.cell = Session(key=b"key"), None, {}
        self.stream = SimpleNamespace(flush=lambda flag: None)
        self.said, self.left, self.handled = list[str](), list[Any](), list[str]()
        self.shell_handlers = {"comm_msg": lambda stream, idents, message: self.handled.append(message["msg_id"])}

    def say(self, status: str, parent: Any) -> None:
        self.said.append(status)

    def later(self, loop: Any, raw: list[Any]) -> None:
        self.left.append(raw)


def test_what_cannot_be_read_is_left_to_ipykernel_and_the_cell_goes_on() -> None:
    channel = Channel()
    hears = Pump.__new__(Pump)
    hears.shell = hears.kernel = channel
    hears.loop = None
    stranger = Session(key=b"another")
    click, later = (Session(key=b"key").msg(kind) for kind in ("comm_msg", "execute_request"))
    bad = [
        [b"junk"], [b"<IDS|MSG>"], [b"<IDS|MSG>", b"signature", b"{not json", b"{}", b"{}", b"{}"],
        [b"<IDS|MSG>", b"", b"[]", b"{}", b"{}", b"{}"], stranger.serialize(stranger.msg("comm_msg")),
    ]  # fmt: skip
    for raw in [*bad, channel.session.serialize(later), channel.session.serialize(click)]:
        hears._handle([zmq.Message(part) for part in raw])
    assert len(channel.left) == len(bad) + 1
    assert channel.handled == [click["msg_id"]]
    assert channel.said == ["busy", "idle", "busy"]


def test_a_click_that_ipykernel_6_has_read_with_the_cell_is_not_left_until_it_has_ended() -> None:
    click, cell = [b"click"], [b"next cell"]
    kernel = SimpleNamespace(msg_queue=queue.Queue(), dispatch_shell=lambda raw: None)
    entries = [(1, print, ()), (2, kernel.dispatch_shell, (click,)), (3, str, ()), (4, kernel.dispatch_shell, (cell,))]
    for entry in entries:
        kernel.msg_queue.put(entry)
    shell = ipykernel_extra.Shell.__new__(ipykernel_extra.Shell)
    shell.kernel, shell.threaded = kernel, False
    assert shell.taken() == [click, cell]
    assert list(kernel.msg_queue.queue) == [entries[0], entries[2]], "what is none of the channel's keeps its order"
    shell.threaded = True
    assert shell.taken() == []


def test_messages_that_no_wait_has_handled_go_back() -> None:
    channel = Channel()
    hears = Pump.__new__(Pump)
    hears.shell = hears.kernel = channel
    hears.loop, hears._early = None, [[b"click"]]
    hears.close()
    assert channel.left == [[b"click"]]


# -- a queue that hears something beside -------------------------------------------------------------


class Counting:
    """Hears nothing, and counts how often it was woken."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self, descriptor: int, seconds: float | None) -> None:
        import select

        self.waits += 1
        select.select([descriptor], [], [], seconds)

    def close(self) -> None:
        self.waits = -1


def test_a_run_that_hears_something_beside_wakes_for_its_own_events() -> None:
    import threading

    events, beside = Events(), Counting()
    events.hear(beside)
    events.put(("a", 0, None))
    assert events.get(timeout=5) == ("a", 0, None)
    assert beside.waits == 0
    threading.Timer(0.05, events.put, [("b", 1, None)]).start()
    began = time.monotonic()
    assert events.get(timeout=30) == ("b", 1, None)
    assert time.monotonic() - began < 20
    with pytest.raises(queue.Empty):
        events.get(timeout=0.01)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 2
    events.close()
    assert beside.waits == -1
    after = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    assert after == before - 2
    events.put(("c", 2, None))
    assert events.get(timeout=1) == ("c", 2, None)


# -- in a kernel -----------------------------------------------------------------------------------

TRAIN = """%%ddp --nproc 2 --nnodes 1
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group()
model = DDP(torch.nn.Linear(64, 64))
while True:
    if dist.get_rank() == 1: time.sleep(0.02)
    model(torch.randn(8, 64)).sum().backward()
"""
HANG = """%%ddp --hang-after never --nproc 2 --nnodes 1
import time, torch, torch.distributed as dist
dist.init_process_group()
freed = ''
if dist.get_rank() == 0:
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        freed = 'freed'
else:
    time.sleep(4)
print(freed)
"""


@pytest.fixture(scope="module")
def panel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel with a running pool of two, and its panel."""
    with loaded(str(tmp_path_factory.mktemp("panel"))) as kernel:
        code = "%ddp start --nproc 2\nimport nbddp, json, time\npanel = nbddp.Panel()._panel\n"
        code += "view = panel.view\nlog = []\nview.tabs.value = 'Ranks'\n"
        code += "panel.session.model.watch(lambda before, now: log.append((now.notice, [[r.state, r.doing, r.rate, "
        done = kernel.run(code + "r.slowest, r.cpu, r.memory] for r in now.ranks])))")
        assert done.ok, done.error
        ids = {name: f"view.buttons['{name}'].model_id" for name in ("Stop", "Free", "Stacks", "Restart", "Shut down")}
        kernel.ids = {name: asked(kernel, ident) for name, ident in ids.items()}  # type: ignore[attr-defined]
        yield kernel


def press(kernel: Kernel, name: str) -> None:
    """Send what a front end sends when a button is pressed."""
    data = {"method": "custom", "content": {"event": "click"}}
    content = {"comm_id": kernel.ids[name], "data": data}  # type: ignore[attr-defined]
    kernel.client.shell_channel.send(kernel.client.session.msg("comm_msg", content))


def updates(kernel: Kernel, true: Callable[[str], bool], seconds: float = 30.0) -> str:
    """Wait, while a cell runs, until a widget's new text is such; which it is."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        message = kernel.client.get_iopub_msg(timeout=seconds)
        state = (message["content"].get("data") or {}).get("state") or {} if message["msg_type"] == "comm_msg" else {}
        if true(str(state.get("value", ""))):
            return str(state["value"])
    raise AssertionError("no widget shows it")


def test_the_strip_moves_and_stop_is_heard_while_a_cell_runs(panel: Kernel) -> None:
    number = panel.send(TRAIN)
    shown = updates(panel, lambda text: "◂ slowest" in text and "MiB" in text)
    assert shown.index("◂ slowest") > shown.index('scope="row">1')
    press(panel, "Stop")
    done = panel.collect(number)
    assert "stopped by the user" in done.error
    until(panel, "panel.state.notice", lambda notice: "stopped by the user" in notice)
    assert any(n.startswith("stopping Cell In[") for n in asked(panel, "[n for n, _ in log]"))


def test_a_cell_that_is_waiting_is_run_after_the_one_that_hears_buttons(panel: Kernel) -> None:
    first = panel.send(TRAIN)
    updates(panel, lambda text: "steps/s" in text and "running" in text)
    ask = panel.client.kernel_info()  # as a tab that is opened now
    press(panel, "Stacks")
    updates(panel, lambda text: "model(torch.randn" in text or "backward" in text)
    assert panel.client.get_shell_msg(timeout=30)["parent_header"]["msg_id"] == ask
    press(panel, "Stop")
    assert not panel.collect(first).ok
    assert panel.run("1 + 1").ok


def test_a_run_that_has_ended_is_kept_with_all_its_steps(panel: Kernel) -> None:
    """A short one ends before a look has seen any; a long one's last steps come after its end."""
    done = panel.run(TRAIN.replace("while True:", "for _ in range(25):") + "dist.destroy_process_group()")
    assert done.ok, done.error
    name = f"Cell In[{done.reply['execution_count']}]"
    until(panel, "[[run.name, run.steps] for run in panel.state.past][-1:]", lambda found: found == [[name, 25]])


def test_free_has_a_blocked_collective_raise_and_the_cell_go_on(panel: Kernel) -> None:
    number = panel.send(HANG)
    updates(panel, lambda text: "waiting" in text and "in all_reduce #1 for rank 1" in text)
    press(panel, "Free")
    done = panel.collect(number)
    assert "rank 0 │ freed" in done.text(), done.error
    notices = asked(panel, "[n for n, _ in log]")
    assert "unblocking rank 0: the blocked call raises an error there" in notices


def test_restart_of_one_rank_ends_the_cell_and_keeps_the_other(panel: Kernel) -> None:
    assert panel.run("%%ddp\nimport os; kept = os.getpid()").ok
    until(panel, "len(view.which.options)", lambda count: count == 3)
    assert panel.run("view.which.value = 1").ok
    number = panel.send("%%ddp\nimport time; time.sleep(60)")
    updates(panel, lambda text: "cell line 2" in text and "running" in text)
    press(panel, "Restart")
    done = panel.collect(number)
    assert not done.ok
    until(panel, "panel.state.notice", lambda notice: "rank 1 restarted" in notice)
    assert panel.run("%%ddp -o has\n'kept' in globals()").ok
    assert asked(panel, "[has[0], has[1]]") == [True, False]
    panel.run("view.which.value = -1")


def test_restart_of_a_rank_amid_training_is_reported_and_not_what_its_peer_lost(panel: Kernel) -> None:
    until(panel, "len(view.which.options)", lambda count: count == 3)
    assert panel.run("view.which.value = 1").ok
    number = panel.send(TRAIN)
    updates(panel, lambda text: "steps/s" in text and "running" in text)
    press(panel, "Restart")
    done = panel.collect(number)
    assert done.evalue.startswith("rank 1 was restarted by you; rank 0 was stopped"), done.error
    assert "Connection closed" not in done.error
    until(panel, "panel.state.notice", lambda notice: "rank 1 restarted" in notice)
    panel.run("view.which.value = -1")


def test_all_ranks_are_chosen_where_nothing_else_is(panel: Kernel) -> None:
    until(panel, "[view.which.label, view.whom.label, len(view.which.options)]", lambda f: f == ["all ranks"] * 2 + [3])


def test_buttons_without_a_cell_say_what_is(panel: Kernel) -> None:
    for name, words in [("Stop", "there is no cell to stop"), ("Free", "no cell is running"),
                        ("Stacks", "stacks of all ranks"), ("Restart", "ranks 0–1 restarted")]:  # fmt: skip
        press(panel, name)
        until(panel, "[n for n, _ in log][-9:]", lambda said, words=words: any(words in n for n in said))


def test_a_look_costs_less_than_its_share_of_a_core(panel: Kernel) -> None:
    """By CPU time, in the kernel and in the agent, while all widgets are sent; half a second apart."""
    agent = psutil.Process(asked(panel, "panel.pool.agent.hello.pid"))
    before = agent.cpu_times()
    code = "began = time.thread_time()\nfor _ in range(20): panel.session.look()\n"
    assert panel.run(code + "spent = (time.thread_time() - began) / 20").ok
    after = agent.cpu_times()
    theirs = (after.user + after.system - before.user - before.system) / 20
    assert (asked(panel, "spent") + theirs) * 2 < LEAST_OF_A_CORE


def test_shut_down_ends_the_cell_and_then_the_pool(panel: Kernel) -> None:
    number = panel.send("%%ddp\nimport time; time.sleep(60)")
    updates(panel, lambda text: "cell line 2" in text and "running" in text)
    press(panel, "Shut down")
    assert not panel.collect(number).ok
    until(panel, "panel.state.notice", lambda notice: "pool of 2 stopped" in notice)
    assert asked(panel, "panel.state.pool_words()") == "no workers are running"
    press(panel, "Restart")
    until(panel, "panel.state.notice", lambda notice: "nothing to restart" in notice)
