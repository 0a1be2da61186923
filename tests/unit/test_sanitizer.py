"""The sanitizer's rules and words, without ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from nbddp.capabilities.completion.lines import complete_cell
from nbddp.capabilities.sanitizer import kinds_drift
from nbddp.capabilities.sanitizer.findings import Finding, SanitizerFindings, silence
from nbddp.capabilities.sanitizer.recording import (
    CalledFunction,
    Forward,
    GroupCall,
    HeldParameters,
    ModelFacts,
    OptimizerStep,
    Part,
    Pass,
    Place,
    RankRecord,
    Sample,
)
from nbddp.capabilities.sanitizer.rules import Seen, alone, judge, make, unexplained
from nbddp.capabilities.sanitizer.table import KINDS
from nbddp.capabilities.sanitizer.view import difference
from nbddp.errors import BadInput
from nbddp.launch.options import parse_cell
from nbddp.protocol.codec import is_silenced
from tests.places import ROOT
from tests.pool.silent import PROGRAMS

LINE = Place("Cell In[3]", 4, "", "optimizer.step()")


def record(rank: int, world: int, steps: int = 3, differs: bool = False) -> RankRecord:
    """A rank that trains one model; from step 1 on its numbers are its own if `differs`."""
    made = RankRecord(rank, 1, places=[Place("", 0, "", ""), LINE])
    made.models.append(ModelFacts(0, "ddp", "Net", tuple(range(world)), 1, False, ["a.weight"], start=[0.0, 1.0]))
    for number in range(steps):
        value: Sample = [0.5 + 0.1 * rank * (differs and number > 0), 1.0]
        made.forwards.append(Forward(0, 10 * number + 1, 1, True, True, batch=1000 * number + rank + 1, size=4))
        made.steps.append(
            OptimizerStep(
                0, number, 10 * number + 5, 1, [Part(0, ["a.weight"], ["a.weight"], [0.0, 1.0], [0.1, 0.2], value)]
            )
        )
        made.step_counts[0] = number + 1
    return made


def judged(*records: RankRecord, **more: bool) -> list[str]:
    return [each.kind for each in judge({r.rank: r for r in records}, **more)]


def test_every_kind_has_a_rule_and_a_cure_in_words() -> None:
    for row in KINDS.values():
        assert len(row.rule) > 30, row.name
        assert len(row.cure) > 20, row.name
        assert set(row.explains) <= KINDS.keys(), row.name


def test_tab_offers_every_kind() -> None:
    assert complete_cell("--sanitize --allow ") == [*KINDS]
    assert complete_cell("--allow past-ddp-") == ["past-ddp-armed"]


def test_every_kind_is_documented() -> None:
    page = (ROOT / "docs/findings.md").read_text(encoding="utf-8")
    for row in KINDS.values():
        (shown,) = [line.split(" | ") for line in page.split("\n") if line.startswith(f"| `{row.name}` |")]
        assert shown[2:4] == [row.rule, row.cure], "the page and the program give the same evidence and cure"


def test_nearly_every_kind_has_a_program_that_shows_it() -> None:
    """Those that name no cause remain where no rule holds; `host-sync` has programs of its own."""
    shown = {each.kind for each in PROGRAMS.values()}
    assert KINDS.keys() - shown <= {
        "gradients-differ", "too-many-threads", "host-sync"
    }  # fmt: skip


def test_rounding_is_no_difference_and_a_missing_gradient_is_one() -> None:
    assert difference({0: [1.0, 2.0], 1: [1.0 + 1e-9, 2.0]}, ["a"]) is None
    found = difference({0: [1.0, 2.0, 3.0, 4.0], 1: [1.0, 2.0, 3.1, 4.0]}, ["a", "b"])
    assert found is not None
    assert (found.name, found.number, found.of) == ("b", 1, 2)
    assert "no gradient" in str(difference({0: [1.0, 2.0], 1: [-9000.0, 12321.0]}, ["a"]).words)  # type: ignore[union-attr]


def test_samples_of_other_lengths_are_not_compared() -> None:
    assert difference({0: [1.0, 2.0], 1: [1.0, 2.0, 3.0, 4.0]}, ["a"]) is None


def test_equal_ranks_have_no_finding() -> None:
    assert judged(record(0, 2), record(1, 2)) == []


def test_equal_gradients_that_move_weights_apart_are_found_at_the_first_step() -> None:
    found = judge({0: record(0, 2, differs=True), 1: record(1, 2, differs=True)})
    assert [each.kind for each in found] == ["optimizer-state-differs"]
    assert "step 1" in found[0].what


def test_a_group_of_which_a_rank_is_missing_is_not_judged() -> None:
    found = judge({0: record(0, 2, differs=True)}, missing=[1])
    assert not found
    assert "rank 1 left no record" in str(found)


def test_numbers_of_steps_are_compared_only_if_the_program_ended_well() -> None:
    few, many = record(0, 2, steps=2), record(1, 2, steps=3)
    assert judged(few, many) == ["steps-differ"]
    few.ended = "ValueError"
    assert judged(few, many) == []


def test_a_constant_batch_is_a_benchmark_and_no_mistake() -> None:
    ranks = [record(0, 2), record(1, 2)]
    for each in ranks:
        for forward in each.forwards:
            forward.batch = 7
    assert judged(*ranks) == []


def test_ranks_with_equal_batches_are_named_unless_they_are_to_be_equal() -> None:
    ranks = [record(rank, 4) for rank in range(4)]
    for one, two in zip(ranks[2].forwards, ranks[3].forwards, strict=True):
        two.batch = one.batch
    assert judged(*ranks) == ["same-batch"]
    assert judge({r.rank: r for r in ranks})[0].ranks == (2, 3)
    assert judged(*ranks, same_input=True) == []


def test_a_rank_is_starved_only_if_most_of_its_waits_are_long() -> None:
    """On a busy machine some of any rank's are."""

    def waits(long: int) -> list[str]:
        ranks = [record(rank, 2) for rank in range(2)]
        for each in ranks:
            few = 0 if each.rank else long
            some = [0.0, *[0.011] * few, *[0.001] * (12 - few)]
            each.passes.append(Pass(0, 0, 1, 1, batches=[each.rank + 1, each.rank + 9], waits=some, models={0}))
        return judged(*ranks)

    assert waits(7) == []
    assert waits(11) == ["starved-rank"]


