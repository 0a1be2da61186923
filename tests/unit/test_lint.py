"""`%ddp lint`: each rule on its own examples, what it must not say, sources, and the forms of its answer."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from nbddp.capabilities.completion.lines import complete_command
from nbddp.capabilities.lint import report, sources
from nbddp.capabilities.lint.linting import LintResult, chosen, lint
from nbddp.capabilities.lint.rule import MARK
from nbddp.capabilities.lint.rules import RULES
from nbddp.capabilities.lint.sources import Cell
from nbddp.capabilities.terminal import main as terminal
from nbddp.errors import BadInput
from tests import places

DOCS = places.ROOT / "docs" / "lint.md"
HEAD = """\
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
"""
SAVE = f'{HEAD}dist.init_process_group()\ntorch.save(torch.zeros(1), "a.pt")\ndist.destroy_process_group()\n'


def found(text: str, cells: bool = False) -> list[tuple[int, str]]:
    """(line, rule) of what all rules find in a script, or in one cell."""
    programs = sources.of_cells([Cell("In[1]", text)]) if cells else sources.of_script(text, "a.py")
    result = lint(programs, chosen())
    assert not result.unread
    return sorted((one.place.line, one.rule.name) for one in result.findings)


def rules(text: str) -> set[str]:
    return {name for _, name in found(HEAD + text)}


# -- the examples of the rules -----------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_a_wrong_example_is_flagged_at_its_line_and_by_no_other_rule(name: str) -> None:
    rule = RULES[name]
    marked = [(i, name) for i, row in enumerate(rule.wrong.split("\n"), 1) if MARK in row]
    assert marked
    assert found(rule.wrong, rule.cells) == marked


@pytest.mark.parametrize("name", RULES)
def test_a_right_example_is_silent(name: str) -> None:
    assert found(RULES[name].right, RULES[name].cells) == []


# ruff: noqa: E501 - programs in one line each
# -- what must not be said ---------------------------------------------------------------------------

WRAP = "dist.init_process_group()\nmodel = DDP(torch.nn.Linear(1, 1))\n"
LOADER = "sampler = DistributedSampler(data)\nloader = DataLoader(data, sampler=sampler)\n"
STEPS = "for x in loader:\n        model(x).sum().backward()\n"
HEALTHY = {
    "the other ranks call it elsewhere": "rank = dist.get_rank()\nif rank != 0:\n    dist.barrier()\nload()\n"
    "if rank == 0:\n    dist.barrier()\n",
    "in both branches": "if dist.get_rank() == 0:\n    dist.broadcast(x, 0)\nelse:\n    dist.broadcast(y, 0)\n",
    "a function of the other branch may call it": "if dist.get_rank() == 0:\n    dist.barrier()\nelse:\n    helper()\n",
    "of a group": "if dist.get_rank() < 2:\n    dist.all_reduce(x, group=half)\n",
    "-1 asks whether there are ranks": "if args.local_rank != -1:\n    dist.barrier()\n",
    "the guard is one of two conditions": "def evaluate(sharded):\n    if not sharded and dist.get_rank() != 0:\n"
    "        return\n    if sharded:\n        dist.broadcast(x, 0)\n",
    "saved under a guard of another module": "from tools import is_main\nif is_main():\n    torch.save(x, 'a.pt')\n",
    "saved below a return": "def save():\n    if dist.get_rank():\n        return\n    torch.save(x, 'a.pt')\nsave()\n",
    "saved to a file of the rank": f"{WRAP}torch.save(x, f'{{dist.get_rank()}}.pt')\n",
    "saved to a file of the process": f"{WRAP}torch.save(x, tempfile.mkdtemp() + '/a.pt')\n",
    "saved into memory": f"import io\n{WRAP}buffer = io.BytesIO()\ntorch.save(x, buffer)\n",
    "saved by a flag whose value is by rank": f"{WRAP}first = dist.get_rank() == 0\nif first:\n    torch.save(x, 'a')\n",
    "saved where there is one rank": f"{WRAP}if not args.distributed:\n    torch.save(x, 'a.pt')\n",
    "saved by a function that nobody calls here": f"{WRAP}def save():\n    torch.save(x, 'a.pt')\n",
    "saved by the process that spawns": "import torch.multiprocessing as mp\ndef main(rank):\n    dist.init_process_group()\n"
    "if __name__ == '__main__':\n    torch.save(x, 'a.pt')\n    mp.spawn(main, nprocs=2)\n",
    "set_epoch by another function": f"from tools import begin\n{WRAP}{LOADER}for e in range(3):\n"
    f"    begin(sampler, e)\n    {STEPS}",
    "one epoch": f"{WRAP}{LOADER}for e in range(1):\n    {STEPS}",
    "a sampler that does not shuffle": f"{WRAP}{LOADER}".replace("(data)", "(data, shuffle=False)")
    + f"for e in range(3):\n    {STEPS}",
    "no training": f"{WRAP}{LOADER}for e in range(3):\n    for x in loader:\n        print(model(x))\n",
    "a sampler or none": "sampler = None if single else DistributedSampler(data)\n"
    "loader = DataLoader(data, shuffle=sampler is None, sampler=sampler)\n",
    "past DDP without gradient": f"{WRAP}with torch.no_grad():\n    y = model.module(x)\n",
    "past DDP without a step": f"{WRAP}model.module(x).sum().backward()\n",
    "past DDP, exchanged by hand": f"{WRAP}loss = model.module(x).sum()\nloss.backward()\n"
    "for p in model.parameters():\n    dist.all_reduce(p.grad)\noptimizer.step()\n",
    "a spawned rank is the local rank": "import torch.multiprocessing as mp\ndef main(rank):\n"
    "    torch.cuda.set_device(rank)\nif __name__ == '__main__':\n    mp.spawn(main, nprocs=2)\n",
    "on localhost": "os.environ['MASTER_ADDR'] = 'localhost'\ntorch.cuda.set_device(int(os.environ['RANK']))\n",
    "modulo": "torch.cuda.set_device(dist.get_rank() % 4)\n",
    "an attribute that is set below": "torch.cuda.set_device(args.local_rank)\nargs.local_rank = dist.get_rank()\n",
    "the flag before the forward": f"{WRAP}for x in xs:\n    if ddp:\n        model.require_backward_grad_sync = last\n"
    "    loss = model(x)\n    loss.backward()\n",
    "the flag after the backward": f"{WRAP}for x in xs:\n    loss = model(x)\n    loss.backward()\n"
    "    model.require_backward_grad_sync = True\n",
    "gathered for a metric": f"{WRAP}z = model(x)\nzs = [z]\ndist.all_gather(zs, z)\nprint(torch.cat(zs).mean().item())\n"
    "z.sum().backward()\n",
    "gathered in a no_grad function": f"{WRAP}@torch.no_grad()\ndef gather(z):\n    dist.all_gather(zs, z)\n    return zs\n",
    "the one rank's own optimizer": "net = torch.nn.Linear(1, 1)\no = torch.optim.SGD(net.parameters(), 0.1)\n"
    "if dist.get_rank() == 0:\n    o.step()\n",
    "an initialized group": "if not dist.is_initialized():\n    dist.init_process_group()\ndist.destroy_process_group()\n",
    "a generator": "import random\nrank = dist.get_rank()\nrandom.seed(0)\nrandom.shuffle(files)\nmine = files[rank::2]\n",
    "past DDP for a loss of its outputs": f"{WRAP}def outputs(m, x):\n    return m(x)\nloss = model.module.loss(outputs(model, x), y)\n"
    "loss.backward()\noptimizer.step()\n",
    "past DDP beside a forward elsewhere": f"from tools import run\n{WRAP}y = run(model, x)\nloss = model.module.head(y)\n"
    "loss.backward()\noptimizer.step()\n",
    "past DDP without data": f"{WRAP}loss = model.module.penalty()\nloss.backward()\noptimizer.step()\n",
    "past DDP in no_sync": f"{WRAP}with model.no_sync():\n    loss = model.module(x)\nloss.backward()\noptimizer.step()\n",
    "both halves in no_sync": f"{WRAP}with model.no_sync():\n    loss = model(x)\nwith model.no_sync():\n    loss.backward()\n",
    "a flag that is always True": f"{WRAP}loss = model(x)\nmodel.require_backward_grad_sync = True\nloss.backward()\n",
    "a loss added after wrapping": f"{WRAP}model.module.criterion = torch.nn.CrossEntropyLoss()\n",
    "wrapped again": f"{WRAP}net = model.module\nnet.head = torch.nn.Linear(1, 1)\nmodel = DDP(net)\n",
    "a norm of gradients": f"{WRAP}model(x).sum().backward()\nfor p in model.parameters():\n    n = p.grad.norm()\n"
    "    dist.all_reduce(n)\n    dist.all_reduce(p.grad.clone())\n",
    "gathered, the own one put back by a new list": f"{WRAP}z = model(x)\nzs = []\ndist.all_gather(zs, z)\n"
    "zs = [z if i == r else one for i, one in enumerate(zs)]\ntorch.cat(zs).sum().backward()\n",
    "loaded by one rank that tests": f"{WRAP}if dist.get_rank() == 0:\n    model.module.load_state_dict(best)\n    test(model)\n",
    "a step of another model of this name": "def probe():\n    net = torch.nn.Linear(1, 1)\n"
    "    o = torch.optim.SGD(net.parameters(), 0.1)\n    if dist.get_rank() == 0:\n        o.step()\n"
    "def main():\n    net = torch.nn.Linear(1, 1)\n    model = DDP(net)\nprobe()\nmain()\n",
    "the others go on to a helper": "def helper():\n    dist.broadcast(x, 0)\ndef main():\n    if dist.get_rank() == 0:\n"
    "        dist.broadcast(x, 0)\n        return\n    helper()\nmain()\n",
    "a function of the others": "def first():\n    if rank == 0:\n        dist.barrier()\ndef others():\n    dist.barrier()\n"
    "rank = dist.get_rank()\nfirst()\nif rank:\n    others()\n",
    "a group that was destroyed": "from tools import begin\nbegin()\nrank = dist.get_rank()\ndist.destroy_process_group()\n"
    "dist.init_process_group()\n",
    "a sampler of one rank for a test": f"{WRAP}sampler = DistributedSampler(data, num_replicas=1, rank=0)\n"
    "loader = DataLoader(data, sampler=sampler)\nfor x in loader:\n    model(x)\n",
    "shuffled once and sent": "import random\nrandom.shuffle(files)\ndist.broadcast_object_list(files, src=0)\n"
    "mine = files[dist.get_rank()::2]\n",
    "a split by a restored generator": f"{WRAP}torch.set_rng_state(state)\ntorch.utils.data.random_split(data, [1, 2])\n",
    "a folder of the rank": f"{WRAP}os.chdir(str(dist.get_rank()))\ntorch.save(x, 'a.pt')\n",
    "a download of the rank": f"from torchvision import datasets\n{WRAP}datasets.MNIST(f'd{{dist.get_rank()}}', download=True)\n",
    "the other branch has another value": "raw = net\nif many:\n    raw = DDP(net).module\nelse:\n    raw(x).backward()\n"
    "    optimizer.step()\n",
    "the end of a loop changes the value": "r = dist.get_rank()\nfor x in xs:\n    torch.cuda.set_device(r)\n    r = r % 4\n",
    "print by rank": f"{WRAP}for x in xs:\n    model(x).backward()\n    print(dist.get_rank(), x)\n",
    "a print of another module": f"from tools import print\n{WRAP}for x in xs:\n    model(x).backward()\n    print(x)\n",
    "a case of the rank": f"{WRAP}match dist.get_rank():\n    case 0:\n        torch.save(x, 'a.pt')\n",
    "the case of all others": f"{WRAP}match dist.get_rank():\n    case 1 | 2:\n        pass\n    case _:\n        torch.save(x, 'a.pt')\n",
    "a case with a guard": f"{WRAP}match mode:\n    case _ if dist.get_rank() == 0:\n        torch.save(x, 'a.pt')\n",
    "a condition in a list": f"{WRAP}[torch.save(x, 'a.pt') for i in [0] if dist.get_rank() == i]\n",
    "a loop of the rank's length": f"{WRAP}for _ in range(1 if dist.get_rank() == 0 else 0):\n    torch.save(x, 'a.pt')\n",
    "a generator of the rank": f"{WRAP}def some():\n    if dist.get_rank() == 0:\n        yield 1\nfor _ in some():\n    torch.save(x, 'a.pt')\n",
    "one rate for all ranks": f"{WRAP}r = dist.get_rank()\no = torch.optim.SGD(model.parameters(), 0.1 if r >= 0 else 0.2, foreach=r == 0)\n",
    "each case calls it": "match dist.get_rank():\n    case 0:\n        dist.barrier()\n    case _:\n        dist.barrier()\n",
    "a comment": f"{WRAP}torch.save(model.module.state_dict(), 'a.pt')  # nbddp: ok, one rank\n",
    "a comment below": f"{WRAP}torch.save(\n    model.module.state_dict(),\n    'a.pt',  # nbddp: ok\n)\n",
}


@pytest.mark.parametrize("case", HEALTHY)
def test_a_healthy_program_is_silent(case: str) -> None:
    assert rules(HEALTHY[case]) - {"init-without-destroy"} == set()


FOLLOWED = {  # what is found through names, functions, classes and other spellings of imports
    "no-set-epoch": f"{WRAP}def loaders():\n    sampler = DistributedSampler(data)\n"
    "    return DataLoader(data, sampler=sampler), None\ndef train(batches):\n    for x in batches:\n"
    "        model(x).sum().backward()\nloader, _ = loaders()\nfor e in range(3):\n    train(loader)\n",
    "forward-past-ddp": "class T:\n    def __init__(self, net):\n        self.model = DDP(net)\n        self.raw = self.model.module"
    "\n    def step(self, x):\n        loss = self.raw(x).sum()\n        loss.backward()\n        self.optimizer.step()\n",
    "sampler-of-one-rank": f"{WRAP}sampler = DistributedSampler(data, 2, 0)\nloader = DataLoader(data, 4, False, sampler)\n"
    "for x in loader:\n    model(x).sum().backward()\n",
    "collective-of-some-ranks": "from torch.distributed import barrier, get_rank as number\ndef is_first():\n"
    "    return number() == 0\nfirst = is_first()\nif first:\n    barrier()\n",
    "device-of-global-rank": "def rank():\n    return int(os.getenv('RANK', '0'))\nr = rank()\ntorch.cuda.set_device(r)\n",
    "save-on-all-ranks": f"{WRAP}def save(path):\n    torch.save(x, path)\ndef main():\n    for e in range(3):\n"
    "        save(f'{e}.pt')\nif __name__ == '__main__':\n    main()\n",
    "no-sync-after-forward": "from torch.nn.parallel.distributed import DistributedDataParallel\n"
    "model = DistributedDataParallel(torch.compile(net))\nfor x in xs:\n    with ctx:\n        loss = model(x)\n"
    "    if many:\n        model.require_backward_grad_sync = last\n    loss.backward()\n",
}


def test_a_module_that_is_unwrapped_where_it_is_wrapped_goes_past_ddp() -> None:
    text = "def step(model, x):\n    raw = model.module if isinstance(model, DDP) else model\n    loss = raw(x).sum()\n"
    train = f"{WRAP}{text}    loss.backward()\n    optimizer.step()\nstep(model, 1)\n"
    assert "forward-past-ddp" in rules(train)
    assert "forward-past-ddp" not in rules(train.replace("raw(x)", "model(x)"))


@pytest.mark.parametrize("call", ["dist.barrier() if r == 0 else None", "r == 0 and dist.barrier()"])
def test_a_collective_in_an_expression_by_rank_is_found(call: str) -> None:
    assert "collective-of-some-ranks" in rules(f"r = dist.get_rank()\n{call}\n")
    assert "collective-of-some-ranks" not in rules(
        f"r = dist.get_rank()\n{call.replace('None', 'others()')}\n" * ("None" in call)
    )


CASE = "match dist.get_rank():\n    case 0:\n        dist.barrier()\n"


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        (CASE, True),
        (f"{CASE}    case _:\n        print('other')\n", True),
        ("match dist.get_rank():\n    case 0:\n        pass\n    case _:\n        dist.barrier()\n", True),
        ("match mode:\n    case _ if dist.get_rank() == 0:\n        dist.barrier()\n", True),
        (f"{CASE}    case _:\n        dist.barrier()\n", False),
        (f"{CASE}    case _:\n        others()\n", False),
        (f"def f():\n    {CASE.replace(chr(10), chr(10) + '    ')}        return\n    dist.barrier()\nf()\n", False),
        ("match dist.get_rank():\n    case 0 | 1:\n        dist.barrier()\n", False),
        ("match mode:\n    case 'train':\n        dist.barrier()\n", False),
    ],
)
def test_a_collective_in_a_case_by_rank_is_found(text: str, is_found: bool) -> None:
    assert ("collective-of-some-ranks" in rules(text)) is is_found


@pytest.mark.parametrize("value", ["0.1 * (dist.get_rank() + 1)", "0.1 if dist.get_rank() == 0 else 0.2"])
def test_a_rate_that_has_a_name_is_followed_to_the_rank(value: str) -> None:
    assert "rank-in-optimizer" in rules(f"{WRAP}lr = {value}\no = torch.optim.AdamW(model.parameters(), lr=lr)\n")


@pytest.mark.parametrize("rule", FOLLOWED)
def test_names_are_followed(rule: str) -> None:
    assert rule in rules(FOLLOWED[rule])


def test_the_same_epoch_each_time_is_no_epoch() -> None:
    text = f"{WRAP}{LOADER}for e in range(3):\n    sampler.set_epoch(0)\n    {STEPS}"
    assert "no-set-epoch" in rules(text)
    assert "no-set-epoch" not in rules(text.replace("set_epoch(0)", "set_epoch(e)"))


@pytest.mark.parametrize(
    ("text", "guard"),
    [
        ("def step():\n    if dist.get_rank() != 0:\n        return\n    o.step()\nstep()\n", "not (dist.get_rank() != 0)"),
        ("if dist.get_rank() == 0:\n    pass\nelse:\n    model.load_state_dict(s)\nmodel(x).backward()\n",
         "not (dist.get_rank() == 0)"),
        ("if dist.get_rank() == 1:\n    o.step()\n", "dist.get_rank() == 1"),
    ],
)  # fmt: skip
def test_the_sentence_names_the_ranks_that_get_there(text: str, guard: str) -> None:
    [one] = result_of(f"{HEAD}{WRAP}o = torch.optim.SGD(model.parameters(), 0.1)\n{text}dist.destroy_process_group()\n").findings  # fmt: skip
    assert f"only where {guard}" in one.message


def test_a_program_of_circles_ends() -> None:
    assert (
        found(
            "def f(x):\n    return g(x)\ndef g(x):\n    return f(x)\na = f(a)\nb = a\na = b\nwhile a:\n    a = a.b(a)\n"
        )
        == []
    )


# -- sources -----------------------------------------------------------------------------------------


def test_cells_are_one_program_and_lines_are_those_of_the_cell() -> None:
    cells = [
        Cell("In[1]", "%%ddp --nproc 2\nimport torch\nimport torch.distributed as dist"),
        Cell("In[2]", "%matplotlib inline\nx = !ls\nx?"),
        Cell("In[3]", "# first\n%%ddp\n%time y = 1\ntorch.save(y, 'a.pt')"),
        Cell("In[4]", "%%ddp --ranks 0\ntorch.save(y, 'b.pt')"),
        Cell("In[5]", "%%bash\nls | wc"),
        Cell("In[6]", "%%ddp\n  torch.save(y, 'ä.pt'); torch.save(y, 'c.pt')"),
    ]
    result = lint(sources.of_cells(cells), chosen())
    places_ = [(one.place.cell, one.place.line, one.column) for one in result.findings]
    assert places_ == [("In[3]", 4, 1), ("In[6]", 2, 3), ("In[6]", 2, 26)]
    assert not result.unread


def test_a_barrier_meets_none_of_another_cell() -> None:
    """Each cell ends on all ranks before the next begins. What waits for nobody, or stands in a function, may meet."""
    lines = (
        "import torch.distributed as dist",
        "if dist.get_rank() == {}:\n    {}",
        "def f():\n    if dist.get_rank(): {}",
    )
    for call, own, other, hit in [
        ("dist.barrier()", 1, 1, ["In[2]", "In[3]"]),
        ("dist.barrier()", 1, 2, []),
        ("dist.barrier(async_op=True)", 1, 1, []),
        ("dist.broadcast(x, 0)", 1, 1, []),
    ]:
        text = lines[own].format(0, call), lines[other].format(1 if other == 1 else call, call)
        cells = [Cell(f"In[{i}]", f"%%ddp\n{body}") for i, body in enumerate((lines[0], *text), 1)]
        result = lint(sources.of_cells(cells), chosen())
        assert [one.place.cell for one in result.findings] == hit, (call, other)
        one_cell = Cell("In[1]", "\n".join(["%%ddp", lines[0], *text]))
        assert not lint(sources.of_cells([one_cell]), chosen()).findings


def test_what_a_rank_raises_in_a_cell_keeps_it_from_no_later_cell() -> None:
    """The next cell runs on all ranks. Within a cell, and in a script, the rank is gone."""
    lines = [
        f"{HEAD}net = torch.nn.Linear(2, 2)\nmodel, opt = DDP(net), torch.optim.SGD(net.parameters())",
        "if dist.get_rank() == 2:\n    raise KeyError(1)",
        "model(torch.ones(1, 2)).sum().backward()\nopt.step()\nopt.zero_grad()",
    ]
    cells = [Cell(f"In[{i}]", f"%%ddp\n{body}") for i, body in enumerate(lines, 1)]
    assert not lint(sources.of_cells(cells), chosen()).findings
    assert found("\n".join(["%%ddp", *lines]), cells=True)


def test_a_script_that_a_cell_writes_is_a_program_of_its_own() -> None:
    result = lint(sources.of_cells([Cell("cell 4", f"%%writefile train.py\n{SAVE}")], "a.ipynb"), chosen())
    assert [(one.place.file, one.place.cell, one.place.line) for one in result.findings] == [
        ("a.ipynb:train.py", "cell 4", 8)
    ]


def test_a_notebook_as_text_is_its_cells() -> None:
    text = "# %% [markdown]\n# torch.save\n\n# %%\n# %%ddp\nimport torch\ntorch.save(1, 'a.pt')\n"
    result = lint(sources.of_script(text, "a.py"), chosen())
    assert [(one.place.line, one.rule.name) for one in result.findings] == [(7, "save-on-all-ranks")]


def test_the_lessons_are_silent() -> None:
    programs = [
        s
        for path in sources.files_of(str(places.ROOT / "notebooks" / "solutions"))
        for s in sources.of_file(path, path.name)
    ]
    result = lint(programs, chosen())
    assert len(programs) > 18
    assert (list(result.findings), list(result.unread)) == ([], [])


# -- the answer --------------------------------------------------------------------------------------


def result_of(text: str) -> LintResult:
    return lint(sources.of_script(text, "train.py"), chosen())


def test_text_has_place_rule_sentence_line_and_cure() -> None:
    first, line, cure, count = report.as_text(result_of(SAVE)).split("\n")
    assert first == "train.py:7:1: warning [save-on-all-ranks] all ranks write 'a.pt' at the same time"
    assert (line.strip(), count) == ('torch.save(torch.zeros(1), "a.pt")', "1 finding")
    assert cure.strip().startswith("cure: if dist.get_rank() == 0")


def test_what_a_comment_silences_is_counted() -> None:
    text = report.as_text(result_of(SAVE.replace('"a.pt")', '"a.pt")  # nbddp: ok')))
    assert text == "no findings in 1 program; # nbddp: ok silences 1 more"


def test_html_shows_the_source_line_escaped() -> None:
    html = report.as_html(result_of(SAVE.replace("zeros(1)", "zeros(1 << 2)")))
    assert "zeros(1 &lt;&lt; 2)" in html
    assert "<b>train.py:7:1</b>" in html


def test_json_has_the_same() -> None:
    [one] = json.loads(report.as_json(result_of(SAVE)))["findings"]
    assert (one["file"], one["cell"], one["line"], one["column"]) == ("train.py", None, 7, 1)
    assert (one["rule"], one["level"], one["source"]) == ("save-on-all-ranks", "warning", SAVE.split("\n")[6])


TEXT, URI, NUMBER, LEVEL = "text", "uri", "number", ("none", "note", "warning", "error")
# object of SARIF 2.1.0 → its properties that lint writes, and their values; those with * are required
SARIF: dict[str, dict[str, Any]] = {
    "log": {"$schema": URI, "version*": ("2.1.0",), "runs*": ["run"]},
    "run": {"tool*": "tool", "columnKind": ("utf16CodeUnits", "unicodeCodePoints"), "invocations": ["invocation"],
            "results": ["result"]},
    "tool": {"driver*": "driver"},
    "driver": {"name*": TEXT, "version": TEXT, "informationUri": URI, "rules": ["rule"]},
    "rule": {"id*": TEXT, "shortDescription": "words", "fullDescription": "words", "help": "words", "helpUri": URI,
             "defaultConfiguration": "configuration"},
    "configuration": {"level": LEVEL},
    "words": {"text*": TEXT},
    "invocation": {"executionSuccessful*": bool, "toolExecutionNotifications": ["notification"]},
    "notification": {"level": LEVEL, "message*": "message"},
    "message": {"text": TEXT},
    "result": {"ruleId": TEXT, "ruleIndex": NUMBER, "level": LEVEL, "message*": "message", "locations": ["location"]},
    "location": {"physicalLocation": "place", "logicalLocations": ["logical"]},
    "place": {"artifactLocation": "artifact", "region": "region"},
    "artifact": {"uri": "reference"},
    "region": {"startLine": NUMBER, "startColumn": NUMBER, "snippet": "content"},
    "content": {"text": TEXT},
    "logical": {"name": TEXT, "kind": TEXT},
}  # fmt: skip
ESCAPED = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-F]{2})"  # what RFC 3986 has in a path


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is what SARIF 2.1.0 has there."""
    if isinstance(kind, list):
        return isinstance(value, list) and all(fits(one, kind[0]) for one in value)
    if isinstance(kind, tuple):
        return value in kind
    if kind in SARIF:
        known = {name.rstrip("*"): of for name, of in SARIF[kind].items()}
        required = {name.rstrip("*") for name in SARIF[kind] if name.endswith("*")}
        return required <= value.keys() <= known.keys() and all(fits(one, known[name]) for name, one in value.items())
    if kind == "reference":  # no scheme but file:, and no colon in a relative one's first part
        relative = re.fullmatch(rf"(?![^/]*:)(?!/){ESCAPED}+", value)
        return bool(relative or re.fullmatch(rf"file://({ESCAPED}*)", value))
    if kind is NUMBER:
        return isinstance(value, int) and value >= 0
    return isinstance(value, kind if isinstance(kind, type) else str) and (kind is not URI or "://" in value)


