"""Options that several commands share, declared once, and the configuration made from them."""

from pathlib import Path
from typing import Annotated

import typer

from antiphon.base.errors import UserError
from antiphon.base.units import parse_bytes
from antiphon.serve.config import Layout, ServeConfig

ModelFolder = Annotated[Path, typer.Argument(metavar="MODEL", help="Checkpoint folder in Hugging Face format.")]
LayoutOption = Annotated[str, typer.Option("--layout", metavar="NAME", help="auto, colocated or disaggregated.")]
AttentionOption = Annotated[int, typer.Option("--attention", metavar="N", help="Attention workers, or replicas.")]
ExpertsOption = Annotated[
    int, typer.Option("--experts", metavar="N", show_default="1", help="Expert workers, if disaggregated.")
]
MicroBatchesOption = Annotated[
    int, typer.Option("--micro-batches", metavar="N", show_default="2", help="Ping-pong, if disaggregated.")
]
DeviceOption = Annotated[str, typer.Option("--device", metavar="NAME", help="cpu or cuda.")]
DtypeOption = Annotated[str, typer.Option("--dtype", metavar="NAME", help="bfloat16, float16, float32.")]
KernelsOption = Annotated[str, typer.Option("--kernels", metavar="NAME", help="cpu (native), reference.")]
MaxModelLenOption = Annotated[
    int, typer.Option("--max-model-len", metavar="N", show_default="the model's", help="Longest sequence.")
]
KvBytesOption = Annotated[
    str, typer.Option("--kv-bytes", metavar="SIZE", show_default="30% of free", help="KV cache, e.g. 4GiB.")
]
MaxRunningOption = Annotated[int, typer.Option("--max-running", metavar="N", help="Requests a step, per worker.")]
MaxBatchTokensOption = Annotated[
    int, typer.Option("--max-batch-tokens", metavar="N", help="Tokens a step, per worker.")
]
ThreadsOption = Annotated[
    int, typer.Option("--threads", metavar="N", show_default="share the cores", help="Threads per worker.")
]
TimeoutOption = Annotated[float, typer.Option("--timeout", metavar="S", help="Patience between workers.")]
TimelineOption = Annotated[
    Path | None, typer.Option("--timeline", metavar="FILE", help="Write a Perfetto trace at the end.")
]


def parse_size(option: str, text: str) -> int:
    """Bytes from what was written behind `option`; `UserError` names it."""
    try:
        return parse_bytes(text)
    except UserError as error:
        raise UserError(f"{option} {error}") from error


def check_output_file(option: str, path: Path | None) -> None:
    """`UserError` now, not after minutes of work, if `path` cannot be written at the end."""
    if path is not None and not path.resolve().parent.is_dir():
        raise UserError(f"{option} {path}: the folder {path.resolve().parent} does not exist; create it")


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
    for name, value in (("experts", experts), ("micro-batches", micro_batches)):
        if value < 0:
            raise UserError(f"--{name} is {value}: it must be at least 1, or 0 for the default")
    resolved = _resolve_layout(layout, experts, micro_batches)
    if resolved == "colocated" and experts > 0:
        raise UserError(f"--experts {experts} does not apply to --layout colocated: leave it out or use disaggregated")
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
        kv_bytes=parse_size("--kv-bytes", kv_bytes),
        max_running=max_running,
        max_batch_tokens=max_batch_tokens,
        max_waiting=max_waiting,
        num_threads=threads,
        timeout_s=timeout,
        trace=trace,
    )


def _resolve_layout(layout: str, experts: int, micro_batches: int) -> Layout:
    if layout in {"colocated", "disaggregated"}:
        return "colocated" if layout == "colocated" else "disaggregated"
    if layout != "auto":
        raise UserError(f"--layout {layout} does not exist: use auto, colocated or disaggregated")
    # On one machine the colocated layout is the faster one; asking for what only the other has is asking for the other.
    return "disaggregated" if experts > 0 or micro_batches > 1 else "colocated"