def test_optimizers_may_hold_other_parameters_if_all_move_on_every_rank() -> None:
    """As where each rank steps its share and sends it to the others."""

    def held(moves: bool) -> list[str]:
        ranks = [record(rank, 2) for rank in range(2)]
        for each in ranks:
            (facts,) = each.models
            facts.names = facts.start_names = facts.end_names = ["a.weight", "b.weight"]
            facts.start, facts.parameters = [0.0, 1.0, 0.0, 1.0], 2
            facts.ends = [0.5, 2.0, 0.5, 2.0 if moves or each.rank == 0 else 1.0]
            each.held.append(HeldParameters(0, 0, {"a.weight": 0} | ({"b.weight": 0} if each.rank == 0 else {})))
        return judged(*ranks)

    assert held(moves=True) == []
    assert held(moves=False) == ["optimizer-differs"]


def test_a_barrier_exchanges_no_counts() -> None:
    ranks = [record(0, 2, steps=8), record(1, 2, steps=8)]
    for each in ranks:
        for forward in each.forwards:
            forward.size = 4 - each.rank
            each.collectives.append(GroupCall((0, 1), "barrier", "", "", forward.at + 1, 1))
    assert judged(*ranks) == ["unequal-batches"]
    for each in ranks:
        each.collectives = [replace(one, name="all_reduce", op="SUM", shape="int64[1]") for one in each.collectives]
    assert judged(*ranks) == []


