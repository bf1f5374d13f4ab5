"""Descriptors beyond 1,023, and the limit on their number."""

import os
import resource
import subprocess
import sys

import pytest

from antiphon.base.system import limit, wait_ready

RAISED = """
import os, resource, subprocess, sys, time
from antiphon.base.system import limit, raise_limit
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
assert limit() == 64
raise_limit()
assert limit() == (1 << 20 if hard == resource.RLIM_INFINITY else min(hard, 1 << 20)), limit()
started = time.process_time()
subprocess.run([sys.executable, "-c", "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"])
assert time.process_time() - started < 0.2, "nobody looks at a million descriptors"
"""


def test_the_limit_is_raised_as_far_as_the_system_allows_and_children_have_it() -> None:
    done = subprocess.run([sys.executable, "-c", RAISED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) >= 64


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 1100, reason="too few descriptors")
def test_a_descriptor_beyond_those_of_select_is_waited_for() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit(), 1100), before[1]))
    reading, writing = os.pipe()
    try:
        os.dup2(reading, 1090)
        with open(1090, "rb", buffering=0) as far, open(writing, "wb", buffering=0) as pipe:  # noqa: PTH123
            assert not wait_ready(far, 0.01)
            assert wait_ready(pipe, 20.0, to_write=True)
            pipe.write(b"x")
            assert wait_ready(far, 20.0)
            assert far.read(1) == b"x"
        with open(reading, "rb", buffering=0) as near:  # noqa: PTH123
            assert wait_ready(near, 1e9), "the other end's hanging up counts, and a year is not too long"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
