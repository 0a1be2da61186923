"""Messages between notebook, worker and agent come back from JSON, and `protocol` alone spells their keys and types."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest

import nbddp
from nbddp.capabilities.debugger.messages import Stopped
from nbddp.errors import Frame, Raised
from nbddp.protocol import messages
from nbddp.protocol.agent import PROTOCOL, Hello
from nbddp.protocol.codec import from_json, to_json
from nbddp.protocol.messages import Streams
from nbddp.protocol.outcome import GroupExit, GroupFacts, LostContext, Outcome, ProcessExit
from nbddp.protocol.position import BlockingCall, CalledFrom, CallHistory, PendingCollective, Whereabouts
from nbddp.protocol.run_spec import Question, Rendezvous, Reply, RunSpec

PACKAGE = Path(nbddp.__file__).parent
TYPES = {value for name, value in vars(messages).items() if name.isupper() and name != "SPEC"}
MESSAGES = (
    RunSpec,
    Rendezvous,
    Question,
    Reply,
    Outcome,
    GroupExit,
    GroupFacts,
    LostContext,
    CalledFrom,
    Whereabouts,
    BlockingCall,
    PendingCollective,
    CallHistory,
    Stopped,
    Streams,
)
# keys that other tables have too, such as options of a line and Jupyter's messages; the types are no dicts
COMMON = {
    "argv", "backend", "call", "cell", "channel", "channels", "children", "cpu", "debug", "env", "epoch",
    "exit_code", "failed", "group", "idle", "kind", "left", "missing", "names", "note", "op", "parts",
    "options", "past", "place", "ranks", "rendezvous", "root", "run", "segments", "sequence",
    "source", "stack", "stopped", "store", "token", "traceback", "user", "variables", "waits", "what", "why", "world",
}  # fmt: skip


Spelled = dict[str, tuple[list[ast.Constant], list[tuple[str, int]]]]  # file → texts, keys with their lines


@pytest.fixture(scope="module")
def spelled() -> Spelled:
    """Of each file outside `protocol` its texts, and those that are keys."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name != "protocol":
            nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
            texts = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
            found[str(path.relative_to(PACKAGE))] = texts, [*keys(nodes)]
    return found