def sarif(result: LintResult) -> Any:
    """The run of a log that is as SARIF 2.1.0 has it."""
    whole = json.loads(report.as_sarif(result, "0.1"))
    assert fits(whole, "log"), whole
    [run] = whole["runs"]
    ids = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(ids) == len(set(ids))
    for one in run["results"]:
        assert ids[one["ruleIndex"]] == one["ruleId"]
        for location in one["locations"]:
            region = location["physicalLocation"].get("region", {"startLine": 1, "startColumn": 1})
            assert min(region["startLine"], region["startColumn"]) >= 1  # lines and columns begin at 1
    return run


@pytest.mark.parametrize(
    ("file", "uri"),
    [
        ("src/train.py", "src/train.py"),
        ("my train #2.py", "my%20train%20%232.py"),
        ("größe 50%.py", "gr%C3%B6%C3%9Fe%2050%25.py"),
        ("a.ipynb:train.py", "a.ipynb%3Atrain.py"),
        ("/home/me/train.py", "file:///home/me/train.py"),
        ("C:\\code\\train.py", "file:///C:/code/train.py"),
        ("\\\\server\\share\\train.py", "file://server/share/train.py"),
        ("", "stdin"),
    ],
)
def test_sarif_names_a_file_by_a_uri(file: str, uri: str) -> None:
    assert report.uri_of(file) == uri
    assert fits(uri, "reference")
    [one] = sarif(lint(sources.of_script(SAVE, file), chosen()))["results"]
    assert one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == uri


