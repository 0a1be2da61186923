"""The table of options: each is declared once, and all else is derived from its declaration."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import subprocess
import sys
from collections import Counter
from dataclasses import fields

import pytest

from nbddp import capabilities
from nbddp.capabilities.hosts.via import EXAMPLE, NAMED, SSH
from nbddp.capabilities.scripts.logs import LogOptions, streams
from nbddp.capabilities.slurm.commands import Slurm
from nbddp.capabilities.trace.options import FILE
from nbddp.errors import BadInput
from nbddp.launch import options
from nbddp.launch.options import OWN, LaunchSpec, known, parse_cell
from nbddp.notebook.commands import parse_command
from nbddp.pool.pool import WorkerPool
from nbddp.protocol.capability import Capability, Option, load
from nbddp.protocol.request import Request
from tests.places import ROOT

ADDED = [option for row in capabilities.ROWS for option in row.options]
FIELDS = [option for option in ADDED if not option.into]
TARGETS = ("type", "value", "given", "merge", "shows", "terminal")
CORE = [
    ROOT / "nbddp" / "protocol" / "request.py",
    *(path for room in ("launch", "notebook") for path in (ROOT / "nbddp" / room).glob("*.py")),
]
SPECS = {"spec", "old", "running", "merged", "request", "launch"}


def test_each_option_is_declared_once() -> None:
    declared = [*OWN, *ADDED]
    assert [name for name, count in Counter(option.name for option in declared).items() if count > 1] == []
    flags = Counter(flag for option in known().values() for flag in option.flags)
    assert [flag for flag, count in flags.items() if count > 1] == []
    assert {option.after for option in ADDED} <= {"", *known()}
    assert [*known()] == [option.name for option in known().values()]
    assert len(known()) == len(declared)


@pytest.mark.parametrize("option", [*OWN, *FIELDS], ids=lambda option: option.name)
def test_an_option_is_a_field_of_a_spec(option: Option) -> None:
    assert getattr(LaunchSpec(), option.name) == option.default
    if option.of == "run" and option.name != "output":
        assert getattr(Request(), option.name) == option.default


@pytest.mark.parametrize("row", capabilities.ROWS, ids=lambda row: row.name)
def test_a_row_names_what_is_in_its_folder(row: Capability) -> None:
    assert importlib.util.find_spec(f"nbddp.capabilities.{row.name}")
    for option in row.options:
        for target in filter(None, (getattr(option, name) for name in TARGETS)):
            assert target.startswith((f"nbddp.capabilities.{row.name}.", "nbddp.launch.options:")), target
            assert callable(load(target)), target


@pytest.mark.parametrize("option", OWN, ids=lambda option: option.name)
def test_the_values_of_every_pools_options_are_read(option: Option) -> None:
    assert not option.type or callable(load(option.type))


def test_no_file_of_the_core_names_an_option_of_a_capability() -> None:
    """Neither as it is typed nor as a field of a spec or a request."""
    names = {option.name for option in ADDED}
    flags = {flag for name in names for flag in known()[name].flags}
    found = set()
    for path in CORE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in flags:
                found.add(f"{path.stem}: {node.value}")
            if isinstance(node, ast.Attribute) and node.attr in names:
                owner = ast.unparse(node.value).rpartition(".")[2]
                found |= {f"{path.stem}: {owner}.{node.attr}"} if owner in SPECS else set()
    assert found == set()


def test_type_checkers_see_what_the_rows_add() -> None:
    tree = ast.parse(inspect.getsource(capabilities))
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        each.name: {ast.unparse(n.target): n for n in each.body if isinstance(n, ast.AnnAssign)}
        for each in typed.body if isinstance(each, ast.ClassDef)
    }  # fmt: skip
    for of, made in (("pool", "PoolFields"), ("run", "RunFields")):
        defaults = {name: ast.literal_eval(node.value) for name, node in seen[made].items() if node.value}
        assert defaults == {option.name: option.default for option in FIELDS if option.of == of}
    for of, taken in (("pool", "PoolArguments"), ("run", "RunArguments")):
        annotations = {name: ast.unparse(node.annotation) for name, node in seen[taken].items()}
        assert annotations == {o.name: o.annotation for o in FIELDS if o.of == of and o.python}


@pytest.mark.parametrize("gone", [row for row in capabilities.ROWS if row.options], ids=lambda row: row.name)
def test_without_its_row_an_option_is_not_known(gone: Capability, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [flag for option in gone.options for flag in known()[option.name].flags]
    monkeypatch.setattr(options, "rows", lambda: tuple(row for row in capabilities.ROWS if row is not gone))
    caches = (known, options.fields_of, options.cell_parser, parse_cell)
    for cache in caches:
        cache.cache_clear()
    try:
        assert {*known()} == {option.name for option in (*OWN, *ADDED)} - {option.name for option in gone.options}
        assert parse_cell("--nproc 3 --show 0") == LaunchSpec(nproc=3, show=(0,))
        assert options.merged(LaunchSpec(), LaunchSpec(nproc=3)) == LaunchSpec(nproc=3)
        for flag in flags:
            with pytest.raises(BadInput, match=f"has no option {flag}"):
                parse_cell(f"{flag}=1")
    finally:
        for cache in caches:
            cache.cache_clear()


ONE_MORE = """
from dataclasses import replace
from nbddp import capabilities
from nbddp.protocol.capability import Capability, Option, rows

