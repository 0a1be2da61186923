"""Output is kept in order, and the work is in proportion to what is written, whatever moves the cursor."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nbddp
from nbddp.capabilities.scripts.part import failures_of
from nbddp.launch.options import LaunchSpec
from nbddp.output.buffer import HEAD, LONGEST, SHOWN_HEAD, SHOWN_TAIL, TAIL, WIDE_HEAD, WIDE_TAIL, Elision, Text
from nbddp.output.layout import Print, Show, block
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests import warm
from tests.kernels import Kernel
from tests.pool.faults import Impatient
from tests.unit.test_output import output, say

# -- a line, as a terminal has it -------------------------------------------------------------------

PIECES = ["a", "bc", "\r", "\n", "50%", " ", "\b", "\b\b", "\x1b[K", "\x1b[2K", "\x1b[1K", "\x1b[G", "\x1b[31m", "\x1b"]


def terminal(text: str) -> list[str]:
    """The lines, by a list of cells; None is an erased one. It copies, as a quadratic way does."""
    done = []
    for line in text.split("\n"):
        cells: list[str | None] = []
        column = 0
        for part in re.split(r"(\r|\x08|\x1b\[[012]?K|\x1b\[G)", line):
            if part in ("\r", "\x1b[G"):
                column = 0
            elif part == "\b":
                column = max(0, column - 1)
            elif part == "\x1b[K":
                del cells[column:]
            elif part == "\x1b[1K":
                cells[:column] = [None] * column
            elif part == "\x1b[2K":
                cells = [None] * column
            else:
                cells[column : column + len(part)] = list(part)
                column += len(part)
        while cells and cells[-1] is None:
            cells.pop()
        done.append("".join(c or " " for c in cells))
    return done


@given(st.lists(st.sampled_from(PIECES), max_size=40))
@settings(max_examples=200, deadline=None)
def test_a_line_is_what_a_terminal_shows_however_the_text_is_cut(pieces: list[str]) -> None:
    whole, cut = Text(), Text()
    text = "".join(pieces)
    whole.write("stdout", text)
    for character in text:
        cut.write("stdout", character)
    assert whole.print_of() == cut.print_of()
    assert whole.lines() == cut.lines()
    *ended, last = terminal(text)
    assert whole.lines_of("stdout") == [*ended, *([last] if last.strip() else [])]


def test_ranks_with_the_same_lines_are_one_section_also_where_subprocesses_mixed_their_streams(tmp_path: Path) -> None:
    one = say(output(tmp_path, 0), ("stdout", "a\n"), ("stderr", "b\n"))
    two = say(output(tmp_path, 1), ("stderr", "b\n"), ("stdout", "a\n"))
    assert [piece.text.split(" │")[0] for piece in block([one, two]) if isinstance(piece, Print)] == [
        "ranks 0–1       ", "ranks 0–1 stderr",
    ]  # fmt: skip


def test_of_many_displays_the_first_and_the_last_are_shown_and_the_others_are_in_a_file(tmp_path: Path) -> None:
    out = output(tmp_path)
    for i in range(20_000):
        transient = {"display_id": str(i)}
        out.take("display_data", {"data": {"text/html": f"<b>{i}</b>"}, "metadata": {}, "transient": transient})
        say(out, ("stdout", f"after {i}\n"))
    for i in range(0, 20_000, 1000):
        new = {"data": {"text/html": "new"}, "metadata": {}, "transient": {"display_id": str(i)}}
        out.take("update_display_data", new)
    out.close()
    gap = next(item for item in out.items if isinstance(item, Elision))
    assert gap.displays == 20_000 - SHOWN_HEAD - SHOWN_TAIL
    assert len(out.items) <= 2 * (SHOWN_HEAD + SHOWN_TAIL) + 1
    shown = [piece.data["text/html"] for piece in block([out]) if isinstance(piece, Show)]
    assert (shown[0], shown[1], shown[-1], len(shown)) == ("new", "<b>1</b>", "<b>19999</b>", 1000)
    left_out = [json.loads(row)["data"]["text/html"] for row in gap.path.read_text().splitlines()]
    assert (left_out[0], left_out[-1], len(left_out)) == ("<b>500</b>", "<b>19499</b>", gap.displays)
    assert out.log.read_text().count("\n") == 20_000
    other = output(tmp_path, 1)
    assert other.print_of() != out.print_of()


def test_what_is_kept_of_long_lines_and_large_displays_is_bounded(tmp_path: Path) -> None:
    out = output(tmp_path)
    for _ in range(300):
        say(out, ("stdout", "x" * (LONGEST - 1) + "\n"))
    text = out.items[0]
    assert isinstance(text, Text)
    head, left_out, tail = text.lines()
    assert (len(head), left_out, len(tail)) == (HEAD, 300 - HEAD - TAIL, TAIL)
    assert sum(len(line) for _, line in head + tail) < (HEAD + TAIL) * (WIDE_HEAD + WIDE_TAIL + 100)
    for _ in range(100):
        out.take("display_data", {"data": {"image/png": "x" * LONGEST}, "metadata": {}})
    assert sum(len(piece.data["image/png"]) for piece in block([out]) if isinstance(piece, Show)) <= 33 * LONGEST


RICH = """from rich.progress import Progress, track
print("before")
for i in track(range(5), "first"): pass
print("between")
with Progress() as bars:
    both = bars.add_task("one", total=3), bars.add_task("two", total=3)
    for i in range(3): [bars.advance(task) for task in both]
    bars.refresh()