def test_sarif_names_rule_and_region() -> None:
    [one] = sarif(result_of(SAVE))["results"]
    region = one["locations"][0]["physicalLocation"]["region"]
    assert (one["ruleId"], region["startLine"], region["startColumn"]) == ("save-on-all-ranks", 7, 1)


def test_sarif_of_a_cell_has_no_region_since_its_line_is_not_the_files() -> None:
    cell = Cell("cell 2", "%%ddp\nimport torch\ntorch.save(1, 'a.pt')")
    [one] = sarif(lint(sources.of_cells([cell], "a.ipynb"), chosen()))["results"]
    assert "region" not in one["locations"][0]["physicalLocation"]
    assert one["message"]["text"].startswith("cell 2, line 3: ")


def test_sarif_says_what_could_not_be_read() -> None:
    [call] = sarif(result_of("x = (\n"))["invocations"]
    assert not call["executionSuccessful"]


# -- the command -------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = terminal.main(["lint", *words])
    return status, *capsys.readouterr()


def test_the_exit_status_says_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.py").write_text(SAVE)
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text("x = (\n")
    bad, good = str(tmp_path / "bad.py"), str(tmp_path / "good.py")
    assert run(capsys, good) == (0, "no findings in 1 program\n", "")
    assert run(capsys, bad, good)[0] == 1
    assert run(capsys, good, "--select", "no-set-epoch,save-on-all-ranks", bad)[0] == 1
    assert run(capsys, bad, "--ignore", "save-on-all-ranks")[0] == 0
    status, out, _ = run(capsys, str(tmp_path))
    assert (status, "save-on-all-ranks" in out, "broken.py, line 1: Python" in out) == (2, True, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "there is no file; name scripts"),
        (["missing.py"], "there is no file 'missing.py'"),
        (["In[3]"], "'In[3]' is a cell of a running notebook"),
        (["--select", "no-set-epoc", "-"], "did you mean no-set-epoch?"),
        (["--explain", "nothing"], "--list-rules lists the rules"),
        (["--format", "xml"], "text"),
    ],
)
def test_bad_input_says_what_to_type(words: list[str], said: str, capsys: pytest.CaptureFixture[str],
                                     monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "stdin", io.StringIO("x = 1"))
    status, _, err = run(capsys, *words)
    assert (status, said in err) == (2, True), err