row = Capability(name="colours", options=(
    Option(name="colour", group="colours", after="nnodes", choices=("red", "blue"), help="paint the workers"),
    Option(name="loud", annotation="bool", default=False, of="run", after="ranks", const=True,
           help="let the {what} sing at 100%"),
))
capabilities.ROWS += (row,)
rows.cache_clear()

import inspect
import nbddp
from nbddp.errors import BadInput
from nbddp.launch import options
from nbddp.capabilities.completion.lines import complete_cell, complete_command
from nbddp.launch.options import HelpAsked, LaunchSpec, parse_cell, typed
from nbddp.notebook.commands import parse_command
from nbddp.pool.pool import WorkerPool
from nbddp.protocol.request import Request

def help_of(parse, line):
    try:
        parse(line)
    except HelpAsked as answer:
        return answer.text

red = parse_cell("--colour red")
assert (red.colour, red.asks_for_pool(), red.asks_for_run()) == ("red", True, False)
assert parse_command("start --colour blue").launch.colour == "blue"
assert options.merged(LaunchSpec(nproc=2), red).colour == "red"
assert options.merged(parse_cell("--colour blue"), red).colour == "blue"
assert complete_cell("--colour r") == ["red"]
assert "--colour" in complete_command("restart --c") and "--loud" not in complete_command("restart --l")
assert "colours:\\n  --colour red|blue" in help_of(parse_cell, "--help")
assert WorkerPool(colour="red").spec.colour == "red"
assert inspect.signature(nbddp.Pool).parameters["colour"].annotation == "str | None"
assert typed("colour", "red") == ["--colour", "red"]