print("after")"""


def test_the_last_state_of_richs_bars_stays_and_what_stood_before_it(shows: Callable[..., list[str]]) -> None:
    pytest.importorskip("rich")
    rows = shows(RICH)
    texts = [re.sub("<[^>]*>", "", row) for row in rows if not row.endswith("│")]
    assert [text.split() for text in texts if "│" in text] == [
        ["ranks", "0–1", "│", word] for word in ("before", "between", "after")
    ]
    bars = [text for text in texts if "%" in text]
    assert [("first" in bars[0]), ("one" in bars[1]), ("two" in bars[2])] == [True] * 3
    assert all("100%" in bar for bar in bars)
    assert len(bars) == 3
    assert rows.index("ranks 0–1 │ before") < rows.index("ranks 0–1 │ between") < rows.index("ranks 0–1 │ after")


def test_a_bar_of_tqdm_is_one_line_below_what_was_printed_meanwhile(shows: Callable[..., list[str]]) -> None:
    rows = shows("from tqdm import tqdm\nprint('before')\nfor i in tqdm(range(3)): print(i)\nprint('after')")
    folded = rows[0].startswith("ranks")  # both took as long, to the digits that tqdm shows
    of_one = [row.partition("│ ")[2] for row in (rows if folded else rows[: len(rows) // 2])]
    assert [*of_one[:4], of_one[5]] == ["before", "0", "1", "2", "after"]
    assert of_one[4].startswith("100%|")


# -- through a kernel -------------------------------------------------------------------------------


def test_a_long_line_with_a_return_is_short_in_the_notebook_and_whole_in_the_log(four: Kernel) -> None:
    """Longer ones take minutes in what reads notebooks: nbconvert looks at each line in quadratic time."""
    shown = four.run("%%ddp\nprint('x' * 340_000 + '\\rend'); print('a\\rb')")
    first, second = shown.text().splitlines()
    assert first.startswith("ranks 0–3 │ endxxx")
    assert "… 323,616 characters omitted …" in first
    assert len(first) < 17_000
    assert second == "          │ b"
    assert len(four.run("%ddp log --rank 2").text()) == 340_000 + len("\rend\na\rb\n")


def test_lines_of_both_streams_come_in_the_order_in_which_they_were_printed(shows: Callable[..., list[str]]) -> None:
    rows = shows("for i in range(3): print('out', i); print('err', i, file=sys.stderr)")
    assert rows == [f"ranks 0–1{mark} │ {word} {i}" for i in range(3) for mark, word in
                    (("       ", "out"), (" stderr", "err"))]  # fmt: skip


IN_ORDER = {
    "a shell": "os.system('echo one'); print('two'); os.system('echo three')",
    "a descriptor": "os.write(1, b'one\\n'); print('two'); os.write(1, b'three\\n')",
    "parts of lines": "sys.stdout.write('o'); os.system('echo ne'); print('two'); print('three')",
    "C": "import ctypes\nc = ctypes.CDLL(None); c.printf(b'one\\n'); print('two'); c.printf(b'three')",
    "a subprocess": "import subprocess\nfor w in ('one', 'two', 'three'): subprocess.run(['echo', w])",
    "a subprocess to sys.stdout": "import subprocess\nsubprocess.run(['echo', 'one'], stdout=sys.stdout)\n"
    "print('two'); subprocess.run('echo three', shell=True, stdout=sys.stdout.buffer)",
    "a file of a descriptor": "file = open(sys.stdout.fileno(), 'w', closefd=False)\n"
    "for w in ('one', 'two', 'three'): print(w, file=file, flush=True)",
    "the descriptor of sys.stdout": "for w in ('one', 'two', 'three'): print(w[0], end='', flush=True); "
    "os.write(sys.stdout.fileno(), w[1:].encode()); print()",
}


@pytest.mark.parametrize("how", IN_ORDER)
def test_what_is_written_past_python_comes_in_order_and_before_the_result(
    shows: Callable[..., list[str]], how: str
) -> None:
    rows = shows(IN_ORDER[how] + "\n42")
    assert [row.partition(" │ ")[2] for row in rows] == ["one", "two", "three", "42"]


@pytest.mark.parametrize("beside", [0, 4])
def test_what_is_written_past_python_comes_between_lines(
    pool: WorkerPool, shows: Callable[..., list[str]], beside: int
) -> None:
    """`print` writes "a", " ", "b" and the end of the line each by itself: nothing comes between, also where other
    threads take the interpreter for longer than PRINT_SECONDS in the middle of one."""
    shows(
        "import subprocess, threading\nspeaking = subprocess.Popen(['sh', '-c', 'while :; do echo past; done'])\n"
        "over = threading.Event()\n"
        "def turns():\n    while not over.is_set(): pass\n"
        f"threads = [threading.Thread(target=turns) for _ in range({beside})]\n"
        "for thread in threads: thread.start()\n"
        "for i in range(25):\n    print('a', 'b', i)\n    time.sleep(0.002)\n"
        "over.set(); speaking.kill(); speaking.wait()"
    )
    run = pool.last_run
    assert run is not None
    for out in run.outputs.values():
        lines = out.log.read_text().splitlines()
        assert list(out.log.parent.glob("*.later*")) == [], "nothing comes late"
        assert "past" in lines
        assert {f"a b {i}" for i in range(25)} <= set(lines)


def test_what_is_written_past_python_comes_before_what_is_displayed_after_it(shows: Callable[..., list[str]]) -> None:
    rows = shows(
        "from IPython.display import HTML, display\nos.system('echo one'); display(HTML('<b>x</b>'))\nprint('two')"
    )
    assert rows == ["ranks 0–1 │ one", "ranks 0–1 │", "<b>x</b>", "ranks 0–1 │ two"]


def test_a_letter_of_several_bytes_may_come_in_two_parts(shows: Callable[..., list[str]]) -> None:
    rows = shows("os.write(1, 'grü'.encode()[:-1]); time.sleep(0.05); os.write(1, 'üß'.encode()[1:]); None")
    assert rows == ["ranks 0–1 │ grüß"]


def test_a_bar_below_others_is_one_line(shows: Callable[..., list[str]]) -> None:
    """As tqdm writes one at position 2: each part is flushed."""
    rows = shows(
        "def say(text): sys.stderr.write(text); sys.stderr.flush()\n"
        "for i in range(5):\n    say('\\n\\n'); say(f'\\rbar {i}'); say('\\x1b[A\\x1b[A'); time.sleep(0.03)\n"
        "print('done')"
    )
    assert rows == ["ranks 0–1        │ done", "ranks 0–1 stderr │ bar 4"]


DUMPS = """import faulthandler, signal
print('one')
faulthandler.dump_traceback(all_threads=False)
print('two')
faulthandler.register(signal.SIGUSR1, all_threads=False); os.kill(os.getpid(), signal.SIGUSR1)
faulthandler.unregister(signal.SIGUSR1)
print('three')
faulthandler.dump_traceback_later(0.01); time.sleep(0.1); faulthandler.cancel_dump_traceback_later()
print('four')"""


def test_what_faulthandler_dumps_is_output(pool: WorkerPool, shows: Callable[..., list[str]]) -> None:
    shows(DUMPS)
    assert pool.last_run is not None
    rows = pool.last_run.outputs[1].log.read_text().splitlines()
    said = [row for row in rows if row in ("one", "two", "three", "four") or re.match("Stack|Timeout|.*In\\[", row)]
    assert [re.sub(r".*In\[.* line (\d+) .*", r"\1", row).split()[0] for row in said] == [
        "one", "Stack", "4", "two", "Stack", "6", "three", "Timeout", "9", "four",
    ]  # fmt: skip


def test_dumps_that_no_pipe_has_room_for_block_nobody(shows: Callable[..., list[str]]) -> None:
    """One that is larger than a pipe is written while its reader waits for the interpreter."""
    threads = "threads = [threading.Thread(target=deep, args=(95,)) for _ in range(30)]\n"
    rows = shows(
        "import faulthandler, threading\ngo = threading.Event()\n"
        "def deep(n): return deep(n - 1) if n else go.wait()\n"
        f"{threads}for thread in threads: thread.start()\nfaulthandler.dump_traceback(); go.set()\n"
        "for thread in threads: thread.join()\nprint('through')"
    )
    assert rows[-1].endswith("│ through")


LONE = """import logging
print('one'); print('two \\ud800', b'\\xff'.decode('utf-8', 'surrogateescape')); print('three')
print('four \\ud801', file=sys.stderr)
os.write(1, b'five \\xff\\n')
from IPython.display import HTML, display
display(HTML('<b>six \\ud802</b>'))
class Odd:
    def __repr__(self): return 'seven \\ud803'
