"""The cells of the documentation's pages run in a notebook, in their order, and give what the pages say."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.kernels import Kernel, Shown
from tests.places import ROOT

DOCS, FRAMEWORKS = ROOT / "docs", ROOT / "tests" / "frameworks"
NAMES_OF_CALLS = {"Trainer", "Fabric", "TrainingArguments"}
NOT_TRIED = {"per_device_train_batch_size", "max_epochs"}  # numbers of the reader's own


def blocks(page: str) -> list[str]:
    """The page's blocks of Python."""
    return re.findall(r"(?ms)^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"))


@pytest.fixture
def clean(kernel: Kernel) -> Kernel:
    """The kernel with two new workers."""
    shown = kernel.run("%ddp restart --nproc 2")
    assert shown.ok, shown.error
    return kernel


def ran(kernel: Kernel, code: str) -> Shown:
    shown = kernel.run(code)
    assert shown.ok, f"{code}\n{shown.error}"
    return shown


def value(kernel: Kernel, code: str) -> str:
    return ran(kernel, f"print({code})").text().strip()


def test_the_first_cells_show_what_the_page_says(clean: Kernel) -> None:
    page = (DOCS / "start/first-cell.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"(?m)^(ranks 0–1 Out │ .*)$", page)
    load, hello, train, _, mistake = blocks("start/first-cell.md")
    assert load.strip() == "%load_ext nbddp"
    assert said in str(ran(clean, hello).outputs)
    ran(clean, train)
    assert 0 < float(value(clean, "losses[0]")) < 20
    shown = clean.run(mistake)
    assert "rank 1 raised ValueError: bad batch" in shown.error
    assert value(clean, "len(losses)") == "2"


def test_the_readme_says_what_its_cell_shows(four: Kernel) -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    _, hello = re.findall(r"(?ms)^```python\n(.*?)^```", page)
    (said,) = re.findall(r"(?m)^(ranks 0–3 Out │ .*)$", page)
    ran(four, "%ddp restart")
    assert said in str(ran(four, hello).outputs)


def test_values_travel_as_the_page_says(clean: Kernel) -> None:
    *cells, last = blocks("how-to/pass-values.md")
    for cell in cells:
        ran(clean, cell)
    (said,) = re.findall(r"# ([\d.]+)", last)
    assert value(clean, "doubled[1]") == said


def test_variables_of_the_environment_reach_the_ranks(clean: Kernel) -> None:
    (cell,) = blocks("how-to/set-environment-variables.md")
    assert "'WARN'" in str(ran(clean, cell).outputs)
    ran(clean, "%ddp start --env NCCL_DEBUG")


def test_memory_is_freed_without_a_gpu_too(clean: Kernel) -> None:
    (cell,) = blocks("how-to/stop-and-free-memory.md")
    ran(clean, cell)


def test_a_function_for_another_launcher_gives_its_values(clean: Kernel) -> None:
    (code,) = blocks("how-to/come-from-another-launcher.md")
    line = "with nbddp.Pool(nproc=2) as pool:\n"
    assert line in code
    ran(clean, code.replace(line, f"{POOL}\nif True:\n"))  # a pool of its own takes seconds to start
    (said,) = re.findall(r"# (\[.*\])", code)
    assert value(clean, "list(values)") == said


POOL = "pool = get_ipython().magics_manager.registry['DDPMagics'].pool"
FAILS = """\
    if step == 12 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
        os._exit(7)
    optimizer.zero_grad()
"""


def test_a_training_resumes_from_its_checkpoint(clean: Kernel, tmp_path: Path) -> None:
    (cell,) = blocks("how-to/checkpoint-and-resume.md")
    line = "    optimizer.zero_grad()\n"
    assert line in cell
    weights = "[p.tolist() for p in model.parameters()]"
    (tmp_path / "whole").mkdir()
    (tmp_path / "failed").mkdir()
    for name, code in (("whole", cell), ("failed", cell.replace(line, FAILS))):
        ran(clean, f"folder = {str(tmp_path / name)!r}")
        shown = ran(clean, code.replace("%%ddp ", f"%%ddp -o {name} ", 1) + f"(first, {weights})\n")
        assert ("attempt" in str(shown.outputs)) == (name == "failed")
    assert value(clean, "whole[0][0], failed[0][0], failed[1][0]") == "0 10 10"
    assert value(clean, "whole[0][1] == failed[0][1] == failed[1][1]") == "True"


def calls(code: str) -> dict[str, set[str]]:
    """Name of a class of a library → the arguments that it gets by name."""
    tree = ast.parse(re.sub(r"(?m)^%%ddp.*$", "", code))
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            found.setdefault(name, set()).update(str(word.arg) for word in node.keywords)
    return found


def test_programs_of_other_libraries_are_as_those_that_were_tried() -> None:
    tried: dict[str, set[str]] = {}
    for path in FRAMEWORKS.glob("*.py"):
        for name, words in calls(path.read_text(encoding="utf-8")).items():
            tried.setdefault(name, set()).update(words)
    shown = {name: words for code in blocks("how-to/use-a-framework.md") for name, words in calls(code).items()}
    assert set(shown) >= NAMES_OF_CALLS
    for name in NAMES_OF_CALLS:
        assert shown[name] - NOT_TRIED <= tried[name], name
