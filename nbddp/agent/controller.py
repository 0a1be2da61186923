"""The ipyparallel controller as a child of the agent: one process that dies with it.

Schedulers run in threads (ipyparallel's `use_threads`); its heart monitor is a process
of its own, which here is tied to the controller's life. The beat is 5 per second, since
a registration waits for one or two beats; missed beats mean nothing, because the agent
knows of every exit in milliseconds and a suspended machine must not lose its engines.
"""

from __future__ import annotations

import os
from multiprocessing import get_context
from typing import Any

from nbddp.agent.children import die_with_parent

BEAT_MS = 200


def main(request: dict[str, Any]) -> int:
    """Run the controller of the cluster `cluster_id` under `profile_dir` until it is told to end."""
    import ipyparallel.controller.app as controller_app
    from traitlets.config import Config

    parent = os.getpid()
    fork = get_context("fork")

    class TiedProcess(fork.Process):  # type: ignore[misc,name-defined]
        """A process of ipyparallel's that ends with the controller, even if that is killed."""

        def run(self) -> None:
            die_with_parent(parent)
            super().run()

    controller_app.Process = TiedProcess
    config = Config()
    config.ProfileDir.location = request["profile_dir"]
    config.IPController.cluster_id = request["cluster_id"]
    config.IPController.use_threads = True
    config.IPController.ip = "127.0.0.1"
    config.IPController.log_level = 30
    config.HeartMonitor.period = BEAT_MS
    config.HeartMonitor.max_heartmonitor_misses = 10**6
    app = controller_app.IPController.instance(config=config)
    app.initialize([*request.get("args", ())])
    app.start()
    return 0
