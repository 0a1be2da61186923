"""How the agent of another host is started: by ssh or a command of the user's; and what their words mean when it is
not.

ssh is the user's own: its configuration, keys, agents, jump hosts and known hosts hold as in a terminal. It asks
nothing, since nobody could answer, and never takes a host's key that is not known. What is typed here for the far side
goes through its shell, so each word is quoted; no secret is on the line (`ps` shows it to everybody).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from nbddp.agent.child_logs import TRACEBACK, cause, last_line
from nbddp.capabilities.hosts import via
from nbddp.capabilities.hosts.names import Host

PATIENCE = 15  # seconds until a host that does not answer is given up
ALIVE_EVERY, MISSED = 2, 3  # seconds between ssh's own looks whether the other side lives, and how many may be in vain
SSH_FAILED = 255
NO_PROGRAM = (126, 127)
UNQUOTABLE = r"[\\\n!']"  # what mean something within single quotes to some login shells: tcsh, fish
AGENT = ("nbddp.capabilities.hosts.remote_agent",)
WORDS = {  # ssh's message → advice
    "Host key verification failed": "run ssh {host} once in a terminal and check the key that it shows",
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "ask the administrator of {host} whether its key has changed; "
    "ssh-keygen -R {host} removes the old one",
    "Permission denied": "set up a key (ssh-copy-id {host}, or ssh-add for a key with a passphrase); ssh cannot ask "
    "for a password here",
    "Could not resolve hostname": "check the name, or set a HostName for it in ssh's configuration",
    "Connection refused": "check that sshd runs there, and the port ({host}:PORT)",
    "No route to host": "check the address and the network between here and there",
    "Network is unreachable": "check the address and the network between here and there",
    "timed out": "check the address, and whether a firewall drops connections to its ssh port",
    "Too many authentication failures": (
        "name the key with IdentityFile and set IdentitiesOnly yes in ssh's configuration"
    ),
    "Bad configuration option": "fix ssh's configuration",
}


class Transport:
    """How the agent of a host is started, and what the words mean when it is not. python: the interpreter there that
    has nbddp; setup: what a login shell there does first (`module load cuda`)."""

    name = ""
    survives = True  # whether what was started may live on when this end has gone

    def __init__(self, python: str = "python3", setup: str = ""):
        self.python, self.setup = python, setup

    def command(self, host: Host, module: Sequence[str] = AGENT) -> list[str]:
        """What runs here; the module there, with its words, speaks on its stdin and stdout."""
        raise NotImplementedError

    def environment(self) -> dict[str, str] | None:
        """The environment of what runs here; None: this process's own."""
        return None

    def address(self, host: Host) -> str:
        """Where others reach the host, if that is known here; else empty."""
        return ""

    def failure(self, host: Host, code: int | None, said: str) -> str:
        """Why a host's agent did not come up, and what to do. code: the exit status; None while it runs. said: all that
        the program and the far side wrote."""
        last = last_line(said)
        python = self.python_of(host)
        if code in NO_PROGRAM or any(words in said for words in (f"{python}: No such file", f"Executable: {python}\n")):
            return f"{host} has no {python}: {last}; name its interpreter with --python PATH"
        if "No module named nbddp" in said or "No module named 'nbddp" in said:
            return (
                f"{python} on {host} has no nbddp: {last}; install it there, or name another interpreter with --python"
            )
        if code is None:
            return f"{host} did not answer; it said: {last}"
        return f"the agent on {host} exited with code {code}: {cause(said) if TRACEBACK in said else last}"

    def ended(self, host: Host, said: str) -> str:
        """Why a connection that stood has ended, where the words tell it; else empty."""
        return ""

    def start(self, host: Host, module: Sequence[str]) -> list[str]:
        """The command on the host."""
        start, setup = [self.python_of(host), "-m", *module], host.setup or self.setup
        if not setup:
            return start
        script = re.sub(UNQUOTABLE, lambda found: rf"\0{ord(found[0]):03o}", f"{setup}\nexec {shlex.join(start)}")
        return ["bash", "-lc", f'eval "$(printf %b {shlex.quote(script)})"']

    def python_of(self, host: Host) -> str:
        """The interpreter there."""
        return host.python or self.python


class SshTransport(Transport):
    """By the user's own ssh. config: its `-F`."""

    name = "ssh"

    def __init__(self, config: str = "", python: str = "python3", setup: str = ""):
        super().__init__(python, setup)
        self.config = config

    def command(self, host: Host, module: Sequence[str] = AGENT) -> list[str]:
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
        # a line for the shell over there; the agent takes the shell's place
        return ["ssh", *options, *given, "--", host.name, f"exec {shlex.join(self.start(host, module))}"]

    def failure(self, host: Host, code: int | None, said: str) -> str:
        if code == 0 and not said.strip():
            return (
                f"{host} ran no command and printed nothing; ssh {host} date shows whether its login shell runs "
                "commands"
            )
        if code != SSH_FAILED:
            return super().failure(host, code, said)
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        advice = next((what for words, what in WORDS.items() if words in said), "try ssh {host} in a terminal")
        told = next((line for line in reversed(lines) if any(words in line for words in WORDS)), last_line(said))
        return f"{host} cannot be reached: {told}; {advice.format(host=host)}"


class TemplateTransport(Transport):
    """By a command that the user gives: `kubectl exec -i {host} -- {command}`."""

    def __init__(self, text: str, python: str = "python3", setup: str = ""):
        super().__init__(python, setup)
        self.text = text
        self.name = shlex.split(text)[0]

    def command(self, host: Host, module: Sequence[str] = AGENT) -> list[str]:
        return via.filled(self.text, host, self.start(host, module))

    def failure(self, host: Host, code: int | None, said: str) -> str:
        told = super().failure(host, code, said)
        return f"{told}; it was started by {shlex.join(self.command(host)[:6])} …"
