"""One build for each sanitizer, so that the native test programs share what they compile."""

from collections.abc import Callable

import pytest

from tests.comm.m2n.compile import Build, usable_build


@pytest.fixture(scope="session")
def native_build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Build]:
    """The build with the named sanitizer; skips where it cannot be had."""
    builds: dict[str, Build] = {}

    def build(sanitizer: str) -> Build:
        if sanitizer not in builds:
            builds[sanitizer] = usable_build(sanitizer, tmp_path_factory.mktemp(sanitizer))
        return builds[sanitizer]

    return build
