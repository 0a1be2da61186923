"""Nodes whose agents are started otherwise than by ssh: by mpiexec, or by a command of the user's."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator

import psutil
import pytest

import nbddp
from nbddp.agent.child_logs import last_line
from nbddp.capabilities.hosts.names import Host
from nbddp.capabilities.hosts.via import filled, via_of
from nbddp.errors import AgentFailed
from nbddp.output.screens import NullScreen
from nbddp.pool.pool import WorkerPool
from tests import places
from tests.hosts import ssh_hosts
from tests.hosts.ssh_hosts import Hosts

ROOT = places.ROOT
INIT = "import os, torch, torch.distributed as dist\nif not dist.is_initialized(): dist.init_process_group('gloo')\n"
SUM = f"{INIT}t = torch.ones(1)\ndist.all_reduce(t)\nt.item()"
ssh = pytest.mark.skipif(not ssh_hosts.HERE, reason=ssh_hosts.MISSING)
mpi = pytest.mark.skipif(shutil.which("mpiexec") is None, reason="there is no mpiexec (apt-get install openmpi-bin)")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("kubectl exec -i {host} -- {command}", ["kubectl", "exec", "-i", "pod-0", "--", "py thon", "-m", "x"]),
        ("ssh gate 'docker exec -i {host} {command}'", ["ssh", "gate", "docker exec -i pod-0 'py thon' -m x"]),
    ],
)
def test_a_template_is_filled(template: str, words: list[str]) -> None:
    assert filled(via_of(template), Host("pod-0"), ["py thon", "-m", "x"]) == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kubectl exec {host}", r"--via kubectl exec \{host\} lacks \{command\}; write a command such as"),
        ("run '{host} {command}", "--via run .*: No closing quotation"),
        ("", "--via is empty; use ssh, mpiexec, or a command"),
    ],
)
def test_what_starts_nothing_is_refused(text: str, words: str) -> None:
    with pytest.raises(nbddp.BadInput, match=words):
        via_of(text)


def test_a_user_or_a_port_that_a_command_has_no_place_for_is_refused() -> None:
    pool = WorkerPool(nproc=1, hosts="pod-0,me@pod-1", via="kubectl exec -i {host} -- {command}")
    with pytest.raises(nbddp.BadInput, match="host names only, but me@pod-1 has a user; name it as pod-1, and put"):
        pool.start()
    pool.close()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with ssh_hosts.ssh_hosts(tmp_path_factory.mktemp("ssh")) as made:
        yield made


def set_up(hosts: Hosts) -> str:
    return f"export PYTHONPATH={shlex.quote(str(ROOT))} NBDDP_RUNTIME_DIR={shlex.quote(str(hosts.folder))}"


@ssh
def test_a_command_starts_an_agent(hosts: Hosts) -> None:
    via = f"ssh -F {hosts.config} {{host}} env NBDDP_RUNTIME_DIR={hosts.folder} PYTHONPATH={ROOT} '{{command}}'"
    with WorkerPool(nproc=2, hosts="nodea", via=via) as pool:
        assert list(pool.run_cell(SUM, want_value=True, screen=NullScreen())) == [2.0, 2.0]


@mpi
@ssh
@pytest.mark.more
def test_mpiexec_starts_the_agents(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each host; its own words to its tasks are none of the workers'."""
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMPI_MCA_plm_rsh_agent", f"ssh -F {hosts.config}")
    with WorkerPool(nproc=2, hosts="nodea,nodeb", via="mpiexec", setup=set_up(hosts)) as pool:
        assert list(pool.run_cell(SUM, want_value=True, screen=NullScreen())) == [4.0] * 4
        found = pool.run_cell(
            "[k for k in os.environ if k.startswith(('OMPI', 'PMIX'))], len(os.sched_getaffinity(0))",
            want_value=True, screen=NullScreen(),
        )  # fmt: skip
        assert list(found) == [([], len(os.sched_getaffinity(0)))] * 4
        with pytest.raises(nbddp.WorkerFailed, match="rank 3 died: killed by SIGKILL"):
            pool.run_cell("if os.environ['RANK'] == '3': os.kill(os.getpid(), 9)", screen=NullScreen())
        started = [psutil.Process(node.agent.process.pid) for node in pool.group.added]  # type: ignore[union-attr]
        assert {process.name() for process in started} <= {"mpiexec", "mpirun", "orterun", "mpiexec.hydra"}
    _, alive = psutil.wait_procs(started, 20)
    assert not alive


@mpi
@ssh
def test_what_went_wrong_is_found_among_the_words_of_mpiexec(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMPI_MCA_plm_rsh_agent", f"ssh -F {hosts.config}")
    for host, python, words in (
        ("no-such-host.invalid", sys.executable, "exited with code 255: ssh: Could not resolve hostname no-such-host"),
        ("nodea", "/no/python", "nodea has no /no/python: mpiexec was unable to launch the specified application"),
    ):
        pool = WorkerPool(nproc=1, hosts=host, via="mpiexec", python=python)
        with pytest.raises(AgentFailed, match=words):
            pool.start()
        pool.close()


@ssh
def test_a_command_that_does_not_work_is_named_with_its_words(hosts: Hosts) -> None:
    pool = WorkerPool(nproc=1, hosts="nodea", via="sh -c 'echo no such pod >&2; exit 4' {host} {command}")
    with pytest.raises(AgentFailed, match="agent on nodea exited with code 4: no such pod; it was started by"):
        pool.start()
    nowhere = WorkerPool(nproc=1, hosts="nodea", via="/no/such/program {host} {command}")
    with pytest.raises(AgentFailed, match="nodea cannot be reached: /no/such/program could not be started here"):
        nowhere.start()
    pool.close()
    nowhere.close()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("a\n" + "-" * 60 + "\nmpiexec was\nunable\n" + "-" * 60 + "\n", "a"),
        ("-" * 60 + "\nmpiexec was\nunable\n" + "-" * 60 + "\n", "mpiexec was unable"),
        (
            "[vm:14887] plm:rsh: Warning: setpgid(14893,14893) failed in parent with errno=Permission denied(13)\n"
            + "-" * 60 + "\nmpiexec was\nunable\n" + "-" * 60 + "\n",
            "mpiexec was unable",
        ),
        ("[vm:1] plm:rsh: Warning: nothing else", "[vm:1] plm:rsh: Warning: nothing else"),
        ("the cause\n[vm:1] plm:rsh: Warning: setpgid\n", "the cause"),
    ],
)  # fmt: skip
def test_what_open_mpi_warns_of_is_not_taken_for_the_cause(said: str, words: str) -> None:
    """It loses a race for setpgid now and then, and says so before what went wrong."""
    assert last_line(said) == words