Odd()"""


def test_lone_surrogates_are_shown_as_escapes_and_nothing_else_is_lost(shows: Callable[..., list[str]]) -> None:
    rows = [row.partition("│")[2].strip() or row for row in shows(LONE)]
    assert rows == ["one", r"two \ud800 \udcff", "three", r"four \ud801", "five \ufffd", "ranks 0–1        │",
                    r"<b>six \ud802</b>", r"seven \ud803"]  # fmt: skip
    assert shows("pass") == [], "nothing comes late"


def test_a_file_whose_name_is_no_utf8_is_named_in_a_report(pool: WorkerPool) -> None:
    name = r"os.fsdecode(b'/nowhere/odd\xff.py')"
    with pytest.raises(nbddp.WorkerFailed, match=r"FileNotFoundError: .*odd\\udcff.py.* \(odd\?.py line 1\)"):
        pool.run_cell(f"import os\nexec(compile('open(__file__)', {name}, 'exec'), {{'__file__': {name}}})")


def test_an_argument_that_is_no_utf8_arrives_as_it_is(pool: WorkerPool) -> None:
    found = pool.run_cell("import sys\nsys.argv[1:]", argv=["a\udcff", "é"], want_value=True, screen=NullScreen())
    assert list(found) == [["a\udcff", "é"]] * 2


# -- processes that a program forks itself ------------------------------------------------------------

FORKS = {
    "comes to the end": ("pass", 0, ["forked"]),
    "raises": ("1 / 0", 1, ["forked", "ZeroDivisionError: division by zero"]),
    "exits": ("sys.exit(7)", 7, ["forked"]),
    "says why it exits": ("sys.exit('why')", 1, ["forked", "why"]),
    "forks again": ("if os.fork(): os.wait()\n    else: print('again')", 0, ["forked", "again"]),
}


@pytest.mark.parametrize("how", FORKS)
def test_a_forked_process_that_falls_through_ends(pool: WorkerPool, how: str) -> None:
    does, code, says = FORKS[how]
    started = time.monotonic()
    pool.run_cell(
        f"import os, sys\nchild = os.fork()\nif not child:\n    print('forked')\n    {does}\n"
        "else:\n    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])",
        screen=NullScreen(),
    )
    assert time.monotonic() - started < 8
    assert list(pool.pull(["ended"])["ended"]) == [code, code]
    assert pool.last_run is not None
    for out in pool.last_run.outputs.values():
        rows = out.log.read_text().splitlines()
        assert [row for row in rows if not row.startswith(("Traceback", " "))] == says
    pool.run_cell("print('next')", screen=NullScreen())
    assert all(out.log.read_text() == "next\n" for out in pool.last_run.outputs.values())


@pytest.mark.parametrize("how", ["comes to the end", "raises", "says why it exits"])
def test_a_forked_process_that_falls_through_a_script_ends(tmp_path: Path, how: str) -> None:
    does, code, says = FORKS[how]
    (tmp_path / "forks.py").write_text(
        f"import os, sys\nchild = os.fork()\nif not child:\n    print('forked')\n    {does}\n"
        "else:\n    print('ended', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    with warm.pool(1) as pool:
        started = time.monotonic()
        pool.run_script(str(tmp_path / "forks.py"), timeout=30, screen=NullScreen())
        assert time.monotonic() - started < 20
        assert pool.last_run is not None
        rows = pool.last_run.outputs[0].log.read_text().splitlines()
    assert [row for row in rows if not row.startswith(("Traceback", " "))] == [*says, f"ended {code}"]


# -- what a report says, and how much ----------------------------------------------------------------


def report_of(pool: WorkerPool, code: str) -> nbddp.WorkerFailed:
    with pytest.raises(nbddp.WorkerFailed) as raised:
        pool.run_cell(code, screen=NullScreen())
    return raised.value


GROUP = """async def one():
    raise ValueError("bad\\nbatch")
