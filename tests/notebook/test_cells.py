"""`%%ddp` in a real kernel: the pool, state, output, and that Python stays Python."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import nbddp.errors
from tests.kernels import Kernel, Shown
from tests.pool.faults import needs_recorder


def test_cell_runs_on_every_rank_and_names_survive(four: Kernel) -> None:
    assert four.run("%%ddp\nimport os\nrank = int(os.environ['RANK'])").ok
    shown = four.run("%%ddp\nprint('I am', rank)")
    assert shown.text() == "".join(f"rank {r} │ I am {r}\n" for r in range(4))


def test_a_cell_that_is_indented_runs_as_the_notebooks_own(four: Kernel) -> None:
    lines = "    for word in 'ab':\n        print(word, end='')"
    assert four.run(lines).text() == "ab"
    assert four.run(f"%%ddp\n\n{lines}").text() == "ranks 0–3 │ ab\n"
    own, on_ranks = four.run(f"{lines}\nprint()"), four.run(f"%%ddp\n{lines}\nprint()")
    assert own.ok == on_ranks.ok, "an error since IPython 9"
    assert own.ok or "IndentationError: unexpected indent (cell line 2)" in on_ranks.error


def test_kernel_never_imports_torch(four: Kernel) -> None:
    four.run("%%ddp\nimport torch\nx = torch.ones(2)")
    assert four.run("import sys; print('torch' in sys.modules)").text() == "False\n"


def test_a_line_without_a_program_is_about_the_pool(four: Kernel) -> None:
    assert four.run("%%ddp --help").text() == four.run("%%ddp --help\n\n# below\n").text()
    assert four.run("%%ddp --help").text().startswith("usage: %%ddp [options]")
    assert four.run("# above\n\n%%ddp --nproc 2").text() == (
        "pool shrunk from 4 to 2 workers; ranks 0–1 keep their variables\nworld size 2 = 1 node × 2 processes; on CPU\n"
    )
    assert four.run("%%time\n%%ddp --nproc 4\n \n# below").text().startswith("pool grown from 2 to 4 workers;")
    assert four.run("%%ddp\nkept = 1").ok
    assert four.run("%%ddp --fresh").text() == (
        "world size 4 = 1 node × 4 processes; on CPU\nall workers restarted; their variables are lost\n"
    )
    for line, told in {
        "": "%ddp start", "--ranks 0": "%ddp start", "--nproc 2 -o x": "%ddp start", "-- 1": "%ddp start",
        "--timings": "%ddp timings for the cell before", "--memory": "%ddp memory --timeline for the cell before",
    }.items():  # fmt: skip
        assert four.run(f"%%ddp {line}").evalue == (
            f"the cell under {f'%%ddp {line}'.rstrip()} is empty; write the program below the line, or run {told}"
        )
    assert four.run("%%ddp\nprint('kept' in globals())").text() == "ranks 0–3 │ False\n", "no refused line ran"


def test_comments_may_stand_above_the_line(four: Kernel) -> None:
    shown = four.run("# what it does\n\n# and why\n%%ddp --ranks 0\nprint('told')\n1 / 0")
    assert shown.text() == "rank 0 │ told\n"
    assert "(cell line 6)" in shown.error
    assert "5 print('told')" in shown.error
    assert not four.run("x = 1\n%%ddp\nprint(1)").ok, "as for every cell magic"


def test_a_cell_of_one_row_may_be_a_magic_without_its_sign(four: Kernel, tmp_path: Path) -> None:
    (tmp_path / "of_folder").touch()
    before = four.run("%%ddp\npwd").text()
    assert four.run(f"%%ddp\n# there\ncd {tmp_path}").text() == f"ranks 0–3 │ {tmp_path}\n"
    assert four.run("%%ddp -o folders\npwd\n").text() == f"ranks 0–3 Out │ '{tmp_path}'\n"
    assert four.run("print(set(folders))").text() == f"{{'{tmp_path}'}}\n"
    assert four.run("%%ddp --ranks 1\nls *folder").text() == "rank 1 │ of_folder\n"
    four.run("%%ddp --ranks 1\nls = 3")
    assert four.run("%%ddp --ranks 0-1\nls").text() == "rank 0     │ of_folder\nrank 1 Out │ 3\n", "a name comes first"
    assert "NameError: name 'ls' is not defined (cell line 3)" in four.run("%%ddp --ranks 0\nx = 1\nls").error
    assert "no rank ran the cell" in four.run("%%ddp\nlist ..").error
    assert four.run(f"%%ddp\nimport os\nos.chdir({before.partition('│')[2].strip()})\nglobals().pop('ls', 0)").ok


def test_what_a_cell_leaves_does_not_depend_on_how_long_it_took(four: Kernel) -> None:
    """A saved notebook is compared output by output: the live view is always one, and empty in the end."""
    quick, slow = (four.run(f"%%ddp\nimport time; time.sleep({seconds})") for seconds in (0, 2.5))
    assert [o["data"] for o in quick.outputs] == [o["data"] for o in slow.outputs] == [{"text/plain": ""}]


def test_lint_reads_the_cells_that_ran_and_runs_nothing(four: Kernel) -> None:
    cell = "%%ddp\nimport torch.distributed as dist\nif False:\n    if dist.get_rank() == 0:\n        dist.barrier()"
    assert four.run(cell).ok
    number = four.run("print(len(In) - 2)").text().strip()
    for line in ("%ddp lint", f"%ddp lint In[{number}]", f"%ddp lint In[1-{number}]"):
        [shown] = four.run(line).outputs
        assert f"In[{number}]:5:9: error [collective-of-some-ranks] barrier()" in shown["data"]["text/plain"]
        assert "<code>collective-of-some-ranks</code>" in shown["data"]["text/html"]
    failed = four.run(f"# what hangs\n\n{cell}\n1 / 0")
    [shown] = four.run("%ddp lint").outputs
    assert f"In[{failed.number}]:7:9: error [collective-of-some-ranks] barrier()" in shown["data"]["text/plain"]
    refused = four.run("%ddp lint In[99999]")
    assert "'In[99999]' is not a cell that ran" in str(refused.error)


def test_a_silent_mistake_has_one_line_below_the_output_until_it_is_turned_off(four: Kernel) -> None:
    cell = """%%ddp
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
torch.manual_seed(0); ddp = DDP(torch.nn.Linear(4, 1)); head = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD([*ddp.parameters(), *head.parameters()], lr=0.1)
torch.manual_seed(dist.get_rank()); x = torch.randn(8, 4)
for step in range(3):
    optimizer.zero_grad(); head(ddp(x)).square().mean().backward(); optimizer.step()