loud = parse_cell("--loud")
assert (loud.loud, loud.asks_for_pool(), loud.asks_for_run()) == (True, False, True)
assert loud.as_request("pass", 3).loud and not Request().loud
assert "let the cell sing at 100%" in help_of(parse_cell, "--help")
assert "let the script sing at 100%" in help_of(parse_command, "run --help")
assert parse_command("run --loud s.py").launch.loud
assert inspect.signature(nbddp.Pool.run_cell).parameters["loud"].default is False
print("ok")
"""


def test_what_a_row_declares_is_known_everywhere() -> None:
    ran = subprocess.run([sys.executable, "-c", ONE_MORE], capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout == "ok\n", ran.stderr


def test_options_of_rows_are_arguments_in_python() -> None:
    """With the types that a checker sees, for `Pool?` and Tab."""
    shown = str(inspect.signature(WorkerPool))
    assert "hosts: 'str | None' = None" in shown
    assert "options" not in shown
    pool = WorkerPool(2, hosts="nodea", keep_alive=60.0)
    assert pool.spec == LaunchSpec(nproc=2, hosts="nodea", keep_alive=60.0)
    assert WorkerPool(slurm=True).spec.slurm == Slurm()
    assert WorkerPool(slurm=False).spec.slurm is None
    for wrong in ({"hots": "nodea"}, {"check": True}, {"keep_warm": 60.0}):
        with pytest.raises(TypeError, match=rf"Pool\(\) got an unexpected keyword argument '{next(iter(wrong))}'"):
            WorkerPool(**wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"run_cell\(\) got an unexpected keyword argument 'show_timings'"):
        pool.run_cell("pass", show_timings=True)  # type: ignore[call-arg]
    assert "check: 'bool' = False" in str(inspect.signature(WorkerPool.run_cell))


def test_help_has_the_words_of_what_it_tells_of() -> None:
    way, trace = known()["via"].help, known()["trace"].help
    assert f"{SSH} (default), {', '.join(NAMED)}, or one such as {EXAMPLE}" in way
    assert f"(default {FILE})" in trace
    assert parse_cell("--trace").trace == FILE


def test_each_field_of_a_spec_belongs_to_an_option() -> None:
    others = {"elastic", "argv", "program"}  # --nnodes MIN:MAX; what follows --; a script
    assert {each.name for each in fields(LaunchSpec)} - {*known()} == others


@pytest.mark.parametrize("line", ["--python p", "--setup s", "--ssh-config f", "--interface e", "--fresh", "--sync"])
def test_a_line_with_an_option_of_the_pool_asks_for_one(line: str) -> None:
    assert parse_cell(line).asks_for_pool()
    assert not parse_cell(line).asks_for_run()


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("--keep-alive 10m", "--keep-alive needs --hosts or --slurm"),
        ("--hosts '' --keep-alive 10m", "--keep-alive needs --hosts or --slurm"),
        ("--via mpiexec", "--via mpiexec needs --hosts"),
        ("--time 1:00:00 --partition gpu", "--partition needs --slurm"),
        ("--slurm-options=--exclusive", "--slurm-options needs --slurm"),
        ("--slurm 7 --cpus-per-node 3", "--slurm 7 already has its nodes; remove --cpus-per-node"),
        ("--slurm --hosts a", "--slurm chooses the hosts"),
    ],
)
def test_what_does_not_go_together_is_refused(line: str, refused: str) -> None:
    with pytest.raises(BadInput) as error:
        parse_cell(line)
    assert str(error.value).startswith(refused)


def test_an_empty_option_of_slurm_asks_for_nothing() -> None:
    assert parse_cell("--slurm-options ''") == LaunchSpec()


@pytest.mark.parametrize(
    ("line", "spec"),
    [
        ("--env A=1 --env B", LaunchSpec(env=(("A", "1"), ("B", None)))),
        ("--nnodes 1:4", LaunchSpec(elastic=(1, 4))),
        ("--slurm --nnodes 1:4", LaunchSpec(elastic=(1, 4), slurm=Slurm(nodes="1-4"))),
        ("--slurm --nnodes 2", LaunchSpec(nnodes=2, slurm=Slurm(nodes=2))),
        ("--slurm --keep-alive 1m", LaunchSpec(slurm=Slurm(), keep_alive=60.0)),
        ("--hosts a --via mpiexec", LaunchSpec(hosts="a", via=NAMED["mpiexec"])),
        ("--timings --memory", LaunchSpec(show_timings=True, memory=True)),
        ("--no-timings --hang-after never", LaunchSpec(timings=False, hang_after=None)),
        ("-r 0:3 -t 1", LaunchSpec(logs=LogOptions(redirects=streams("0:3"), tee=streams("1")))),
    ],
)
def test_options_come_to_values(line: str, spec: LaunchSpec) -> None:
    assert parse_cell(line) == spec


@pytest.mark.parametrize(
    ("line", "on_hosts", "elsewhere"),
    [("", False, False), ("--hosts a", True, True), ("--slurm", True, True), ("--cluster x", False, True)],
)
def test_options_say_where_workers_run(line: str, on_hosts: bool, elsewhere: bool) -> None:
    assert (parse_cell(line).on_hosts, parse_cell(line).elsewhere) == (on_hosts, elsewhere)


def test_one_of_two_options_that_exclude_each_other_is_typed() -> None:
    with pytest.raises(BadInput, match="--timings and --no-timings exclude each other; remove one of the two"):
        parse_cell("--timings --no-timings")


def test_a_copy_of_the_folder_is_asked_for_each_time() -> None:
    assert not options.merged(LaunchSpec(), parse_cell("--hosts a --sync")).sync


@pytest.mark.parametrize("flag", ["--fresh", "--keep", "--timings", "--no-timings"])
def test_some_options_of_a_script_are_for_a_notebook(flag: str) -> None:
    """A pool from a terminal ends with its script."""
    assert parse_command(f"run {flag} t.py").launch.program
    with pytest.raises(BadInput, match=f"has no option {flag}"):
        parse_command(["run", flag, "t.py"], "python -m nbddp")


def test_help_of_a_script_has_its_own_words() -> None:
    with pytest.raises(options.HelpAsked, match=r"(?s)the default without\s+--keep.*between\s+SIGTERM\s+and\s+SIGKILL"):
        parse_command("run --help")
    with pytest.raises(options.HelpAsked, match=r"(?s)all\s+variables\s+are\s+lost.*that\s+ranks have to clean up"):
        parse_cell("--help")


def test_what_a_line_shows_has_a_command_for_the_cell_before() -> None:
    later = [[option.later for option in parse_cell(line).said if option.later] for line in ("--timings", "--memory")]
    assert later == [["%ddp timings"], ["%ddp memory --timeline"]]
    for name in (text.split()[1] for (text,) in later):
        assert name in {command.name for row in capabilities.ROWS for command in row.commands}
