"""`--sync`: which files are copied, what the far side makes of them, and a pool on hosts without the folder."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shlex
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nbddp
from nbddp.agent.client import AgentClient
from nbddp.capabilities.hosts import sync_rules
from nbddp.capabilities.hosts.sync import Listing, listing
from nbddp.capabilities.hosts.sync_remote import FolderCopy
from nbddp.capabilities.hosts.sync_rules import FileEntry
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests import places
from tests.hosts.ssh_hosts import HERE, MISSING, Hosts, ssh_hosts

ROOT = places.ROOT


# -- the rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "well"),
    [("a", True), ("a/b.py", True), ("/a", False), ("../a", False), ("a/../b", False), ("a//b", False), ("", False),
     ("a/", False), ("./a", False), ("a\0", False), ("..a", True)],
)  # fmt: skip
def test_a_path_stays_in_its_folder_or_is_refused(path: str, well: bool) -> None:
    assert sync_rules.inside(path) == well


@pytest.mark.parametrize(
    ("path", "link", "well"),
    [("a", "b", True), ("d/a", "../b", True), ("a", "../b", False), ("d/a", "../../b", False), ("a", "/etc", False),
     ("a", "b/../../c", False), ("d/a", ".././b/", True)],
)  # fmt: skip
def test_a_link_leads_inside_or_is_not_copied(path: str, link: str, well: bool) -> None:
    assert sync_rules.leads_inside(path, link) == well


def test_too_much_is_refused_with_the_largest_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_rules, "MOST_FILES", 2)
    found = Listing(Path("/x"), {name: FileEntry(i, 0) for i, name in enumerate("abcd")}, is_git=False)
    with pytest.raises(
        nbddp.BadInput, match=r"/x has 4 files .* at most 2 files .* the largest are d, c, b; make it a git"
    ):
        found.check()


# -- which files ----------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with what there may be."""
    root = tmp_path / "project"
    for folder in ("", "src", "out", ".hidden", "__pycache__", "env"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name in ("train.py", "src/näme.py", "out/big.bin", ".hidden/x", "__pycache__/x.pyc", "env/pyvenv.cfg", "env/y"):
        (root / name).write_text(name)
    (root / "train.py").chmod(0o755)
    (root / "src/link").symlink_to("../train.py")
    (root / "away").symlink_to("/etc/hosts")
    os.mkfifo(root / "pipe")
    return root


def test_without_git_all_but_hidden_files_and_caches_are_copied(project: Path) -> None:
    found = listing(project)
    assert sorted(found.entries) == ["out/big.bin", "src/link", "src/näme.py", "train.py"]
    assert found.entries["train.py"].runs
    assert found.entries["src/link"].link == "../train.py"
    assert found.told == [
        "away is not copied: it is a link that leads out of the folder, to /etc/hosts",
        "pipe is not copied: it is neither a file, a folder nor a link",
    ]


def test_with_git_all_that_it_does_not_ignore_is_copied(project: Path) -> None:
    def git(*words: str, cwd: Path = project) -> None:
        subprocess.run(
            ["git", "-c", "user.name=x", "-c", "user.email=x", *words], cwd=cwd, check=True, capture_output=True
        )

    git("init")
    (project / ".gitignore").write_text("out/\nenv/\n__pycache__/\npipe\n")
    (project / "gone.py").write_text("")
    git("add", "train.py", "gone.py")
    (project / "gone.py").unlink()
    (project / "inner").mkdir()
    git("init", cwd=project / "inner")
    (project / "inner/z.py").write_text("")
    assert sorted(listing(project).entries) == [
        ".gitignore", ".hidden/x", "inner/z.py", "src/link", "src/näme.py", "train.py",
    ]  # fmt: skip
    assert sorted(listing(project / "src").entries) == ["näme.py"], "a part of a checkout; the link leads out of it"


# -- the far side ---------------------------------------------------------------------------------------


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NBDDP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def sent(copy: FolderCopy, contents: dict[str, str], **more: FileEntry) -> tuple[list[str], list[str]]:
    """What it needed, and what it said of pieces; every file travels in two."""
    entries = {
        path: FileEntry(len(text), 1_700_000_000_000_000_000 + len(text)) for path, text in contents.items()
    } | more
    needed = copy.compare({path: entry.row() for path, entry in entries.items()})
    said = []
    for path in needed:
        text = contents.get(path, "").encode()
        for i, piece in enumerate((text[:2], text[2:]) if not entries[path].link else (b"",)):
            data = base64.b64encode(zlib.compress(piece)).decode()
            last = bool(i) or bool(entries[path].link)
            said.append(copy.write(path, entries[path].row(), data, first=i == 0, last=last))
    return needed, [words for words in said if words]


def test_a_second_copy_has_only_what_changed_and_keeps_what_programs_wrote(far: Path) -> None:
    def copy() -> FolderCopy:
        return FolderCopy("/no/such/project", "here", "nodea")

    first = copy()
    assert sent(first, {"a.py": "one", "d/b.py": "two!", "c": "xyz"}, l=FileEntry(0, 0, link="d/b.py"))[0] == [
        "a.py",
        "d/b.py",
        "c",
        "l",
    ]
    root = Path(first.finish()["folder"])
    assert root.parent == far / "nbddp/work"
    assert root.stat().st_mode & 0o777 == 0o700
    assert ((root / "a.py").read_text(), (root / "l").read_text()) == ("one", "two!")
    (root / "mine.pt").write_text("a checkpoint")
    (root / "a.py").write_text("changed by a program")
    (root / "c").write_text("kept, since it is another now")
    second = copy()
    needed, _ = sent(second, {"a.py": "one", "d/b.py": "three"})
    assert needed == ["a.py", "d/b.py"]
    assert second.finish() == {"folder": str(root), "same": False, "removed": 1}, "the link; c has changed"
    assert sorted(p.name for p in root.iterdir()) == ["a.py", "c", "d", "mine.pt"]
    assert (root / "a.py").read_text() == "one"
    third = copy()
    assert sent(third, {"a.py": "one", "d/b.py": "three"})[0] == []
    assert FolderCopy("/no/such/project", "here", "nodeb").root != root, "of each host one"


def test_a_file_becomes_a_folder_and_a_folder_a_file(far: Path) -> None:
    def synced(contents: dict[str, str]) -> tuple[list[str], list[str]]:
        copy = FolderCopy("/no/such/project", "here", "nodea")
        _, said = sent(copy, contents)
        copy.finish()
        return said, sorted(str(p.relative_to(copy.root)) for p in copy.root.rglob("*"))

    assert synced({"utils": "one", "data/x/a": "four", "data/b": "seven"}) == (
        [],
        ["data", "data/b", "data/x", "data/x/a", "utils"],
    )
    assert synced({"utils/one": "one!", "data": "a file"}) == ([], ["data", "utils", "utils/one"])


def test_a_copy_that_is_not_finished_leaves_no_piece(far: Path) -> None:
    copy = FolderCopy("/no/such/project", "here", "nodea")
    entry = FileEntry(4, 1)
    copy.compare({"a": entry.row()})
    assert copy.write("a", entry.row(), base64.b64encode(zlib.compress(b"on")).decode(), first=True, last=False) == ""
    assert list(copy.root.parent.glob("*.part"))
    copy.close()
    assert not list(copy.root.parent.glob("*.part"))


def test_nothing_is_written_outside(far: Path, tmp_path: Path) -> None:
    copy = FolderCopy("/no/such/project", "here", "nodea")
    for path, entry in (("../x", FileEntry(0, 0)), ("/x", FileEntry(0, 0)), ("x", FileEntry(0, 0, link="/etc"))):
        with pytest.raises(ValueError, match="leads out of the folder"):
            copy.compare({path: entry.row()})
        with pytest.raises(ValueError, match="leads out of the folder"):
            copy.write(path, entry.row(), "", first=True, last=True)
    sent(copy, {"d/b.py": "long enough"})
    copy.finish()
    (copy.root / "d/b.py").unlink()
    (copy.root / "d").rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (copy.root / "d").symlink_to(elsewhere)
    again = FolderCopy("/no/such/project", "here", "nodea")
    _, said = sent(again, {"d/b.py": "longer than before"})
    assert said == [f"d/b.py was not copied: {copy.root}/d is not a folder there"]
    assert list(elsewhere.iterdir()) == []


def test_the_same_folder_there_is_left_alone(far: Path, project: Path) -> None:
    found = listing(project)
    copy = FolderCopy(str(project), "here", "nodea")
    copy.compare({path: entry.row() for path, entry in found.entries.items()})
    assert copy.finish() == {"folder": str(project), "same": True, "removed": 0}
    (project / "train.py").write_text("another")
    changed = FolderCopy(str(project), "here", "nodea")
    changed.compare({path: entry.row() for path, entry in found.entries.items()})
    assert not changed.is_same


def test_a_message_that_a_signal_cuts_goes_on(tmp_path: Path) -> None:
    class Cut(io.BytesIO):
        def write(self, data: Any) -> int:
            return super().write(data[:7])

    said, (read, write) = Cut(), os.pipe()
    agent = AgentClient(tmp_path, os.fdopen(read, "rb", buffering=0), said, {})  # type: ignore[arg-type]
    agent.tell("folder_piece", data="x" * 50)
    assert json.loads(said.getvalue()) == {"op": "folder_piece", "data": "x" * 50}
    os.close(write)


# -- a pool ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh")) as made:
        yield made


@pytest.mark.more
@pytest.mark.skipif(not HERE or os.geteuid() != 0, reason=f"root hides the folder from the hosts; or {MISSING}")
def test_workers_begin_in_the_copy_and_a_running_pool_gets_what_changed(
    hosts: Hosts, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hides = tmp_path / "python"
    empty = tmp_path / "empty"
    empty.mkdir()
    bind = f"mount --bind {empty} {project} && exec {sys.executable}"
    hides.write_text(f'#!/bin/sh\nexec unshare --mount sh -c \'{bind} "$@"\' sh "$@"\n')
    hides.chmod(0o755)
    monkeypatch.chdir(project)
    (project / "helper.py").write_text("value = 41\n")
    (project / "out/big.bin").write_bytes(os.urandom(700_000))
    path, cache = shlex.quote(str(ROOT)), tmp_path / "cache"
    setup = f"export PYTHONPATH={path} NBDDP_RUNTIME_DIR={hosts.folder} NBDDP_CACHE_DIR={cache}"
    with WorkerPool(
        nproc=1, hosts="nodea,nodeb", ssh_config=str(hosts.config), setup=setup, python=str(hides), sync=True
    ) as pool:
        lines = pool.sync()
        assert lines[0].startswith(f"nodea: nothing has changed in {tmp_path}/cache/nbddp/work/project-"), lines
        code = (
            "import os, hashlib, helper\nread = open('out/big.bin', 'rb').read()\n"
            "helper.value, os.getcwd(), hashlib.sha1(read).hexdigest()"
        )
        found = list(pool.run_cell(code, want_value=True, screen=NullScreen()))
        assert [value for value, _, _ in found] == [41, 41]
        assert len({folder for _, folder, _ in found}) == 2
        assert all(Path(folder).parent == tmp_path / "cache/nbddp/work" for _, folder, _ in found)
        assert {digest for *_, digest in found} == {hashlib.sha1((project / "out/big.bin").read_bytes()).hexdigest()}
        pool.run_cell("open('made', 'w').write('x')", screen=NullScreen())
        (project / "helper.py").write_text("value = 4200\n")
        (project / "src/näme.py").unlink()
        (project / "broken").symlink_to("nowhere")
        lines = pool.sync()
        assert lines[1].startswith("nodeb: 2 files, 13 B copied to "), lines
        assert lines[1].endswith(", 1 removed")
        assert lines[2:] == [
            "away is not copied: it is a link that leads out of the folder, to /etc/hosts",
            "pipe is not copied: it is neither a file, a folder nor a link",
        ]
        look = "import importlib, os; importlib.reload(helper).value, os.path.exists('made'), sorted(os.listdir('src'))"
        assert list(pool.run_cell(look, want_value=True, screen=NullScreen())) == [(4200, True, ["link"])] * 2
    with pytest.raises(nbddp.BadInput, match="--sync is for other hosts; add --hosts"):
        WorkerPool(nproc=1, sync=True).start()