def test_threads_are_too_many_only_where_ranks_compute_on_the_cpu() -> None:
    ranks = [record(0, 2), record(1, 2)]
    for each in ranks:
        each.settings = {"threads": 8, "cores": 8, "on CPU": True}
    found = judge({r.rank: r for r in ranks})
    assert [each.kind for each in found] == ["too-many-threads"]
    assert "2 ranks compute with 16 threads on 8 cores" in found[0].what
    for each in ranks:
        each.settings |= {"on CPU": False, "cuDNN benchmark": False}
    assert judged(*ranks) == []


def test_every_rank_may_evaluate_everything() -> None:
    ranks = [record(0, 2), record(1, 2)]
    for each in ranks:
        each.passes.append(Pass(0, 0, 90, 1, batches=[1, 2], rows=[1, 2, 3, 4, 5, 6], whole=True))
    assert judged(*ranks) == []


def test_five_hundred_ranks_are_compared_in_seconds() -> None:
    began = time.process_time()
    ranks = {rank: record(rank, 500, steps=50, differs=rank == 77) for rank in range(500)}
    found = judge(ranks)
    assert [each.kind for each in found] == ["optimizer-state-differs"]
    assert time.process_time() - began < 20


def test_effects_of_a_known_cause_are_left_out() -> None:
    cause = make("past-ddp", "what", [], "much", about="model")
    effect = make("gradients-differ", "what", [], "much", about="model")
    other = make("gradients-differ", "what", [], "much", about="another")
    assert [each.about for each in unexplained([cause, effect, other])] == ["model", "another"]


def test_a_rule_that_fails_is_told_and_the_others_are_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(replica: object) -> Iterator[Seen]:
        raise IndexError("a list is short")

    monkeypatch.setattr(kinds_drift, "_scales", alone(broken))
    found = judge({rank: record(rank, 2, differs=True) for rank in range(2)})
    assert [each.kind for each in found] == ["optimizer-state-differs"]
    assert "the rule broken could not be applied: IndexError" in str(found)


def test_calls_whose_values_are_lost_are_no_finding() -> None:
    """The digests of a rank are lost if its program fails while a GPU works."""
    ranks = [record(rank, 2) for rank in range(2)]
    for each in ranks:
        each.calls += [CalledFunction("replicated", at, 1, [[0, 1], "[4, 8]", at]) for at in range(6)]
        each.calls += [CalledFunction("shards clipped", at, 1, [0]) for at in range(6)]
        each.calls.append(CalledFunction("sharded parameters", 0, 1, [(0, 1)]))
        each.lost = "a GPU was busy"
    found = judge({each.rank: each for each in ranks})
    assert not found
    assert "could not be applied" not in str(found)


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("x = 1  # nbddp: ok", True),
        ("x = 1  # NBDDP:ok, on purpose", True),
        ("x = 1  # ok", False),
        ("'nbddp: ok'", False),
    ],
)
def test_a_comment_silences_its_line(text: str, marked: bool) -> None:
    assert is_silenced(text) is marked
    shown, quiet = silence([Finding("same-file", "what", (), "much", LINE._replace(text=text))], ())
    assert (len(shown), len(quiet)) == ((0, 1) if marked else (1, 0))


def test_the_most_serious_finding_comes_first_and_all_are_plain_data() -> None:
    heavy = Finding("past-ddp", "what <b>", ("seen",), "much", LINE, "cure", False, ("no_sync",), (0, 1), 95)
    found = SanitizerFindings((heavy,), (), 2, 3, ("note",))
    assert json.loads(json.dumps(found.to_dict()))["findings"][0]["place"]["text"] == "optimizer.step()"
    assert "cause    not known; ruled out: no_sync" in str(found)
    assert "what &lt;b&gt;" in found._repr_html_()
    assert bool(found)
    assert not SanitizerFindings()


def test_the_line_takes_kinds_and_names_a_near_one() -> None:
    asked = parse_cell("--sanitize --allow same-mask --allow same-file --same-input").sanitize
    assert (asked.allow, asked.same_input) == (("same-mask", "same-file"), True)  # type: ignore[union-attr]
    assert parse_cell("--sanitize").sanitize
    assert not parse_cell("").sanitize
    with pytest.raises(BadInput, match="did you mean same-mask"):
        parse_cell("--allow same-maks")