async def two():
    try: 1 / 0
    except ZeroDivisionError as e: raise KeyError("k") from e
many = ExceptionGroup("many", [TypeError(i) for i in range(20)])
try:
    import asyncio
    async with asyncio.TaskGroup() as group:
        group.create_task(one()); group.create_task(two())
except ExceptionGroup as e:
    raise ExceptionGroup("all", [*e.exceptions, many])"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs ExceptionGroup")
def test_exceptions_of_a_group_are_told_each_with_its_lines(pool: WorkerPool) -> None:
    error = report_of(pool, GROUP)
    assert pool.last_run is not None
    said = "raised ExceptionGroup: all (3 sub-exceptions) (cell line 12)"
    assert str(error) in (f"rank 0 {said}", f"rank 1 {said}"), "whichever is the first"
    text = error.report
    first, second, third = (text.index(f"+---------------- {i} ----------------\n") for i in (1, 2, 3))
    assert '    | ---->    2     raise ValueError("bad\\nbatch")\n' in text[first:second]
    assert "    | ValueError: bad\n    | batch\n" in text[first:second]
    assert re.search(r"\| ---->    4 .*\n(.*\n)*.*direct cause of(.*\n)*.*\| ---->    5 ", text[second:third])
    assert "    |     | TypeError: 14\n    |     +---------------- ... --" in text[third:]
    assert "    |     | and 5 more exceptions\n" in text[third:]
    parts = error.cause.chain[-1].group
    assert [chain[-1].type for chain in parts] == ["ValueError", "KeyError", "ExceptionGroup"]
    assert [chain[0].type for chain in parts[1:]] == ["ZeroDivisionError", "ExceptionGroup"]
    assert "| KeyError: 'k'" in failures_of(pool.last_run)[0].exception


