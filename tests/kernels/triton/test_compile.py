"""Every kernel compiles for both generations of GPUs, without one."""

import json
import os
import subprocess
import sys

import pytest

from antiphon.kernels.triton import is_installed

PROGRAM = """
import dataclasses, json
from tests.kernels.triton.every_kernel import compile_every_kernel
print(json.dumps([{**dataclasses.asdict(each), "fits": each.fits} for each in compile_every_kernel(CAPABILITY)]))
"""


@pytest.mark.skipif(not is_installed(), reason="Triton is not installed")
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles(capability: int) -> None:
    """In a process of its own, because this one interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = PROGRAM.replace("CAPABILITY", str(capability))
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert [each for each in found if not each["fits"]] == []
    assert sum(each["kernel"] == "attend" for each in found) == 8  # types and formats, at any length of context
    names = {each["kernel"] for each in found}
    with_wgmma = [each for each in found if each["kernel"] == "grouped" and each["num_wgmma"]]
    assert len(with_wgmma) == (15 if capability == 90 else 0)  # three products of many rows in each of five formats
    assert names >= {"activate", "activate_gradient", "loss"}
    assert names >= {
        "attend",
        "join",
        "store",
        "turn",
        "gate",
        "grouped",
        "count",
        "place",
        "sum",
        "scale",
        "norm",
        "norm_gradient",
    }