dist.destroy_process_group()
print("done")
"""
    what = "DDP's optimizer also moves 2 parameters that DDP does not exchange (head.weight, head.bias)"
    line = f"{what}, and they differ between ranks; %%ddp --sanitize shows where\n"
    assert four.run(cell).text() == f"ranks 0–3 │ done\n{line}"
    assert four.run("%config DDPMagics.hints = False").ok
    assert four.run(cell).text() == "ranks 0–3 │ done\n"
    assert four.run("%config DDPMagics.hints = True").ok
    assert four.run(cell.replace("*head.parameters()", "")).text() == "ranks 0–3 │ done\n"


def test_pool_is_reused(four: Kernel) -> None:
    first = four.run("%%ddp -o pids\nimport os\nos.getpid()\n")
    assert first.ok
    four.run("%%ddp -o again\nos.getpid()")
    assert four.run("print(list(pids) == list(again))").text() == "True\n"


def test_shrunk_and_grown_pool_keeps_the_state_of_ranks_that_stay(four: Kernel) -> None:
    four.run("%%ddp\nkept = 'yes'")
    shrunk = four.run("%%ddp --nproc 2\nimport os\nprint(kept, os.environ['WORLD_SIZE'])")
    assert shrunk.text() == ("pool shrunk from 4 to 2 workers; ranks 0–1 keep their variables\nranks 0–1 │ yes 2\n")
    grown = four.run("%%ddp --nproc 4\nimport os\nprint(globals().get('kept'), os.environ['WORLD_SIZE'])")
    assert grown.text() == (
        "pool grown from 2 to 4 workers; ranks 0–1 keep their variables\nranks 0–1 │ yes 4\nranks 2–3 │ None 4\n"
    )


def test_fresh_starts_new_processes(four: Kernel) -> None:
    four.run("%%ddp -o before\nimport os; old = 1\nos.getpid()")
    assert four.run("%%ddp --fresh -o after\nimport os\n(os.getpid(), 'old' in globals())").ok
    result = four.run("print(not set(before) & {p for p, _ in after}, [o for _, o in after])").text()
    assert result == "True [False, False, False, False]\n"


def test_cell_is_main_with_its_own_argv(four: Kernel) -> None:
    shown = four.run("%%ddp -- --lr 0.1 'two words'\nimport sys\nprint(__name__, sys.argv[1:])")
    assert shown.text() == "ranks 0–3 │ __main__ ['--lr', '0.1', 'two words']\n"


def test_runs_on_some_ranks_only(four: Kernel) -> None:
    four.run("%%ddp\nhere = False")
    assert four.run("%%ddp --ranks 0,2-3\nhere = True\nprint('x')").text() == "ranks 0, 2–3 │ x\n"
    assert four.run("%%ddp\nprint(here)").text() == "ranks 0, 2–3 │ True\nrank 1       │ False\n"


def test_shows_chosen_ranks_only(four: Kernel) -> None:
    assert four.run("%%ddp --show 1\nimport os; print(os.environ['RANK'])").text() == "rank 1 │ 1\n"
    assert four.run("%%ddp --show none\nprint('x')").text() == ""


def test_equal_output_is_folded_and_results_are_shown(four: Kernel) -> None:
    shown = four.run("%%ddp\nimport os\nprint('same')\nint(os.environ['RANK']) // 2")
    assert shown.text() == ("ranks 0–1     │ same\nranks 0–1 Out │ 0\nranks 2–3     │ same\nranks 2–3 Out │ 1\n")


def test_stderr_is_marked(four: Kernel) -> None:
    shown = four.run("%%ddp\nimport sys; print('careful', file=sys.stderr)")
    assert shown.text("stderr") == "ranks 0–3 stderr │ careful\n"


def test_output_of_subprocesses_and_c_is_shown(four: Kernel) -> None:
    shown = four.run("%%ddp\nimport os, subprocess\nsubprocess.run(['echo', 'child'])\nos.write(1, b'raw\\n');")
    assert "child" in shown.text()
    assert "raw" in shown.text()


def test_output_of_c_at_the_very_end_of_a_cell_is_not_lost(four: Kernel) -> None:
    for i in range(25):
        assert four.run(f"%%ddp\nimport os\nos.write(1, b'last {i}\\n');").text() == f"ranks 0–3 │ last {i}\n"


def test_figures_stand_under_their_rank(four: Kernel) -> None:
    shown = four.run(
        "%%ddp\nimport os\nfrom IPython.display import HTML, display\n"
        "if os.environ['RANK'] in '13': display(HTML('<b>' + os.environ['RANK'] + '</b>'))"
    )
    kinds = [
        o.get("text") or o["data"]["text/html"] for o in shown.outputs if o.get("text") or "text/html" in o["data"]
    ]
    assert kinds == ["rank 1 │\n", "<b>1</b>", "rank 3 │\n", "<b>3</b>"]


TRAINED = """%%ddp --memory
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
for _ in range(8): model(torch.randn(8, 100)).sum().backward()
dist.destroy_process_group()"""
HELD = """import ctypes, gc
def of_kind(module, name):
    return sum((type(o).__module__, type(o).__name__) == (module, name) for o in gc.get_objects())
