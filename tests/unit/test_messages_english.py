"""Every text that nbddp can print: its terms, the length of its sentences, and its colons."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from docs.messages import PACKAGE, SKIPPED, is_message, said, texts
from nbddp.launch.options import cell_parser
from nbddp.notebook import commands
from tests.english import MOST, long_sentences, wrong_terms

THEIRS = "capabilities/simulated_gpus/on_rank/"  # repeats torch's, CUDA's and NCCL's own texts
CODE = re.compile(
    r"(?:for|if|with) .+: |\w+\(.*\)\.|: [a-z-]+; |\w: \w+\(|: block: |[a-z]: \S+; |class \w+|!important"
)  # examples of programs, CSS
COLON = re.compile(r"(?<![A-Z]{3}): ")
LEGEND = re.compile(r" · |(?<=\.) (?=[A-Z]|inf: )|; ")  # each entry of a figure's legend has a colon of its own
MOST_COLONS = 1
VERBS = {
    "change", "check", "compare", "copy", "draw", "fetch", "find", "measure", "open", "predict", "print", "replace",
    "return", "run", "show", "start", "stop", "submit", "test", "write",
}  # fmt: skip


TABLE = re.compile(r"\S {3,}\S")  # columns: each row is a text of its own


def sources() -> Iterator[tuple[str, str]]:
    """Where each message is, and the message."""
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if file.startswith((*SKIPPED, THEIRS)) and not file.startswith("lessons/"):
            continue
        for line, text, _ in said(path):
            for part in text.splitlines() if TABLE.search(text) or path.stem in {"document", "figure"} else [text]:
                yield f"nbddp/{file}:{line}", part


def faults(text: str) -> list[str]:
    """What is wrong with a message, each with what to do."""
    found = [f"{wrong!r}: {right}" for wrong, right in wrong_terms(text)]
    if CODE.search(text):
        return found
    found += [f"more than {MOST} words in {sentence!r}" for sentence in long_sentences(text)]
    if any(len(COLON.findall(part)) > MOST_COLONS for part in LEGEND.split(text)):
        found.append("more than one colon: end the sentence instead")
    return found


def helps() -> Iterator[tuple[str, str]]:
    """Where each help text belongs, and the text."""
    for name in commands.known():
        parser = commands.command_parser(name)
        yield name, commands.known()[name].help
        yield name, parser.epilog or ""
        for action in parser._actions:
            yield f"{name} {action.dest}", action.help or ""
    for action in cell_parser()._actions:
        yield f"%%ddp {action.dest}", action.help or ""


def test_messages_have_the_standard_terms_short_sentences_and_one_colon() -> None:
    found = {f"{where} {text}": faults(text) for where, text in sources()}
    assert not {where: why for where, why in found.items() if why}
    assert len(found) > 1500, "messages were looked at"


def test_help_texts_have_the_standard_terms_and_short_sentences() -> None:
    found = {f"{where}: {text}": [*wrong_terms(text), *long_sentences(text)] for where, text in helps()}
    assert not {where: why for where, why in found.items() if why}
    assert len(found) > 100, "help texts were looked at"


def test_each_entry_of_help_starts_with_a_verb() -> None:
    known = commands.known()
    assert not {name: each.help for name, each in known.items() if re.split(r"[ ,]", each.help)[0] not in VERBS}


@pytest.mark.parametrize(
    ("planted", "why"),
    [
        ("the other ranks are freed and keep their names", "unblocked"),
        ("all workers restarted; names on them are gone", "variables"),
        ("--gpu needs GPUs; add --gpus-per-proc 1, or leave it out", "remove"),
        ("install torch in the kernel's environment", "notebook kernel"),
        ("a line says so where the rank has died", "reports"),
        ("rank 1: failed too: raised ValueError", "colon"),
        (f"this sentence has {'far ' * MOST}too many words", f"more than {MOST} words"),
    ],
)
def test_a_planted_message_is_found(planted: str, why: str) -> None:
    source = f"def f() -> None:\n    raise BadInput({planted!r})\n"
    ((_, text, error),) = texts(ast.parse(source))
    assert error == "BadInput"
    assert is_message(text, "pool/pool.py")
    assert any(why in fault for fault in faults(text)), faults(text)


@pytest.mark.parametrize(
    "text",
    [
        "install torch in the notebook kernel's environment",
        "the Linux kernel does not report who owns a connection",
        "memory freed before the next sample is missed",
        "there is no file 'x.py' in the working directory",
        "rank 2 raised ValueError: bad batch. The next cell starts a new worker.",
    ],
)
def test_a_good_message_has_no_fault(text: str) -> None:
    assert faults(text) == []