def test_a_chain_of_exceptions_says_how_each_came_of_the_one_before(pool: WorkerPool) -> None:
    code = "try:\n    try: 1 / 0\n    except Exception as e: raise KeyError('k') from e\nexcept KeyError: [][1]"
    text = report_of(pool, code).report
    joints = [line for line in text.splitlines() if line.startswith(("The above", "During", "Zero", "KeyError"))]
    assert [line.split()[0] for line in joints] == ["ZeroDivisionError:", "The", "KeyError:", "During"]
    long = report_of(pool, "e = None\nfor i in range(500):\n    try: raise KeyError(i) from e\n"
                           "    except KeyError as x: e = x\nraise e").report  # fmt: skip
    assert "… 480 earlier exceptions omitted\n" in long
    assert long.count("direct cause") == 19


HOSTILE = {
    "is neither true nor false": "def __bool__(self): raise RuntimeError('bool')",
    "is false": "def __bool__(self): return False",
    "is equal to nothing": "def __eq__(self, other): raise RuntimeError('eq')\n    __hash__ = None",
    "has no attributes": "def __getattribute__(self, name): raise RuntimeError(name)",
}


@pytest.mark.parametrize("how", HOSTILE)
def test_an_exception_with_code_of_its_own_leads(pool: WorkerPool, how: str) -> None:
    error = report_of(pool, f"class Odd(Exception):\n    {HOSTILE[how]}\nraise Odd('x')")
    assert re.fullmatch(r"rank \d raised Odd: x \(cell line \d\)", str(error)), "whichever is the first"


