"""Hosts as they are named, and how ssh reaches them: by a real sshd, or with its own words why not."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nbddp
from nbddp.capabilities.hosts.names import Host, host_of, hosts_of
from nbddp.capabilities.hosts.transports import SshTransport
from nbddp.compat.extra.versions import CUDA, DRIVER, OF_CUDA, differing, driver, otherwise
from tests.hosts.ssh_hosts import HERE, MISSING, Hosts, ssh_hosts

real = pytest.mark.skipif(not HERE, reason=MISSING)


# -- as they are named ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("nodea", Host("nodea")),
        ("me@nodea", Host("nodea", "me")),
        ("nodea:2222", Host("nodea", port=2222)),
        ("me@10.0.0.1:22", Host("10.0.0.1", "me", 22)),
        ("[::1]:2222", Host("::1", port=2222)),
        ("me@[fe80::1%eth0]", Host("fe80::1%eth0", "me")),
    ],
)
def test_a_host_is_read_and_written(text: str, host: Host) -> None:
    assert host_of(text) == host
    assert host_of(str(host) if ":" not in host.name or host.port else f"[{host.name}]").name == host.name


def test_hosts_come_on_a_line_or_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hosts_of("nodea, me@nodeb:2222") == (Host("nodea"), Host("nodeb", "me", 2222))
    file = tmp_path / "hosts"
    file.write_bytes(b"\xef\xbb\xbf# the lab\r\nnodea slots=4\r\n\r\nme@nodeb:2222 # the old one\r\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    for named in (str(file), "~/hosts"):
        assert hosts_of(named) == (Host("nodea", slots=4), Host("nodeb", "me", 2222))
    file.write_text("nodea slots=2 python='/opt/my py' setup='module load cuda # 12'\n")
    (host,) = hosts_of(str(file))
    assert host == Host("nodea", slots=2, python="/opt/my py", setup="module load cuda # 12")
    assert SshTransport("", "/opt/my py", "module load cuda # 12").command(Host("nodea")) == SshTransport().command(
        host
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("node a", "'node a' is not a host; write hosts as nodea,user@nodeb:2222"),
        ("fe80::1", "is not a host; write hosts as nodea,user@nodeb:2222 ([::1]:2222 for an IPv6 address)"),
        ("-oProxyCommand=touch", "is not a host"),
        ("-l@nodea", "is not a host"),
        ("nodea:99999", "has port 99999; ports are 1 to 65535"),
        ("nodea,nodea", "names nodea twice; name each host once"),
        (" , ", "names no host"),
        ("/no/such/file", "--hosts /no/such/file cannot be read: No such file or directory"),
    ],
)
def test_what_is_no_host_is_said(text: str, words: str) -> None:
    with pytest.raises(nbddp.BadInput) as caught:
        hosts_of(text)
    assert words in str(caught.value)


@pytest.mark.parametrize("line", ["nodea slots=0", "nodea slots=x", "nodea max=3", "nodea 4"])
def test_a_line_of_a_file_that_is_not_read_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"nodeb\n{line}\n")
    with pytest.raises(nbddp.BadInput, match=f"line 2: '{line}' is not a host's line; write nodea slots=4"):
        hosts_of(str(file))


# -- by a real ssh -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh")) as made:
        yield made


def words(ssh: SshTransport, host: Host) -> str:
    done = subprocess.run(ssh.command(host), input="", capture_output=True, text=True, timeout=60)
    return ssh.failure(host, done.returncode, done.stderr + done.stdout)


@real
@pytest.mark.parametrize(
    "setup", ["", 'export GREETING="it\'s $((1 + 1))"', r"""export GREETING='it'\''s 2'; # two""" + "\ntrue"]
)
def test_words_reach_the_far_shell_as_they_are(hosts: Hosts, tmp_path: Path, setup: str) -> None:
    """The interpreter may have blanks and quotes in its name, and the set-up line is the shell's."""
    python = tmp_path / 'it\'s "a" $HOME python'
    python.write_text('#!/bin/sh\nprintf "%s|" "$@" "$GREETING"')
    python.chmod(0o755)
    ssh = SshTransport(str(hosts.config), str(python), setup)
    done = subprocess.run(ssh.command(Host("nodea")), input="", capture_output=True, text=True, timeout=60)
    assert done.stdout == f"-m|nbddp.capabilities.hosts.remote_agent|{'it' + chr(39) + 's 2' if setup else ''}|", (
        done.stderr
    )
    assert not {"\n", "!"} & set(ssh.command(Host("nodea"))[-1]), "tcsh as a login shell"


