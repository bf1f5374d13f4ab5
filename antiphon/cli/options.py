"""Options that several commands share, declared once, and the configuration made from them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from antiphon.base.errors import UserError
from antiphon.base.units import parse_bytes
from antiphon.serve.config import Layout, ServeConfig

ModelFolder = Annotated[Path, typer.Argument(metavar="MODEL", help="Checkpoint folder in Hugging Face format.")]
DeviceOption = Annotated[str, typer.Option("--device", metavar="NAME", help="cpu or cuda.")]
ThreadsOption = Annotated[
    int, typer.Option("--threads", metavar="N", show_default="share the cores", help="Threads per worker.")
]
TimelineOption = Annotated[
    Path | None, typer.Option("--timeline", metavar="FILE", help="Write a Perfetto trace at the end.")
]


@dataclass(frozen=True, kw_only=True)
class CapacityOptions:
    """How much may run at once."""

    max_running: Annotated[int, typer.Option(metavar="N", help="Requests a step, per worker.")] = 256
    max_batch_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens a step, per worker.")] = 2048
    max_waiting: Annotated[int, typer.Option(metavar="N", help="Requests in line; more: 429.")] = 1024


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Which workers run a model, and how. 0 (or "auto") leaves the choice to us."""

    layout: Annotated[str, typer.Option(metavar="NAME", help="auto, colocated or disaggregated.")] = "auto"
    attention: Annotated[int, typer.Option(metavar="N", help="Attention workers, or replicas.")] = 1
    experts: Annotated[int, typer.Option(metavar="N", show_default="1", help="Expert workers, if disaggregated.")] = 0
    micro_batches: Annotated[int, typer.Option(metavar="N", show_default="2", help="Ping-pong, if disaggregated.")] = 0
    transport: Annotated[str, typer.Option(metavar="NAME", help="auto, shm, tcp or libfabric.")] = "auto"
    device: DeviceOption = "cpu"
    dtype: Annotated[str, typer.Option(metavar="NAME", help="bfloat16, float16, float32.")] = "auto"
    kernels: Annotated[str, typer.Option(metavar="NAME", help="cpu (native), reference.")] = "auto"
    max_model_len: Annotated[int, typer.Option(metavar="N", show_default="the model's", help="Longest sequence.")] = 0
    kv_bytes: Annotated[str, typer.Option(metavar="SIZE", show_default="30% of free", help="KV cache, e.g. 4GiB.")] = (
        "0"
    )
    threads: ThreadsOption = 0
    timeout: Annotated[float, typer.Option(metavar="S", help="Patience between workers.")] = 30.0
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Obey this plan's decode phase.")] = None

    def config(self, model: Path, capacity: CapacityOptions, *, trace: bool) -> ServeConfig:
        """A validated configuration; options that do not apply to the layout are refused, not ignored."""
        layout = self._resolve_layout()
        return ServeConfig(
            model=model,
            layout=layout,
            num_attention=self.attention,
            num_experts=self.experts or 1,
            num_micro_batches=self.micro_batches or (2 if layout == "disaggregated" else 1),
            exchange=self.transport,
            device=self.device,
            dtype=self.dtype,
            kernels=self.kernels,
            max_model_len=self.max_model_len,
            kv_bytes=parse_size("--kv-bytes", self.kv_bytes),
            max_running=capacity.max_running,
            max_batch_tokens=capacity.max_batch_tokens,
            max_waiting=capacity.max_waiting,
            num_threads=self.threads,
            timeout_s=self.timeout,
            trace=trace,
        )

    def _resolve_layout(self) -> Layout:
        for name, value in (("experts", self.experts), ("micro-batches", self.micro_batches)):
            if value < 0:
                raise UserError(f"--{name} is {value}: it must be at least 1, or 0 for the default")
        if self.layout not in {"auto", "colocated", "disaggregated"}:
            raise UserError(f"--layout {self.layout} does not exist: use auto, colocated or disaggregated")
        if self.layout == "disaggregated":
            return "disaggregated"
        # On one machine the colocated layout is the faster one; asking for what only the other has asks for the other.
        if self.layout == "auto" and (self.experts > 0 or self.micro_batches > 1 or self.transport != "auto"):
            return "disaggregated"
        if self.experts > 0:
            self._refuse_in_colocated(f"--experts {self.experts}")
        if self.transport != "auto":
            self._refuse_in_colocated(f"--transport {self.transport}")
        return "colocated"

    @staticmethod
    def _refuse_in_colocated(option: str) -> None:
        raise UserError(f"{option} does not apply to --layout colocated: leave it out or use disaggregated")


def parse_size(option: str, text: str) -> int:
    """Bytes from what was written behind `option`; `UserError` names it."""
    try:
        return parse_bytes(text)
    except UserError as error:
        raise UserError(f"{option} {error}") from error
