"""A cluster in a box whose programs are forked by the fork server: `Box.start` would import all that they need.

The box itself starts a program in each node, which sleeps, and the fork server enters the node of that one. What it
forks is a child of this process, in the node's network, files, shared memory and process numbers.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from antiphon.bench.box import Box
from tests.serve.fork_server import PROGRAMS

ROOT = Path(__file__).parents[2]
Program = subprocess.Popen[bytes]


class ForkingBox(Box):
    """`start` and what else a box has, and `fork`."""

    def __init__(self, **shape: Any) -> None:
        super().__init__(**shape)
        self._sleepers: dict[int, int] = {}
        self._forked = ExitStack()

    def __exit__(self, *error: object) -> None:
        """A node ends once its owners have collected its processes."""
        try:
            self._forked.close()
        finally:
            super().__exit__(*error)

    def fork(self, node: int, command: Sequence[str], env: Mapping[str, str], **streams: int) -> Program:
        """A process in the node, which `__exit__` kills. `env` is added to this process's environment."""
        if node not in self._sleepers:
            self._sleepers[node] = os.pidfd_open(self.start(node, ["sleep", "infinity"]).pid)
            self._forked.callback(os.close, self._sleepers[node])
        process = PROGRAMS.Popen(
            command,
            self._sleepers[node],
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
            cwd=ROOT,
            start_new_session=True,
            **streams,
        )
        self._forked.enter_context(process)
        self._forked.callback(process.kill)
        return process
