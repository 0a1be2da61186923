"""`--debug` and `--env`: tables for the pure part; on real ranks what they see, which of them are new, and deadlocks
under TORCH_DISTRIBUTED_DEBUG=DETAIL."""

from __future__ import annotations

import pytest

from nbddp.capabilities.completion.lines import complete_cell
from nbddp.capabilities.env import options as env_options
from nbddp.errors import BadInput
from nbddp.launch.options import LaunchSpec, known, parse_cell
from nbddp.pool.pool import WorkerPool

# -- tables ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "debug", "env"),
    [
        ("--debug", "info", ()),
        ("--debug detail", "detail", ()),
        ("--debug off --env A=1 --env B=", "off", (("A", "1"), ("B", ""))),
        ("--env 'A=x y=z'", None, (("A", "x y=z"),)),
        ("--env A", None, (("A", None),)),
    ],
)
def test_a_line_says_which_variables_the_ranks_have(
    line: str, debug: str | None, env: tuple[tuple[str, str | None], ...]
) -> None:
    spec = parse_cell(line)
    assert (spec.debug, spec.env) == (debug, env)
    assert spec.asks_for_pool()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--debug loud", "off|info|detail"),
        ("--env =1", "'=1' does not name a variable; write it as NCCL_DEBUG=INFO"),
        ("--env 1A=1", "'1A=1' does not name a variable; write it as NCCL_DEBUG=INFO"),
        ("--env RANK=1", "the pool sets RANK for each rank; choose another name"),
        ("--env TORCHELASTIC_RUN_ID=1", "the pool sets TORCHELASTIC_RUN_ID for each rank; choose another name"),
    ],
)
def test_what_cannot_be_set_is_refused_in_a_sentence(line: str, words: str) -> None:
    with pytest.raises(BadInput) as e:
        parse_cell(line)
    assert words in str(e.value)


def test_a_call_in_python_is_checked_as_a_line_is() -> None:
    spec = WorkerPool(debug="info", env={"A": "1"}).spec
    assert (spec.debug, spec.env) == ("info", (("A", "1"),))
    assert WorkerPool(debug=None, env=None).spec == LaunchSpec()
    with pytest.raises(BadInput, match=r"^debug='loud' is not one of off, info, detail$"):
        WorkerPool(debug="loud")
    with pytest.raises(BadInput, match=r"^env: the pool sets RANK for each rank"):
        WorkerPool(env={"RANK": "1"})


def test_tab_offers_the_levels_and_goes_on() -> None:
    assert complete_cell("--debug ")[:3] == ["off", "info", "detail"]
    assert "--env" in complete_cell("--debug ")
    assert complete_cell("--debug d") == ["detail"]
    assert known()["debug"].choices == tuple(env_options.LEVELS)


def test_a_setting_wins_over_a_level_and_stays_until_it_is_taken_back() -> None:
    said = env_options.merged((), [("NCCL_DEBUG", "WARN"), ("LR", "1")])
    assert env_options.wanted("info", said)["NCCL_DEBUG"] == "WARN"
    assert env_options.merged(said, [("LR", None), ("X", "2")]) == (("NCCL_DEBUG", "WARN"), ("X", "2"))
    assert env_options.wanted("off", ()) == {} == env_options.wanted(None, ())


@pytest.mark.parametrize(
    ("name", "once", "imports"),
    [
        ("LR", False, False),
        ("NCCL_DEBUG", True, False),
        ("GLOO_SOCKET_IFNAME", True, False),
        ("TORCH_DISTRIBUTED_DEBUG", True, False),
        ("TORCH_CPP_LOG_LEVEL", True, False),
        ("TORCH_NCCL_BLOCKING_WAIT", True, False),
        ("TORCH_LOGS", True, True),
        ("PYTHONHASHSEED", True, True),
        ("LD_PRELOAD", True, True),
        ("CUDA_VISIBLE_DEVICES", True, True),
    ],
)
def test_it_is_known_when_a_variable_is_read(name: str, once: bool, imports: bool) -> None:
    assert (bool(env_options.read_once([name])), bool(env_options.at_import([name]))) == (once, imports)
