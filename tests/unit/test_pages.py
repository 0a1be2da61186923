"""The documentation: where each question is answered, that every message is found, and that references are whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import nbddp
from docs import assembly, messages, reference
from nbddp.execution.supervise import PATIENCE
from nbddp.figures.result import Result
from nbddp.launch.options import cell_parser, parse_cell
from nbddp.lessons.framework.explorer import Explorer
from nbddp.notebook.commands import known, parse_command
from nbddp.teach import explore
from tests.places import ROOT
from tests.unit.test_front import anchors, links

CLICKS = 2
QUESTIONS = {  # what a reader asks who begins at README.md → page and heading that answer it
    "run my train.py on 2 GPUs": "docs/scripts.md",
    "use it in Colab": "docs/start/install.md",
    "set NCCL's variables": "docs/how-to/set-environment-variables.md",
    "why is rank 1 slow": "docs/measuring.md#why-a-rank-is-slow",
    "save and load a checkpoint": "docs/how-to/checkpoint-and-resume.md",
    "use Trainer, accelerate or Lightning": "docs/how-to/use-a-framework.md",
    "stop and free the GPU's memory": "docs/how-to/stop-and-free-memory.md",
    "which rank is on which GPU": "docs/measuring.md#who-runs-where",
    "get a value back": "docs/how-to/pass-values.md",
    "what does an idle pool cost": "docs/cost-of-a-pool.md",
    "does it work in VS Code": "docs/how-to/use-vs-code.md",
    "use my conda environment on other hosts": "docs/how-to/use-a-conda-environment.md",
    "grade my students": "notebooks/INSTRUCTORS.md#grading",
    "cite it": "docs/project/cite.md",
    "install it": "docs/start/install.md#requirements",
    "show only rank 0's output": "docs/commands.md#run-a-cell",
    "use a notebook's variable in a cell": "docs/how-to/pass-values.md",
    "debug with breakpoint()": "docs/how-to/debug.md",
    "run on Slurm": "docs/other-hosts.md#slurm",
    "my cell hangs": "docs/when-something-goes-wrong.md#a-deadlock",
    "use tqdm and rich": "docs/cells.md#output",
    "move from notebook_launcher": "docs/how-to/come-from-another-launcher.md#notebook_launcher-and-mpspawn",
    "contribute, run the tests": "CONTRIBUTING.md#tests",
    "set a default": "docs/reference/configuration.md#settings",
    "environment variables of nbddp": "docs/reference/configuration.md#variables-of-nbddp",
    "Python API of Pool": f"{assembly.SITE}reference/python.html",
    "does it run on my GPU": "docs/start/is-it-for-me.md#tested-and-not-tested",
}
FAQ = "docs/start/faq.md"
OF_FOUR_READERS = {  # a learner on Colab, a researcher, a teacher, a user of a cluster
    "which licence": FAQ,
    "is my data sent anywhere": FAQ,
    "upgrade, uninstall": "docs/start/install.md#upgrade-and-remove",
    "what must I know before lesson 01": f"{FAQ}#learning",
    "how long does a lesson take": "notebooks/INSTRUCTORS.md#time",
    "where are the solutions": "docs/lessons.md#checks-and-explorers",
    "how many ranks in Colab": f"{FAQ}#learning",
    "Colab disconnects": "docs/how-to/checkpoint-and-resume.md",
    "without a mouse": "docs/lessons.md#checks-and-explorers",
    "without a GPU": "docs/no-gpu.md",
    "use GPUs 2 and 3": "docs/how-to/set-environment-variables.md",
    "two notebooks at once": f"{FAQ}#research",
    "FSDP, tensor parallel": f"{FAQ}#research",
    "TensorBoard, Weights & Biases": f"{FAQ}#research",
    "who downloads the data": f"{FAQ}#research",
    "close the browser": "docs/scripts.md#from-a-terminal",
    "cost of recording": "docs/measuring.md#where-the-all-reduce-time-goes",
    "equal weights": "docs/measuring.md#are-the-replicas-equal-and-where-is-the-memory",
    "a changed module": "docs/cells.md#a-cell-is-a-program",
    "save a figure": "docs/commands.md#from-python",
    "size of a server": "notebooks/INSTRUCTORS.md#on-jupyterhub",
    "half a day": "notebooks/INSTRUCTORS.md#time",
    "submissions that attack": "notebooks/INSTRUCTORS.md#security-of-the-grader",
    "a lesson of my own": "nbddp/README.md#where-to-add-a-lesson",
    "without installation": "docs/lessons.md#where-they-run",
    "without internet": "docs/start/install.md#without-internet",
    "ports, firewall": "docs/other-hosts.md#security",
    "no shared file system": "docs/other-hosts.md#copying-the-folder",
    "containers": "docs/other-hosts.md#other-ways-to-start",
    "the end of a Slurm job": "docs/other-hosts.md#slurm",
    "how many ranks were tested": "docs/other-hosts.md#many-hosts",
    "InfiniBand": "docs/how-to/set-environment-variables.md",
}
OF_MORE_READERS = {  # the same four, and an engineer who inherits the code
    "same random numbers": f"{FAQ}#research",
    "profile a step": "docs/measuring.md#any-program-compute-waits-and-longest-calls",
    "torch.compile, FSDP2": "docs/limits.md",
    "what is a rank": "docs/lessons.md",
    "my answer is wrong": "docs/lessons.md#checks-and-explorers",
    "preempted nodes": "docs/other-hosts.md#nodes-that-join-and-leave",
    "Kubernetes": "docs/other-hosts.md#other-ways-to-start",
    "submit a job": "docs/export.md#a-batch-script-on-slurms-login-node",
    "NCCL's debug output": "docs/when-something-goes-wrong.md#debug-output",
    "cheating": "notebooks/INSTRUCTORS.md#security-of-the-grader",
    "a map of the code": "nbddp/README.md#the-path-of-a-cell",
    "a new version of torch": "docs/explanation/compatibility.md#private-apis",
    "messages between processes": "nbddp/protocol/README.md",
    "make a release": "RELEASING.md",
    "remove a name": "docs/stability.md",
    "has it become slower": "docs/speed.md",
}


def opened(page: str, link: str) -> str:
    """The file to which a link leads, or the address."""
    path, _, _ = link.partition("#")
    if re.match(r"\w+:", path) or not path:
        return path or page
    return (ROOT / page).parent.joinpath(path).resolve().relative_to(ROOT).as_posix()


def clicks() -> dict[str, int]:
    """Page → how many clicks it is from README.md."""
    found, edge = {"README.md": 0}, ["README.md"]
    for number in range(1, CLICKS + 1):
        texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in edge if page.endswith(".md")}
        new = {opened(page, link) for page, text in texts.items() for link in links(text)} - set(found)
        found |= dict.fromkeys(new, number)
        edge = [page for page in new if (ROOT / page).is_file()]
    return found


def test_each_question_is_answered_within_two_clicks() -> None:
    assert (len(QUESTIONS), len(OF_FOUR_READERS), len(OF_MORE_READERS)) == (27, 32, 16)
    near = clicks()
    for question, answer in {**QUESTIONS, **OF_FOUR_READERS, **OF_MORE_READERS}.items():
        page, _, anchor = answer.partition("#")
        assert near.get(page, CLICKS + 1) <= CLICKS, question
        if anchor:
            assert anchor in anchors((ROOT / page).read_text(encoding="utf-8")), question
        if page.startswith(assembly.SITE):
            assert page.removeprefix(assembly.SITE).replace(".html", ".md") in reference.PAGES, question


# -- the site -------------------------------------------------------------------------------------


def test_every_page_is_in_the_contents() -> None:
    known_pages = assembly.sources()
    text = (ROOT / assembly.INDEX).read_text(encoding="utf-8")
    index = set(assembly.pages_of(assembly.INDEX, text, known_pages))
    of_explanations = (ROOT / "docs/explanation/README.md").read_text(encoding="utf-8")
    index |= set(assembly.pages_of("docs/explanation/README.md", of_explanations, known_pages))
    pages = {*known_pages.values(), *reference.PAGES} - {"index.md"}
    assert {page for page in pages - index if not page.endswith(".ipynb")} == set()
    assert index - pages == set(), "a menu has pages of the site alone"
    assert [section.title for section in assembly.sections()] == [
        "Start", "Lessons", "How to", "Reference", "Explanation", "Teaching", "Project",
    ]  # fmt: skip


def test_links_lead_to_pages_of_the_site_and_else_to_github() -> None:
    known_pages = assembly.sources()
    text = "[a](../docs/cells.md#output) `[b](no.md)` [c](05-averaging-gradients.ipynb) [d](build.py) "
    text += "![](../docs/bench.png)"
    made = assembly.rewritten(text, "notebooks/INSTRUCTORS.md", known_pages)
    assert made == (
        "[a](../cells.md#output) `[b](no.md)` [c](../lessons/05-averaging-gradients.ipynb) "
        f"[d]({assembly.REPOSITORY}/blob/main/notebooks/build.py) ![](../bench.png){{.figure-alone}}"
    )
    with pytest.raises(FileNotFoundError, match=r"links to none\.md"):
        assembly.rewritten("[f](none.md)", "CHANGELOG.md", known_pages)


def test_the_recording_is_small() -> None:
    """GitHub and readers on a phone load it with the page; `python -m docs.recording` makes it."""
    assert 100_000 < (ROOT / "docs/first-minute.gif").stat().st_size < recording_most()


def recording_most() -> int:
    (most,) = re.findall(r"(?m)^MOST = ([\d_]+)", (ROOT / "docs/recording.py").read_text(encoding="utf-8"))
    return int(most)


# -- what several pages say -------------------------------------------------------------------------

PAGES = [ROOT / "README.md", ROOT / "notebooks/INSTRUCTORS.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXPLORERS = r"there are (\d+) now|(?:all|the|has|have|with) (\w+) explorers\b"
VS_CODE = "how-to/use-vs-code.md"
OF_FRONT_ENDS = ("docs/start/is-it-for-me.md", "docs/start/faq.md", "docs/limits.md", "docs/lessons.md")


def sentences_of(page: Path) -> list[str]:
    return re.split(r"(?<=[.;:]) |\n\s*\n|\n- |\n\| ", page.read_text(encoding="utf-8").replace("\n  ", " "))


def test_pages_agree_on_the_number_of_explorers() -> None:
    made = sum(isinstance(getattr(explore, name), Explorer) for name in explore.__all__)
    said = [
        (page.name, n)
        for page in PAGES
        for each in re.findall(EXPLORERS, page.read_text(encoding="utf-8"))
        for n in each
        if n.isdecimal()
    ]
    assert said
    assert [(page, n) for page, n in said if int(n) != made] == []


def test_pages_agree_on_when_a_rank_is_replaced() -> None:
    said = [
        (page.name, float(seconds))
        for page in PAGES
        if "explanation" not in page.parts
        for sentence in sentences_of(page)
        for seconds in re.findall(r"replace[sd]? (?:it )?after ([\d.]+) s\b", sentence)
    ]
    assert {page for page, _ in said} >= {"when-something-goes-wrong.md", "limits.md"}
    assert [(page, seconds) for page, seconds in said if seconds != PATIENCE] == []


def test_what_works_in_vs_code_is_said_on_one_page() -> None:
    """The others link to it, and none has a version or a verdict of its own."""
    texts = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
    assert [page for page in OF_FRONT_ENDS if Path(VS_CODE).name not in texts[page]] == []
    tested = [page for page, text in texts.items() if re.search(r"code-server|VS Code \d", text)]
    assert tested == [f"docs/{VS_CODE}"]


# -- references -----------------------------------------------------------------------------------


def test_the_references_have_every_option_and_every_command() -> None:
    options = reference.options_page()
    for action in cell_parser()._actions:
        for flag in action.option_strings if action.dest != "help" else ():
            assert f"`{flag}" in options, flag
    commands = reference.PAGES["reference/commands.md"]()
    terminal = reference.PAGES["reference/terminal.md"]()
    assert [name for name in known() if f"\n## `%ddp {name}`\n" not in commands] == []
    assert [n for n in known(reference.TERMINAL) if f"\n## `python -m nbddp {n}`\n" not in terminal] == []
    assert "`--timeline`" in commands


def test_the_glossary_has_the_terms_of_every_lesson() -> None:
    page = reference.glossary_page()
    assert "- **shard**: a rank's part of the data. ([05](05-averaging-gradients.ipynb))" in page
    lessons = sorted(path.name for path in (ROOT / "notebooks/solutions").glob("*.ipynb"))
    assert [name for name in lessons if f"]({name})" not in page] == []


def test_the_reference_of_python_has_every_result_and_its_data() -> None:
    """A class of results that a method of a pool returns cannot be forgotten."""
    page = reference.python_page()
    found = {kind.__name__ for kind in reference.results()}
    assert found == {kind.__name__ for kind in Result.__subclasses__() if kind.__module__.startswith("nbddp.")}
    assert len(found) == 14
    assert [name for name in (*found, "Result") if f"{{py:class}} {name}\n" not in page] == []
    assert "{py:method} write(path)" in page
    assert "{py:function} nbddp.export.torchrun_line(launch, node=0)" in page


def test_the_reference_of_python_has_every_name() -> None:
    page = reference.python_page()
    assert [name for name in nbddp.__all__ if f"}} nbddp.{name}" not in page] == []
    assert "{py:method} run(" in page


MISTYPED = (
    "--nproc four", "--nproc 0", "--nnodes 4:1", "--ranks 3-1", "-o 2x", "--resart", "--timeout soon", "hello",
    "--max-restarts 1 --ranks 0", "--visible none", "--env RANK=1", "--simulate-gpus 2xT5", "--nproc '2",
)  # fmt: skip
COMMANDS = ("tatus", "push", "log --rank x", "run", "export --to nowhere", "bench all", "memory --step", "start 3")


OF_LESSONS = (
    "nothing was predicted yet: predict.lines() asks for it",
    "place_of returned None: you have not written it yet, or it has no return statement",
)


def answers() -> list[str]:
    """What nbddp says to mistyped lines."""
    found = []
    for parse, lines in ((parse_cell, MISTYPED), (parse_command, COMMANDS)):
        for line in lines:
            with pytest.raises(nbddp.BadInput) as raised:
                parse(line)
            found.append(str(raised.value))
    return found


def fixed(message: messages.Message) -> int:
    """Letters of a message that are not filled in."""
    return len(message.text.replace(messages.FILLED, ""))


def test_the_python_page_says_what_a_method_returns_and_has_no_address() -> None:
    page = reference.python_page()
    assert " at 0x" not in page, "a default's address, so two builds differ"
    methods = dict(re.findall(r"(?ms)^:::\{py:method\} (\w+)(.*?)^:::$", page.split("\n## RankValues")[0]))
    for name, kind in {"timings": "TimingsResult", "bench": "BenchResult", "run": "nbddp.RankValues"}.items():
        returned, example = f"Returns {{py:class}}`{kind}`.", "Example:\n\n```python\n"
        assert returned in methods[name].split(example)[0], name
        assert f"pool.{name}(" in methods[name].split(example)[1]


def test_messages_are_found_by_their_text() -> None:
    """A message of the page has a quarter of the answer, or 20 letters; the rest is filled in around it."""
    known_texts = [(message.pattern(), fixed(message)) for message in messages.messages()]
    for said in [*answers(), *OF_LESSONS]:
        found = [
            letters for pattern, letters in known_texts if letters >= min(20, len(said) / 4) and pattern.search(said)
        ]
        assert found, said


def test_reports_of_failures_are_found_too() -> None:
    """They are joined from parts, so the page of reports has whole ones, with their cells."""
    page = reference.PAGES["reference/reports.md"]()
    for said in ("raised ValueError: batch 0 has no labels (cell line 0, in train)", "nbddp closed the process group",
                 "waiting in all_reduce #0", "unblocked, variables are kept", "stopped by the user"):  # fmt: skip
        assert said in page, said
    texts = " ".join(message.text for message in messages.messages())
    assert "without calling it" in texts
    assert "press Stop to unblock the ranks" in texts


def test_what_is_no_message_is_left_out() -> None:
    found = messages.messages()
    assert not [m.text for m in found if m.text.startswith(("<", "import ", "SELECT "))]
    assert {m.error for m in found} >= {"BadInput", "PoolError", "AgentFailed"}
    assert not any("workers per node: a number, gpu (one per GPU)" in m.text for m in found), "a help text"


def test_the_page_of_settings_has_every_variable_and_setting() -> None:
    page = (ROOT / "docs/reference/configuration.md").read_text(encoding="utf-8")
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(nbddp.__file__).parent.rglob("*.py"))
    assert [name for name in sorted(set(re.findall(r"NBDDP_[A-Z_]+", sources))) if f"`{name}`" not in page] == []
    magics = (Path(nbddp.__file__).parent / "notebook/magics.py").read_text(encoding="utf-8")
    settings = re.findall(r"(?m)^    (\w+) = (?:Unicode|Bool|Int|Float|Enum)\(", magics)
    assert settings
    assert [name for name in settings if f"`DDPMagics.{name}`" not in page] == []
