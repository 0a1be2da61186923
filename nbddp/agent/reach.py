"""How the agent of another host is started over ssh, and what ssh's words mean when it is not.

ssh is the user's own: its configuration, keys, agents, jump hosts and known hosts hold as in a terminal. It asks
nothing, since nobody could answer, and never takes a host's key that is not known. What is typed here for the far side
goes through its shell, so each word is quoted; no secret is on the line (`ps` shows it to everybody).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from nbddp.plan.hosts import Host

PATIENCE = 15  # seconds until a host that does not answer is given up
ALIVE_EVERY, MISSED = 2, 3  # seconds between ssh's own looks whether the other side lives, and how many may be in vain
SSH_FAILED = 255
NO_PROGRAM = (126, 127)
WORDS = {  # what ssh says → what to do
    "Host key verification failed": "run ssh {host} in a terminal once and look at the key that it shows",
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "ask who runs {host} whether its key is new; "
    "ssh-keygen -R removes the old one",
    "Permission denied": "put a key where ssh finds it (ssh-copy-id {host}, or ssh-add for one with a passphrase); no "
    "password can be asked for here",
    "Could not resolve hostname": "check the name, or give it a HostName in ssh's configuration",
    "Connection refused": "check that sshd runs there, and the port ({host}:PORT)",
    "No route to host": "check the address and the network between here and there",
    "Network is unreachable": "check the address and the network between here and there",
    "timed out": "check the address, and whether a firewall drops what comes to its ssh port",
    "Too many authentication failures": "name the key by IdentityFile and IdentitiesOnly yes in ssh's configuration",
    "Bad configuration option": "mend ssh's configuration",
}


@dataclass(frozen=True)
class Ssh:
    """How hosts are reached. config: ssh's `-F`; python: the interpreter there that has nbddp; setup: what the shell
    there does first (`module load cuda`)."""

    config: str = ""
    python: str = "python3"
    setup: str = ""

    def command(self, host: Host) -> list[str]:
        """What runs here; the agent there speaks on its stdin and stdout."""
        options = [
            *(["-F", self.config] if self.config else []),
            *(["-p", str(host.port)] if host.port else []),
            *(["-l", host.user] if host.user else []),
        ]
        settings = {
            "BatchMode": "yes", "ConnectTimeout": PATIENCE, "ServerAliveInterval": ALIVE_EVERY,
            "ServerAliveCountMax": MISSED, "ForwardX11": "no", "ClearAllForwardings": "yes", "RequestTTY": "no",
        }  # fmt: skip
        given = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
        return ["ssh", *options, *given, "--", host.name, self.far_line()]

    def far_line(self) -> str:
        """The line for the shell over there; the agent takes the shell's place."""
        agent = f"exec {shlex.quote(self.python)} -m nbddp.agent.reached"
        if not self.setup:
            return agent
        return f"exec bash -lc {shlex.quote(f'{self.setup}{chr(10)}{agent}')}"


def failure(host: Host, ssh: Ssh, code: int | None, said: str) -> str:
    """Why a host's agent did not come up, and what to do. code: ssh's exit status; None while it runs. said: all that
    ssh and the far side wrote."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = lines[-1] if lines else "it said nothing"
    if code == SSH_FAILED:
        advice = next((what for words, what in WORDS.items() if words in said), "try ssh {host} in a terminal")
        told = next((line for line in reversed(lines) if any(words in line for words in WORDS)), last)
        return f"{host} cannot be reached: {told}; {advice.format(host=host)}"
    if code in NO_PROGRAM:
        return f"{host} has no {ssh.python}: {last}; name its interpreter by --python PATH"
    if "No module named nbddp" in said or "No module named 'nbddp" in said:
        return f"{ssh.python} on {host} has no nbddp: {last}; install it there, or name another interpreter by --python"
    if code is None:
        return f"{host} did not answer; it said: {last}"
    return f"the agent on {host} ended with exit code {code}: {last}"