def test_an_exception_of_a_function_comes_out_as_itself_with_its_cause(pool: WorkerPool) -> None:
    class Coded(Exception):
        def __init__(self, code: int, text: str, *, extra: int) -> None:
            super().__init__(f"{code}: {text}")
            self.code, self.extra = code, extra

    class Missing(OSError):
        def __init__(self, path: str) -> None:
            super().__init__(2, "missing", path)

    class Strict(Exception):
        def __new__(cls, one: int, two: int) -> Strict:
            return super().__new__(cls, one)

        def __init__(self, one: int, two: int) -> None:
            pass

    def fails(how: str) -> None:
        try:
            [][1]
        except IndexError as e:
            if how == "lock":
                import threading

                e.lock = threading.Lock()  # type: ignore[attr-defined]
            raise {"coded": Coded(3, "text", extra=4), "missing": Missing("x.txt"), "strict": Strict(1, 2),
                   "lock": Coded(3, "text", extra=4)}[how] from e  # fmt: skip

    with pytest.raises(Coded, match="3: text") as coded:
        pool.run(fails, "coded")
    assert (coded.value.code, coded.value.extra, coded.value.args) == (3, 4, ("3: text",))
    assert isinstance(coded.value.__cause__, nbddp.WorkerFailed)
    assert isinstance(coded.value.__cause__.__cause__, IndexError)
    with pytest.raises(Missing) as missing:
        pool.run(fails, "missing")
    assert (missing.value.errno, missing.value.filename) == (2, "x.txt")
    with pytest.raises(Strict) as strict:
        pool.run(fails, "strict")
    assert strict.value.args == (1,)
    with pytest.raises(Coded):  # its cause cannot travel
        pool.run(fails, "lock")


def test_a_ddp_model_that_is_pulled_says_what_to_pull(pool: WorkerPool) -> None:
    pool.run_cell(
        "import torch, torch.distributed as dist\ndist.init_process_group()\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2)); held = [model]",
        screen=NullScreen(),
    )
    for name in ("model", "held"):
        assert "use its .module" in pool.pull([name])[name][0].why


RECURSIONS = {
    "itself": ("def f(n): return f(n + 1)\nf(0)", "frames omitted, of f"),
    "each other": ("def f(n): return g(n)\ndef g(n): return f(n + 1)\nf(0)", "frames omitted, of f, g"),
}