gc.collect()
getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
print(of_kind("matplotlib.figure", "Figure"), of_kind("matplotlib.axis", "XAxis"))"""

FIGURES = "print(sum('figure' in dir(o) for o in Out.values()))"


@needs_recorder
def test_what_a_notebook_keeps_of_its_figures_is_neither_a_figure_nor_much(four: Kernel) -> None:
    """`Out` keeps what cells return: 7 to 17 MiB for each, if that were a figure."""
    kernel = psutil.Process(four.pid)
    often, once = ("timings", "memory --timeline"), ("topology", "bench --max 4KiB --repeat 2 --warmup 1")
    shown_before = int(four.run(FIGURES).text())
    assert four.run(TRAINED).ok
    for line in (*often, *once):
        shown = four.run(f"%ddp {line}")
        assert shown.ok, shown.error
        assert "image/png" in shown.displays[-1], line
    assert four.run(HELD).text() == "0 0\n"
    before = kernel.memory_full_info().uss
    for line in often:
        assert four.run(f"%ddp {line}").ok
    assert four.run(HELD).text() == "0 0\n"
    assert int(four.run(FIGURES).text()) - shown_before == 6
    assert kernel.memory_full_info().uss - before < 16 << 20


def test_progress_bar_is_one_line(four: Kernel) -> None:
    shown = four.run("%%ddp --ranks 0\nfrom tqdm import tqdm\nimport time\nfor _ in tqdm(range(50)): time.sleep(0.005)")
    lines = shown.text("stderr").splitlines()
    assert len(lines) == 1
    assert re.match(r"rank 0 stderr │ 100%\|█+\| 50/50 ", lines[0])


def test_output_arrives_while_the_cell_runs(four: Kernel) -> None:
    shown = four.run("%%ddp\nimport time\nprint('early'); time.sleep(1.5); print('late')")
    seen = [at for at, kind, c in shown.messages if kind == "update_display_data" and "early" in str(c["data"])]
    assert seen
    assert seen[0] < shown.messages[-1][0] - 0.7
    assert shown.outputs[0]["data"] == {"text/plain": ""}, "the live view leaves nothing behind"


LONG = "%%ddp\nimport os\nfor i in range(15): print(os.environ['RANK'], 'line', i)"


def test_long_output_stays_as_a_page_with_the_block_as_its_text(four: Kernel) -> None:
    first, second = four.run(LONG), four.run(LONG)
    (stays,) = first.displays
    assert stays["text/plain"].count("\n") == 60
    assert stays["text/plain"].startswith("rank 0 │ 0 line 0\n       │ 0 line 1\n")
    assert stays["text/html"].count('class="nbddp-rank"') == 4
    assert "data-sent" not in stays["text/html"]
    assert first.text() == ""
    assert second.displays == first.displays, "the same output is the same page"


def test_captured_output_is_text(four: Kernel) -> None:
    assert four.run(LONG.replace("%%ddp", "%%capture said\n%%ddp")).ok
    look = "print(said.stdout.count('line'), any('nbddp-tabs' in str(o.data) for o in said.outputs))"
    assert four.run(look).text() == "60 False\n"


def test_attach_shows_the_output_and_the_error_of_the_last_run_again(four: Kernel) -> None:
    failed = four.run(LONG + "\nassert os.environ['RANK'] != '2', 'no labels'")
    again = four.run("%ddp attach")
    assert again.displays == failed.displays
    assert "rank 2 · 15 lines · raised AssertionError: no labels" in again.displays[0]["text/html"]
    assert not again.ok
    assert again.evalue == failed.evalue
    short = four.run("%%ddp\nprint('short')")
    assert four.run("%ddp attach").text() == short.text() == "ranks 0–3 │ short\n"


def test_long_output_is_cut_in_the_block_and_whole_on_disk(four: Kernel) -> None:
    shown = four.run("%%ddp\nimport os\nfor i in range(20_000): print(os.environ['RANK'], 'line', i)", timeout=120)
    assert shown.ok
    (stays,) = shown.displays
    text = stays["text/plain"]
    for rank in range(4):
        assert f"rank {rank} │ {rank} line 0\n" in text
        assert f"{rank} line 19999\n" in text
        log = re.search(rf"full output: (\S.*rank{rank}\.log)", text)
        assert log
        assert Path(log[1]).read_text() == "".join(f"{rank} line {i}\n" for i in range(20_000))
    assert text.count("19,900 lines omitted") == 4
    assert sum(len(str(c)) for _, _, c in shown.messages) < 3_000_000, "the front end is not flooded"


def test_nothing_is_lost_in_many_short_cells(four: Kernel) -> None:
    for i in range(30):
        assert four.run(f"%%ddp\nprint({i})").text() == f"ranks 0–3 │ {i}\n"


def test_top_level_await_magics_and_shell_commands(four: Kernel) -> None:
    shown = four.run(
        "%%ddp --ranks 1\nimport asyncio\nawait asyncio.sleep(0.01)\n%time y = 3\n!echo from the shell\nprint(y)"
    )
    assert shown.ok, shown.error
    assert "Wall time" in shown.text()
    assert "from the shell" in shown.text()
    assert "loop" in four.run("%%ddp --ranks 0\n%%timeit -n1 -r1\npass").text()


def test_exit_does_not_take_the_worker_away(four: Kernel) -> None:
    four.run("%%ddp\nkept = 5")
    for way in ("exit()", "quit()", "import sys; sys.exit()", "import sys; sys.exit(0)"):
        shown = four.run(f"%%ddp\n{way}")
        assert shown.ok, shown.error
        assert shown.text("stderr") == ""
    assert four.run("%%ddp\nprint(kept)").text() == "ranks 0–3 │ 5\n"


def test_exit_code_is_a_failure(four: Kernel) -> None:
    shown = four.run("%%ddp\nimport os, sys\nif os.environ['RANK'] == '2': sys.exit(3)")
    assert shown.evalue == "rank 2 exited with code 3 (cell line 3)"


def test_completion_knows_the_names_of_rank_0(four: Kernel) -> None:
    four.run("%%ddp\nimport torch\nmy_long_name = torch.nn.Linear(2, 2)")
    cell = "%%ddp --nproc 4\nif True:\n    torch.nn.Lin"
    found = four.ask(four.client.complete, cell, len(cell))
    assert cell[: found["cursor_start"]] + found["matches"][0] == cell + "ear"
    cell = "%%ddp\nprint(my_long"
    found = four.ask(four.client.complete, cell, len(cell))
    assert found["matches"] == ["my_long_name"]
    assert cell[found["cursor_start"] : found["cursor_end"]] == "my_long"
    cell = f"\n%%time\n{cell}"
    assert four.ask(four.client.complete, cell, len(cell))["matches"] == ["my_long_name"]


def test_completion_knows_names_after_a_subcommand_and_their_kinds(four: Kernel) -> None:
    four.run("mine_here = 1\nother_here = 2")
    four.run("%%ddp\nimport torch\nmine_there = torch.nn.Linear(2, 2)\nmine_too = 3\ndef mine_to_call(): ...")
    expected = {
        "%ddp push mine": ["mine_here"], "%ddp pull mine_t": ["mine_there", "mine_to_call", "mine_too"],
        "%ddp compare mine_too mine_t": ["mine_there", "mine_to_call"], "%ddp pull --ra": ["--ranks"],
        "%ddp prove mine_to": ["mine_to_call", "mine_too"],
        "%ddp bench all_g": ["all_gather"], "%ddp bench --min al": [],
        "%ddp memory mine_th": ["mine_there"],
    }  # fmt: skip
    for line, names in expected.items():
        found = four.ask(four.client.complete, line, len(line))
        assert [m for m in found["matches"] if names or m == "all_gather"] == names, line
    kinds = {
        "mine_to_c": "function", "mine_th": "instance", "torch.nn.Line": "class", "impor": "keyword",
        "torch.nn.functio": "module", "mine_there.weig": "instance", "mine_there.forw": "function",
    }  # fmt: skip
    for text, kind in kinds.items():
        cell = f"%%ddp\n{text}"
        found = four.ask(four.client.complete, cell, len(cell))
        assert found["metadata"]["_jupyter_types_experimental"][0]["type"] == kind, text


def test_completion_knows_the_options(four: Kernel) -> None:
    for line, expected in (("%%ddp --fre", "--fresh"), ("%ddp topo", "topology"), ("%%ddp --visible o", "own")):
        found = four.ask(four.client.complete, line, len(line))
        assert found["matches"] == [expected]
    line = "%%time\n%%ddp --fre"
    assert four.ask(four.client.complete, line, len(line))["matches"] == ["--fresh"]


@pytest.mark.parametrize("jedi", [True, False])
def test_completion_knows_what_the_package_has(four: Kernel, jedi: bool) -> None:
    made = "import nbddp\npool = nbddp.Pool(2)\npanel = nbddp.Panel(pool)\n"
    before = four.run(made + "print(get_ipython().Completer.use_jedi)").text().strip()
    four.run(f"%config Completer.use_jedi = {jedi}")
    offered, of_pool, of_panel = (
        {re.split(r"[.]", name)[-1] for name in four.ask(four.client.complete, line, len(line))["matches"]}
        for line in ("nbddp.", "pool.", "panel.")
    )
    argument = four.ask(four.client.complete, "nbddp.Pool(ssh", 14)["matches"]
    four.run(f"%config Completer.use_jedi = {before}")
    assert argument == ["ssh_config="], "an option of a capability"
    assert of_pool == {name for name in dir(nbddp.Pool) if not name.startswith("_")}, "no method of its inner pool"
    assert of_panel == {"close", "pool"}
    assert offered == {*nbddp.__all__}, "also what is imported when it is first used, and no other module"


def test_every_error_can_be_caught_by_a_name_of_the_package() -> None:
    made = {
        name for name, value in vars(nbddp.errors).items() if isinstance(value, type) and issubclass(value, Exception)
    }
    assert made <= {*nbddp.__all__}


def test_a_pool_shows_itself_wherever_it_was_imported_from() -> None:
    lines = (
        "from nbddp import Pool",
        "import nbddp.capabilities.panel.panel as drawn",
        "drawn.shown = lambda pool: type(pool).__name__",
        "print(Pool()._repr_mimebundle_())",
    )
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, stdout=-1).stdout == b"WorkerPool\n"


def test_tooltips_know_the_objects_of_rank_0(four: Kernel) -> None:
    four.run("%%ddp\nimport torch")
    cell = "%%ddp\ntorch.nn.Linear(3, 4)"
    found = four.ask(four.client.inspect, cell, cell.index("Linear") + 3)
    assert "affine linear transformation" in found["data"]["text/plain"]
    cell = f"%%time\n{cell}"
    found = four.ask(four.client.inspect, cell, cell.index("Linear") + 3)
    assert "affine linear transformation" in found["data"]["text/plain"]
    shown = four.run("%%ddp\ntorch.nn.Linear?")
    assert any("affine linear transformation" in d.get("text/plain", "") for d in shown.displays)


def test_load_brings_a_file_into_the_cell_and_the_cell_stays_one_for_the_ranks(four: Kernel, tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("width = 8\n")
    for above in ("%%ddp --nproc 4", "%%time\n%%ddp"):
        shown = four.run(f"{above}\n%load {file}")
        assert inputs(shown) == [(f"{above}\n# %load {file}\nwidth = 8\n", True)]
    assert inputs(four.run("%%ddp\nget_ipython().set_next_input('width')")) == [("%%ddp\nwidth", False)]
    assert inputs(four.run("%%ddp\n1 + 1")) == []


def test_load_keeps_the_line_of_the_cell_that_runs_however_it_came_to_run(four: Kernel, tmp_path: Path) -> None:
    """In no history, in a magic that nbddp does not know, in a program."""
    file = tmp_path / "net.py"
    file.write_text("width = 8\n")
    load, loaded = f"%load {file}", f"# %load {file}\nwidth = 8\n"
    four.run("%%ddp --nproc 4 --ranks 0\n1")
    silent = four.client.execute(f"%%ddp\n{load}", store_history=False)
    assert inputs(four.collect(str(silent))) == [(f"%%ddp\n{loaded}", True)], "and not with that of the cell before"
    four.run("four = 4")
    assert inputs(four.run(f"%%ddp --nproc {{four}}\n{load}")) == [(f"%%ddp --nproc {{four}}\n{loaded}", True)]
    magic = "get_ipython().register_magic_function(lambda line, cell: get_ipython().run_cell(cell), 'cell', 'unknown')"
    four.run(magic)
    assert inputs(four.run(f"%%unknown\n%%ddp\n{load}")) == [(f"%%unknown\n%%ddp\n{loaded}", True)]
    program = f"get_ipython().run_cell_magic('ddp', '--nproc 4', {load!r})"
    assert inputs(four.run(program)) == [(f"%%ddp --nproc 4\n{loaded}", True)]


def inputs(shown: Shown) -> list[tuple[str, bool]]:
    """(text, whether it replaces the cell) of the cells that the front end is asked to make."""
    asked = shown.reply["payload"]
    return [(p["text"], p["replace"]) for p in asked if p["source"] == "set_next_input"]


def test_line_numbers_are_those_of_the_cell(four: Kernel) -> None:
    shown = four.run("%%ddp\n\ndef f():\n    return 1 / 0\n\nf()")
    number = shown.number
    assert "(cell line 4, in f)" in shown.evalue
    assert f"Cell In[{number}], line 6\n" in shown.error
    assert "---->    4     return 1 / 0" in shown.error


def errors(shown: Shown) -> str:
    """Also those that a magic has shown and not passed on, as `%%time` of IPython 7 has it."""
    lines = [line for o in shown.outputs for line in o.get("traceback", ())]
    return shown.error or re.sub(r"\x1b\[[\d;]*m", "", "\n".join(lines))


def test_line_numbers_count_what_is_above_the_magic_line(four: Kernel) -> None:
    said = errors(four.run("\n%%time\n%%ddp\n\n1 / 0"))
    assert "(cell line 5)" in said
    assert re.search(r"         3 # %%ddp\n         4 ?\n---->    5 1 / 0", said)
    assert "invalid syntax (cell line 3); no rank" in errors(four.run("%%time\n%%ddp\n1 +\n"))
    again = four.run("code = '1 / 0'\nget_ipython().run_cell_magic('ddp', '', code)")
    assert "(cell line 2)" in again.error


def test_error_names_rank_exception_line_and_the_others(four: Kernel) -> None:
    shown = four.run("%%ddp\nimport os\nif os.environ['RANK'] == '1':\n    raise ValueError('bad batch')")
    assert shown.reply["ename"] == "WorkerFailed"
    assert shown.evalue == "rank 1 raised ValueError: bad batch (cell line 4)"
    assert "ranks 0, 2–3: finished the cell" in shown.error


def test_first_failure_in_time_is_the_one_named(four: Kernel) -> None:
    shown = four.run(
        "%%ddp\nimport os, time\nr = int(os.environ['RANK'])\ntime.sleep(0.15 if r != 3 else 0)\nraise KeyError(r)"
    )
    assert shown.evalue.startswith("rank 3 raised KeyError: 3")
    assert "rank 0: also raised KeyError: 0" in shown.error


def test_failure_while_others_wait_in_a_collective_is_not_lost(four: Kernel) -> None:
    began = time.monotonic()
    shown = four.run(
        "%%ddp\nimport torch, torch.distributed as dist\ndist.init_process_group()\n"
        "if dist.get_rank() == 2: raise RuntimeError('the cause')\ndist.all_reduce(torch.ones(1))"
    )
    assert shown.evalue.startswith("rank 2 raised RuntimeError: the cause")
    assert time.monotonic() - began < 20
    again = four.run(
        "%%ddp\nimport torch, torch.distributed as dist\ndist.init_process_group()\n"
        "t = torch.ones(1); dist.all_reduce(t); print(t.item()); dist.destroy_process_group()"
    )
    assert "ranks 0–3 │ 4.0\n" in again.text(), again.error


def test_stop_ends_python_code_and_keeps_state(four: Kernel) -> None:
    four.run("%%ddp\nkept = 'still'")
    cell = four.send("%%ddp\nimport time\nprint('go')\nwhile True: time.sleep(0.01)")
    _wait_for_live(four, "go")
    four.interrupt()
    shown = four.collect(cell)
    assert shown.reply["ename"] == "RunStopped"
    assert four.run("%%ddp\nprint(kept)").text() == "ranks 0–3 │ still\n"


def test_dead_worker_is_named_and_replaced(four: Kernel) -> None:
    four.run("%%ddp\nkept = 1")
    shown = four.run("%%ddp\nimport os\nif os.environ['RANK'] == '3': os.kill(os.getpid(), 9)")
    assert shown.evalue.startswith("rank 3 died: killed by SIGKILL")
    after = four.run("%%ddp\nprint('kept' in globals())")
    assert after.text() == "rank 3 is new and empty\nranks 0–2 │ True\nrank 3    │ False\n"


def _wait_for_live(kernel: Kernel, text: str) -> None:
    while True:
        message = kernel.client.get_iopub_msg(timeout=30)
        if message["msg_type"] == "update_display_data" and text in str(message["content"]["data"]):
            return


MEET = "import os, time, torch, torch.distributed as dist\ndist.init_process_group()\nrank = dist.get_rank()\n"


@needs_recorder
def test_stop_frees_a_stuck_collective_and_keeps_state(four: Kernel) -> None:
    four.run("%%ddp\nkept = 'still'")
    cell = four.send(f"%%ddp\n{MEET}if rank == 3: time.sleep(600)\ndist.all_reduce(torch.ones(1))")
    _wait_for_live(four, "waiting in all_reduce #1 for rank 3)")
    four.interrupt()
    shown = four.collect(cell)
    assert shown.reply["ename"] == "RunStopped"
    assert "rank 3: cell line 5, still running; interrupted, variables are kept" in shown.error
    assert "are lost" not in shown.error
    meet = "t = torch.ones(1); dist.all_reduce(t); print(kept, t.item()); dist.destroy_process_group()"
    again = four.run(f"%%ddp\n{MEET}{meet}")
    assert again.text() == "ranks 0–3 │ still 4.0\n", again.error


@needs_recorder
def test_deadlock_is_shown_as_a_table_and_stacks_tell_more(four: Kernel) -> None:
    shown = four.run(f"%%ddp --hang-after 0.5\n{MEET}if rank != 2:\n    dist.all_reduce(torch.ones(1))")
    assert shown.reply["ename"] == "RunHung"
    words = "ranks 0–1, 3 wait in all_reduce #1 (line 6); rank 2 has finished the cell without calling it"
    assert shown.evalue == f"deadlock: {words}"
    assert "     2  –            finished the cell" in shown.error
    assert "0–1, 3  cell line 6  waiting in all_reduce #1 for rank 2  unblocked, variables are kept" in shown.error
    stacks = four.run("%ddp stacks")
    text = stacks.displays[0]["text/plain"]
    assert "when the last run ended:" in text
    assert words in text
    assert "ranks 0–1, 3:\n  Cell In[" in text
    assert four.run("%%ddp\nprint('on')").text() == "ranks 0–3 │ on\n"


@needs_recorder
def test_live_status_says_who_is_waited_for(four: Kernel, tmp_path: Path) -> None:
    comes = f"while rank == 1 and not os.path.exists({str(tmp_path / 'seen')!r}): time.sleep(0.05)\n"
    cell = four.send(f"%%ddp\n{MEET}{comes}dist.barrier(); dist.destroy_process_group()")
    _wait_for_live(four, "waiting in barrier #1 for rank 1)")
    (tmp_path / "seen").touch()
    assert four.collect(cell).ok


def test_timeout_and_never(four: Kernel) -> None:
    shown = four.run("%%ddp --timeout 0.5 --hang-after never\nimport time; time.sleep(600)")
    assert shown.reply["ename"] == "RunTimedOut"
    assert shown.evalue == "the run took longer than --timeout 0.5"
    assert "  0–3  cell line 2  running  unblocked, variables are kept" in shown.error


def test_attempts_are_told_as_they_fail(four: Kernel) -> None:
    shown = four.run(
        "%%ddp --max-restarts 2\nimport os\nattempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "if attempt < 2 and os.environ['RANK'] == '1': raise ValueError('not yet')\nprint('attempt', attempt)"
    )
    assert shown.ok, shown.error
    assert [line for line in shown.text().splitlines() if line.startswith("attempt")] == [
        f"attempt {i} of 3: rank 1 raised ValueError: not yet (cell line 4); restarting all workers" for i in (1, 2)
    ]
    assert shown.text().endswith("ranks 0–3 │ attempt 2\n")


def test_a_forked_child_does_not_end_groups_that_are_garbage_here(four: Kernel) -> None:
    """A data loader's worker that collects its parent's garbage would wait for the threads of a process group, which it
    does not have."""
    code = """%%ddp -o codes