def keys(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Texts that stand where a dict's keys do."""
    for node in nodes:
        found: list[ast.expr | None] = []
        if isinstance(node, ast.Subscript):
            found = [node.slice]
        elif isinstance(node, ast.Dict):
            found = node.keys
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            found = [node.left]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("get", "pop", "setdefault"):
            found = node.args[:1]  # type: ignore[assignment]
        for key in found:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value, key.lineno


def test_types_of_messages_are_spelled_in_protocol_alone(spelled: Spelled) -> None:
    found = [
        f"{path}:{node.lineno} {node.value}"
        for path, (texts, _) in spelled.items()
        for node in texts
        if node.value in TYPES
    ]
    assert found == []
    assert len(TYPES) == 6


def test_keys_of_messages_are_spelled_in_protocol_alone(spelled: Spelled) -> None:
    names = {f.name for kind in MESSAGES for f in fields(kind)}
    found = [
        (key, f"{path}:{line} {key}")
        for path, (_, keys_of_it) in spelled.items()
        for key, line in keys_of_it
        if key in names
    ]
    assert [place for key, place in found if key not in COMMON] == []
    assert {key for key, _ in found} == COMMON


@dataclass(frozen=True)
class Part:
    number: int
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Whole:
    part: Part
    parts: tuple[Part, ...] = ()
    pair: tuple[str, int] | None = None
    by_rank: dict[int, Part] = field(default_factory=dict)
    rows: list[tuple[int, str]] = field(default_factory=list)
    any_of: dict[str, int] | str = ""
    text: str = "default"


WHOLES = [
    (Whole(Part(0)), {"part": {"number": 0}}),
    (Whole(Part(1, ("a",)), (Part(2),)), {"part": {"number": 1, "texts": ["a"]}, "parts": [{"number": 2}]}),
    (Whole(Part(0), pair=("a", 0), text=""), {"part": {"number": 0}, "pair": ["a", 0], "text": ""}),
    (Whole(Part(0), by_rank={3: Part(1)}), {"part": {"number": 0}, "by_rank": {3: {"number": 1}}}),
    (Whole(Part(0), rows=[(1, "b")], any_of={"a": 1}), {"part": {"number": 0}, "rows": [[1, "b"]], "any_of": {"a": 1}}),
]


@pytest.mark.parametrize(("message", "sent"), WHOLES)
def test_a_message_is_its_fields_without_defaults_and_comes_back(message: Whole, sent: dict[str, object]) -> None:
    assert to_json(message) == sent
    assert from_json(Whole, json.loads(json.dumps(sent))) == message


def test_keys_that_a_receiver_does_not_know_are_ignored() -> None:
    event = {"ev": "exit", "kind": "worker", "rank": 1, "pid": 7, "code": -9, "peak_kib": 12}
    assert from_json(ProcessExit, event) == ProcessExit(-9, peak_kib=12)


def test_an_agent_of_another_protocol_is_understood_so_far_that_it_can_be_refused() -> None:
    assert to_json(Hello(7, 1.5, PROTOCOL)) == {"pid": 7, "started": 1.5, "protocol": PROTOCOL}
    assert from_json(Hello, {"ev": "hello", "pid": 7, "started": 1.5, "later": []}).protocol == 0


def test_a_request_with_everything_in_it_comes_back() -> None:
    here = Rendezvous(("localhost", 1), ("127.0.0.1", 2), "10.0.0.1", {"RANK": "0"}, True)
    spec = RunSpec("script", 3, here, True, 7, ("train.py", "--lr"), True, ("9.0", "pass"),
                   {"check": True, "timings": False}, {"names": ["x"]})  # fmt: skip
    assert from_json(RunSpec, json.loads(json.dumps(to_json(spec)))) == spec
    assert len(to_json(spec)) == len(fields(RunSpec))


def test_an_outcome_with_everything_in_it_comes_back() -> None:
    frame = Frame("Cell In[3]", 5, "<module>", True, ((5, "f()"),), (("n", "1"),), 2, ("f",))
    error = Raised("ValueError", "no", (frame,), "while handling", ("note",), ((Raised("KeyError", "k"),),), 1, 3)
    outcome = Outcome(
        7, "raised", "end", 100, 3, "bye", (error,), CalledFrom("send", "send", peer=0), "{}", "Traceback …",
        LostContext("CUDA error", ("x",), ("np",)), GroupFacts(None, 4, True, 1, True, True),
        (GroupExit("", None, 5, 1), GroupExit("2", ("Cell In[3]", 5, "f"), 6, 1)), 0, 8,
        ({"text/plain": "page"}, "text"), (("next", True),), ("disk full", "/log"), "1",
        {"stale_modules": [["module", "changed"]]}, (("timings", "ValueError: no"),),
    )  # fmt: skip
    assert from_json(Outcome, json.loads(json.dumps(to_json(outcome)))) == outcome
    assert len(to_json(outcome)) == len(fields(Outcome))


def test_an_answer_with_everything_in_it_comes_back() -> None:
    place, ranks = ("Cell In[3]", 5, "f"), (0, 1)
    made, channel = ("1.1/new_group", 2, ranks), ("r", "0", -1, 0, 0)
    call = BlockingCall("wait", "wait", 1, "a store", 4, (2, 3), made, channel, 2, ranks)
    pending = PendingCollective("0", ranks, 3, "all_reduce", "float[4]", "gloo", 0, False, "tp", True, (1, 2), 2, place)
    past = CallHistory({"0": ((1, "barrier", "", None),)}, {"0": 1}, ("1",), True, ((("s", "0", 0, 1, 7), 2),))
    here = Whereabouts(
        True, False, place, call, pending, True, "futex", 1.5, 7, (2, 90), (("is connecting", ""),),
        (("loader", "barrier", place), ("", "recv", None)), (1, 2), True, ("a thread",), 1, 2, past, ("x",), ("np",),
        ((*place, True),), True, True, True, "no", "KeyError: 'a'",
    )  # fmt: skip
    assert from_json(Whereabouts, json.loads(json.dumps(to_json(here)))) == here
    for message in (here, call, pending, past):
        assert len(to_json(message)) == len(fields(message))


def test_examples_on_the_page_are_messages() -> None:
    page = (PACKAGE / "protocol" / "README.md").read_text(encoding="utf-8")
    blocks = " ".join(re.findall(r"```json\n(.*?)```", page, re.DOTALL))
    rows = re.findall(r"^ *\| `nbddp_st.*`(\{.*\})` \|$", page, re.MULTILINE)
    kinds = (RunSpec, Question, Reply, Reply, Outcome, Outcome, Streams, Stopped)
    read, end, found = json.JSONDecoder(), 0, []
    text = f"{blocks} {' '.join(rows)} "
    while text[end:].strip():
        begin = text.index("{", end)
        example, end = read.raw_decode(text, begin)
        found.append(example)
    for kind, example in zip(kinds, found, strict=True):
        assert json.loads(json.dumps(to_json(from_json(kind, example)))) == example
    here = found[2]["answer"]
    assert json.loads(json.dumps(to_json(from_json(Whereabouts, here)))) == here
