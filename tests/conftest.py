"""What tests of several packages share: one tiny checkpoint, one running server over it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.server_harness import ServerProcess, serve, write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete checkpoint folder. Do not change it: copy it."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="session")
def live_server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One attention worker, one expert worker, two micro-batches."""
    with serve(checkpoint, tmp_path_factory.mktemp("server"), "--layout", "disaggregated") as server:
        yield server