def test_stdin_is_a_script(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(SAVE))
    status, out, _ = run(capsys, "-", "--format", "text")
    assert (status, out.split(": ")[0]) == (1, "<stdin>:7:1")


def test_a_rule_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for name, rule in RULES.items():
        status, out, _ = run(capsys, "--explain", name)
        assert (status, rule.cure in out, "Wrong:" in out) == (0, True, True)
    listed = run(capsys, "--list-rules")[1].splitlines()
    assert [line.split()[0] for line in listed] == list(RULES)


def test_tab_offers_rules_files_and_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert "train.py" in (complete_command("lint ") or [])
    assert "notes.txt" not in (complete_command("lint ") or [])
    assert complete_command("lint --select no-set") == ["no-set-epoch"]
    assert complete_command("lint --format s") == ["sarif"]


def test_a_file_that_is_no_notebook_is_refused(tmp_path: Path) -> None:
    for text in ("[]", '{"cells": 3}', '{"cells": [3]}', '{"worksheets": []}'):
        (tmp_path / "a.ipynb").write_text(text)
        with pytest.raises(BadInput, match="notebook format 4"):
            sources.of_file(tmp_path / "a.ipynb", "a.ipynb")


@pytest.mark.parametrize(
    "text", [b"\x00\xff\xfe", b"x = 1\x00", b"x = (", b"x = " + b"(" * 3000 + b")" * 3000, b"print 1"]
)
def test_what_is_no_python_is_named_and_nothing_else_said(text: bytes, tmp_path: Path,
                                                          capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    (tmp_path / "a.py").write_bytes(text)
    status, out, _ = run(capsys, str(tmp_path / "a.py"))
    assert (status, out.startswith(str(tmp_path / "a.py")), out.count("\n")) == (2, True, 1)


# -- the page ----------------------------------------------------------------------------------------


def test_the_page_has_each_rule() -> None:
    text = DOCS.read_text()
    for name, rule in RULES.items():
        assert (
            f'| <a id="{name}"></a>`{name}` | {rule.level} | {rule.title} | {rule.why} | {escaped(rule.cure)} |' in text
        )


def escaped(text: str) -> str:
    return f"`{text}`" if "(" in text else text