@pytest.mark.parametrize("how", RECURSIONS)
def test_a_recursion_is_reported_in_a_few_lines(pool: WorkerPool, how: str) -> None:
    code, words = RECURSIONS[how]
    text = report_of(pool, code).report
    assert "raised RecursionError" in text
    assert words in text
    assert len(text.splitlines()) < 50


LARGE = """from IPython.display import HTML, display
display(HTML('<i>' + 'h' * 26_000_000))
handle = display({'text/plain': 'p'}, raw=True, display_id=True)
for i in range(3): handle.update({'text/plain': f'{i} ' * 100_000}, raw=True)
'y' * 500_000"""


def test_what_is_shown_has_a_bound_and_the_whole_is_in_a_file(
    pool: WorkerPool, shows: Callable[..., list[str]]
) -> None:
    rows = shows(LARGE)
    assert sum(map(len, rows)) < 150_000
    places = [Path(found[1]) for row in rows if (found := re.search(r"omitted; the whole: (\S+)", row))]
    assert [path.name for path in places] == [f"rank0.whole{i}.txt" for i in (1, 2, 3)], "both ranks show the same"
    assert places[1].read_text() == "2 " * 100_000
    assert places[2].read_text() == repr("y" * 500_000)
    assert rows[0].startswith("ranks 0–1     │ <IPython.core.display.HTML object>")
    assert "… text/html of 26,000,003 characters omitted" in rows[1]


def test_a_message_has_a_bound_in_a_report_and_is_whole_in_a_file(pool: WorkerPool) -> None:
    error = report_of(pool, "raise ValueError('first\\n' + 'x' * 3_000_000)")
    assert re.fullmatch(r"rank \d raised ValueError: first \(cell line 1\)", str(error)), "whichever is the first"
    assert re.match(r"rank \d raised ValueError \(cell line 1\):\n    first\n    xxx", error.report)
    assert len(error.report) < 20_000
    found = re.search(r"… ([\d,]+) characters omitted; the whole: (\S+) …", error.report)
    assert found
    assert Path(found[2]).read_text() == "first\n" + "x" * 3_000_000
    lines = report_of(pool, "raise ValueError('\\n'.join(map(str, range(10_000))))").report.splitlines()
    assert len(lines) < 120
    note = report_of(pool, "e = ValueError('n'); e.__notes__ = ['note ' * 10_000, *['b'] * 100]; raise e").report
    assert len(note) < 20_000
    assert len(str(report_of(pool, "raise ValueError('x' * 10_000)"))) < 600


LONG = "'n' * 3_000_000"
NAMED = {  # what a program names, which a report names too
    "a class": f"raise type({LONG}, (Exception,), {{}})('it')",
    "a function": f"def f(): 1 / 0\nf.__code__ = f.__code__.replace(co_name={LONG})\nf()",
    "a file": f"exec(compile('1 / 0', {LONG}, 'exec'))",
    "a thread": (
        "import asyncio, os, threading, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        f"def waits():\n    threading.current_thread().name = {LONG}\n    dist.barrier()\n"
        "if os.environ['RANK'] == '1': await asyncio.to_thread(waits)"
    ),
    "a group": (
        "import os, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        f"group = dist.new_group(group_desc={LONG})\n"
        "if os.environ['RANK'] == '1': dist.barrier(group)"
    ),
}


@pytest.mark.parametrize("what", NAMED)
def test_a_name_has_a_bound_in_a_report_and_a_live_view(pool: WorkerPool, what: str) -> None:
    screen = Impatient("no progress")
    with pytest.raises(nbddp.RunFailed) as caught:
        pool.run_cell(NAMED[what], hang_after=0.3, timeout=20, screen=screen)
    assert all(len(shown) < 10_000 for shown in screen.shown)
    assert len(caught.value.report) < 25_000
    assert len(str(caught.value)) < 10_000
    pool.ensure(LaunchSpec())