@real
def test_a_login_shell_that_runs_nothing_is_named(hosts: Hosts) -> None:
    silent = SshTransport(str(hosts.config), "true", "exit 0")
    assert words(silent, Host("nodea")) == (
        "nodea ran no command and printed nothing; ssh nodea date shows whether its login shell runs commands"
    )


@real
def test_a_host_without_the_interpreter_or_without_nbddp_is_named(hosts: Hosts, tmp_path: Path) -> None:
    nowhere = SshTransport(str(hosts.config), "/no/such/python")
    assert words(nowhere, Host("nodeb")).startswith("nodeb has no /no/such/python: ")
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\ncd /\nexec {shlex.quote(sys.executable)} -I -S "$@"\n')
    bare.chmod(0o755)
    said = words(SshTransport(str(hosts.config), str(bare)), Host("nodeb"))
    assert said.startswith(f"{bare} on nodeb has no nbddp: "), said
    assert said.endswith("install it there, or name another interpreter with --python")


@real
def test_a_host_that_cannot_be_reached_is_named_with_the_words_of_ssh(hosts: Hosts, tmp_path: Path) -> None:
    address, _ = hosts.addresses[0]
    strict = tmp_path / "config"
    text = hosts.config.read_text()
    strict.write_text(text.replace(f"{hosts.folder}/known_hosts", f"{tmp_path}/none"))
    assert words(SshTransport(str(strict)), Host("nodea")) == (
        "nodea cannot be reached: Host key verification failed.; "
        "run ssh nodea once in a terminal and check the key that it shows"
    )
    assert not (tmp_path / "none").exists(), "no key is taken silently"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    strict.write_text(text.replace(f"{hosts.folder}/id", f"{tmp_path}/other"))
    denied = words(SshTransport(str(strict)), Host("nodea"))
    assert "Permission denied (publickey)" in denied
    assert "ssh-copy-id nodea" in denied
    assert "Could not resolve hostname" in words(SshTransport(str(hosts.config)), Host("no-such-host.invalid"))
    refused = words(SshTransport(str(hosts.config)), Host(address, port=1))
    assert f"{address}:1 cannot be reached: ssh: connect to host {address} port 1: Connection refused" in refused


# -- versions ---------------------------------------------------------------------------------------


def test_versions_that_differ_are_named_with_their_hosts(tmp_path: Path) -> None:
    here = {"nbddp": "1", "torch": "2.9"}
    assert otherwise({"nbddp": "1", "torch": "2.8", CUDA: "12.8"}, {**here, DRIVER: "570.1"}) == {"torch": "2.8"}
    assert otherwise({"nbddp": "1"}, here) == {"torch": "none"}
    hosts = {"a": {DRIVER: "570.1", CUDA: "12.8"}, "b": {CUDA: "12.8"}, "c": {DRIVER: "570.1", CUDA: "12.8"}}
    assert differing(hosts) == ["the hosts differ in NVIDIA driver: 570.1 on a, c; none on b"]
    told = tmp_path / "version"
    told.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release\nGCC version: 12.2.0\n"
    )
    assert driver(told) == "570.86.15"
    assert driver(tmp_path / "none") == ""
    assert OF_CUDA.findall("debug = False\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n") == ["12.8"]
    assert OF_CUDA.findall("cuda: Optional[str] = None\ngit_version = 'x'\n") == []
