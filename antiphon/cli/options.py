"""Options that several commands share, declared once, and the configuration made from them."""

from pathlib import Path
from typing import Annotated

import typer

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.base.units import parse_bytes as parse_bytes
from antiphon.serve.config import Layout, ServeConfig

_log = get_logger("cli")

ModelFolder = Annotated[Path, typer.Argument(metavar="MODEL", help="Checkpoint folder in Hugging Face format.")]
LayoutOption = Annotated[str, typer.Option("--layout", help="auto, colocated or disaggregated.")]
AttentionOption = Annotated[int, typer.Option("--attention", help="Attention workers, or colocated replicas.")]
ExpertsOption = Annotated[int, typer.Option("--experts", help="Expert workers (disaggregated). 0: 1.")]
MicroBatchesOption = Annotated[
    int, typer.Option("--micro-batches", help="Ping-pong micro-batches. 0: 2 apart, else 1.")
]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto, bfloat16, float16 or float32.")]
KernelsOption = Annotated[str, typer.Option("--kernels", help="auto, cpu (native) or reference (PyTorch).")]
MaxModelLenOption = Annotated[int, typer.Option("--max-model-len", help="Longest sequence. 0: the model's own.")]
KvBytesOption = Annotated[str, typer.Option("--kv-bytes", help="KV cache budget, e.g. 4GiB. 0: 30% of free memory.")]
MaxRunningOption = Annotated[
    int, typer.Option("--max-running", help="Requests decoding at once, per attention worker.")
]
MaxBatchTokensOption = Annotated[
    int, typer.Option("--max-batch-tokens", help="Rows of one step, per attention worker.")
]
ThreadsOption = Annotated[int, typer.Option("--threads", help="Threads per worker. 0: share the cores.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", help="Seconds a worker may take to answer another.")]
JsonOption = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write JSON to FILE ('-': stdout).")]


def serve_config(
    model: Path,
    *,
    layout: str,
    attention: int,
    experts: int,
    micro_batches: int,
    device: str,
    dtype: str,
    kernels: str,
    max_model_len: int,
    kv_bytes: str,
    max_running: int,
    max_batch_tokens: int,
    threads: int,
    timeout: float,
    max_waiting: int = 1024,
    trace: bool = False,
) -> ServeConfig:
    """A validated configuration; options that do not apply to the layout are refused, not ignored."""
    resolved = _resolve_layout(layout, experts, micro_batches)
    if resolved == "colocated" and experts > 0:
        raise UserError(f"--experts {experts} does not apply to --layout colocated: leave it out or use disaggregated")
    if experts < 0 or micro_batches < 0:
        raise UserError(f"--experts {experts}, --micro-batches {micro_batches}: both must be at least 0")
    return ServeConfig(
        model=model,
        layout=resolved,
        num_attention=attention,
        num_experts=experts or 1,
        num_micro_batches=micro_batches or (2 if resolved == "disaggregated" else 1),
        device=device,
        dtype=dtype,
        kernels=kernels,
        max_model_len=max_model_len,
        kv_bytes=parse_bytes(kv_bytes),
        max_running=max_running,
        max_batch_tokens=max(max_batch_tokens, max_running),
        max_waiting=max_waiting,
        num_threads=threads,
        timeout_s=timeout,
        trace=trace,
    )


def _resolve_layout(layout: str, experts: int, micro_batches: int) -> Layout:
    if layout == "colocated" or layout == "disaggregated":
        return "colocated" if layout == "colocated" else "disaggregated"
    if layout != "auto":
        raise UserError(f"--layout {layout} does not exist: use auto, colocated or disaggregated")
    if experts > 0 or micro_batches > 1:
        _log.info("layout: disaggregated, because expert workers or micro-batches were asked for")
        return "disaggregated"
    _log.info("layout: colocated (on one machine it is the faster one; --layout disaggregated separates the two)")
    return "colocated"
