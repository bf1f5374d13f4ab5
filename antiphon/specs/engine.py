"""What an engine's steps cost beside the roofline, by engine, from TOML files, shipped or a user's own.

A roofline prices kernels. An engine also launches them one by one, plans each step, samples, and waits for the slowest
of its ranks. These constants are of an engine (`vllm`, `sglang`, `trtllm`), the same for every model and device, and
are fitted to measured deployments (`antiphon reproduce --deployments --fit`). Rejected: an efficiency for each model or
device. It explains what was measured and says nothing about the next one.
"""

from dataclasses import dataclass
from pathlib import Path

from antiphon.base.errors import UserError
from antiphon.specs.catalog import LISTED, shipped_file
from antiphon.specs.checked import NotNegative, Positive, Text, checked, read, read_mapping


@checked("engine")
@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Constants of one engine.

    `step_s`: of a step, whatever is in it; `sequence_s`: of each sequence that it decodes on a data-parallel rank;
    `kernel_s`: of each kernel; `collective_s`: of each collective, beside its bytes. `dense`, `experts`, `wire`,
    `prompt`: time over the roofline's, of everything but the experts, of the experts, of bytes between devices, and of
    a prompt's tokens. Time to first token: `first_s` + `waits` * the time between two tokens + `alone` * the prompt's
    prefill + `queued` * that of all requests in flight. `low`, `high`: between these multiples of a prediction lie four
    of five measured times per token. `source`: how they were found.
    """

    name: Text
    step_s: NotNegative
    sequence_s: NotNegative
    kernel_s: NotNegative
    collective_s: NotNegative
    dense: NotNegative
    experts: NotNegative
    wire: NotNegative
    prompt: NotNegative
    first_s: NotNegative
    waits: NotNegative
    alone: NotNegative
    queued: NotNegative
    low: Positive = 1.0
    high: Positive = 1.0
    source: str = ""

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise UserError(f"engine {self.name}: low is {self.low} and high {self.high}: low must not be above high")


def load_engine(name_or_path: str | Path) -> EngineSpec:
    """A shipped engine (``"vllm"``) or that of a TOML file; `UserError` names what is wrong and where."""
    path = shipped_file("engine", name_or_path)
    values = {key: value for key, value in read_mapping(path).items() if key not in LISTED}
    return read(EngineSpec, values, str(path))
