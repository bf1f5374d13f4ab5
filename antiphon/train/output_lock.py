"""One run at a time in an output folder.

The lock is the kernel's (`flock`), on a file that says who has it. It goes with the process, however that ends, so
there is no stale lock to remove. Rejected: a file that exists while a run lives; a kill leaves it behind.
"""

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger

FILE = "lock"
_log = get_logger("train")


class OutputLock:
    """Holds `folder` until `close`, or until this process ends. `UserError` if another run has it."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor: int | None = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"output.folder {folder}: cannot be written ({error.strerror}): name another") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = self._holder()
            self.close()
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                _log.warning("%s cannot be locked (%s): start no second run in it", folder, error.strerror)
                return
            raise UserError(
                f"output.folder {folder} is in use by {holder}: wait for it, stop it, or name another folder"
            ) from error
        os.ftruncate(self._descriptor, 0)
        facts = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.write(self._descriptor, json.dumps(facts).encode())

    def close(self) -> None:
        """Let others have it; may be called again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.close()

    def _holder(self) -> str:
        try:
            facts = json.loads(self._file.read_text(encoding="utf-8"))
            return f"process {facts['process']} on {facts['host']}, since {facts['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another run"
