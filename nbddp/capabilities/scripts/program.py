"""A script or module to run on every rank: its part of torchrun's command line, and its additional variables. Pure."""

from __future__ import annotations

import os
import re
import signal
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbddp.errors import BadInput
from nbddp.launch.torchrun_env import HANDLING, KEEPS_PROCESS, SIGNALS
from nbddp.protocol.codec import Json
from nbddp.protocol.request import SHUTDOWN

SCRIPT = "script"  # the request that runs one on a rank
SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
DASHED, UNDERSCORED = "--local-rank", "--local_rank"


@dataclass(frozen=True)
class ScriptProgram:
    """A `Program` of `nbddp.protocol.request`. target: the path as typed, or the module's name (`module`). keep: the
    ranks and the script's variables survive it.

    run_id, role: TORCHELASTIC_RUN_ID and ROLE_NAME; empty: the pool's, and torchrun's `default`. signals: those that
    the launcher passes on to the ranks, in a terminal. local_rank: the option by which each rank is given its local
    rank (`torch.distributed.launch`), or empty.
    """

    target: str
    module: bool = False
    keep: bool = False
    run_id: str = ""
    role: str = ""
    signals: str = SIGNALS
    local_rank: str = ""

    op = SCRIPT

    @property
    def name(self) -> str:
        """As reports and torchrun's summary name it."""
        return self.target

    @property
    def one_shot(self) -> bool:
        return not self.keep

    @property
    def fields(self) -> Json:
        return {"target": self.target, "module": self.module, "keep": self.keep}

    def env(self, base: Mapping[str, str]) -> dict[str, str | None]:
        """What its environment has that a cell's has not; None: a variable that is not set there.

        base: as in `torchrun_env.of_worker`. If the process survives the script, it survives a failed collective; else
        NCCL's errors end it, as under torchrun.
        """
        env: dict[str, str | None] = {
            "TORCHELASTIC_SIGNALS_TO_HANDLE": self.signals, "ROLE_NAME": self.role or "default"
        }  # fmt: skip
        if self.run_id:
            env["TORCHELASTIC_RUN_ID"] = self.run_id
        if self.one_shot:
            env |= {name: base.get(name) for name in KEEPS_PROCESS}
            env[HANDLING] = base.get(HANDLING, "1")
        return env

    def argv(self, words: tuple[str, ...], local_rank: int) -> list[str]:
        """`sys.argv[1:]` of one rank. torchrun's macro is carried out in it: `${local_rank}`."""
        own = [f"{self.local_rank}={local_rank}"] if self.local_rank else []
        return [*own, *(string.Template(word).safe_substitute(local_rank=local_rank) for word in words)]


def check_file(program: ScriptProgram, folder: str, words: Sequence[str] = ()) -> None:
    """Raises BadInput if there is no such script on this machine. words: those that follow it."""
    if program.module or os.path.exists(os.path.join(folder, program.target)):
        return
    for i in range(1, len(words) + 1):
        whole = " ".join((program.target, *words[:i]))
        if os.path.exists(os.path.join(folder, whole)):
            raise BadInput(f"there is no file {program.target!r}; quote a path with spaces, as in '{whole}'")
    near = [p.name for p in Path(folder).glob("*.py")]
    advice = f"its .py files: {', '.join(sorted(near)[:6])}" if near else "it has no .py file"
    dotted = re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", program.target)
    module = f"; a module is run with -m {program.target}" if dotted and not program.target.endswith(".py") else ""
    raise BadInput(f"there is no file {program.target!r} in {folder or 'the working directory'}; {advice}{module}")


def shutdown_of(env: Mapping[str, str]) -> float:
    """Seconds from SIGTERM to SIGKILL where the command line does not say."""
    text = env.get(SHUTDOWN_VARIABLE, "")
    return float(text) if text.isdigit() else SHUTDOWN


def signals_of(text: str) -> str:
    """A list of signals' names, as it goes into the environment. Raises ValueError for one that is none."""
    for name in text.split(","):
        if not name.startswith("SIG") or name not in signal.Signals.__members__:
            raise ValueError(f"{name!r} is not a signal on this system; write it as SIGTERM,SIGUSR1")
    return text


def own_option(source: str) -> str:
    """The option that a script written for `torch.distributed.launch` takes. Launchers before torch 2.0 spelled it with
    an underscore, and a parser that has only that one refuses today's."""
    return UNDERSCORED if UNDERSCORED in source and DASHED not in source else DASHED