import gc, multiprocessing, torch.distributed as dist
dist.init_process_group("gloo")
class Held: pass
held = Held()
held.itself, held.group = held, dist.group.WORLD
dist.destroy_process_group()
gc.disable()
del held
child = multiprocessing.get_context("fork").Process(target=gc.collect)
child.start()
child.join(20)
code = child.exitcode
if code is None: child.kill()
gc.enable()
code"""
    assert four.run(code).ok
    assert four.run("list(codes)").displays[0]["text/plain"] == "[0, 0, 0, 0]"


def test_a_rank_transforms_a_cell_once(kernel: Kernel) -> None:
    """ipykernel and IPython each ask for it, which 64 ranks on two cores notice."""
    shown = kernel.run(
        "%%ddp\nseen = []\ndef note(lines):\n    seen.append(lines)\n    return lines\n"
        "get_ipython().input_transformers_cleanup.append(note)"
    )
    assert shown.ok, shown.error
    shown = kernel.run("%%ddp --show 0\nprint(len(seen))\nget_ipython().input_transformers_cleanup.remove(note)")
    assert shown.text() == "rank 0 │ 1\n"
    assert kernel.run("%%ddp --show 0\n!echo still").text() == "rank 0 │ still\n"


def test_a_programs_garbage_is_collected_without_a_look_at_the_engine(kernel: Kernel) -> None:
    """After a failure each rank collects its garbage, which takes long if it goes through all that an engine is."""
    shown = kernel.run("%%ddp --show 0\nimport gc\nprint(any(o is get_ipython() for o in gc.get_objects()))")
    assert shown.text() == "rank 0 │ False\n"


def test_an_error_of_a_called_function_shows_its_frames_and_the_users(four: Kernel) -> None:
    made = "import nbddp\nown = nbddp.Pool(nproc=1)\ndef f():\n    raise ValueError('bad batch')\n"
    four.run(f"{made}def outer():\n    own.run(f)")
    reply = four.run("outer()").reply
    four.run("own.stop()")
    text = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(reply["traceback"]))
    assert reply["ename"] == "ValueError"
    assert text.splitlines()[-1].startswith("raised on rank 0 of 1") or sys.version_info < (3, 11)
    assert "(cell line 4, in f)" in text, "where the rank raised it"
    assert "own.run(f)" in text, "the user's own frames"
    assert "nbddp/" not in text, "no frame of the package"
