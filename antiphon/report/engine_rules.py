"""Limits of other engines' kernels that a command has to keep: what they are, and where they are written down.

DeepEP (github.com/deepseek-ai/DeepEP):

1. Ranks: all in one node of at most 8, or whole nodes of 8 (`csrc/deep_ep.cpp`, constructor of `Buffer`). The normal
   kernels are built for 2, 4 and 8 ranks of a node and for 2, 4, 8, 16, 18 and 20 nodes (`SWITCH_RANKS`,
   `SWITCH_RDMA_RANKS`, `csrc/kernels/launch.cuh`); the low-latency ones for some hidden sizes (`SWITCH_HIDDEN`).
2. Low-latency kernels: at most 1,024 rows of a rank in a call (`FINISHED_SUM_TAG`, `csrc/kernels/configs.cuh`; SGLang's
   `layers/moe/token_dispatcher/deepep.py` asserts it). SGLang takes 128 unless told in
   `SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK`; vLLM takes `--max-num-batched-tokens`.
3. Their buffers are made for that number of rows to every expert, twice (`LowLatencyLayout`, `csrc/config.hpp`).
4. NVSHMEM's queue holds two entries for each row and two more; its own default is 1,024
   (`NVSHMEM_QP_DEPTH`, `deep_ep/buffer.py`).

Rejected: commands without these. They start, answer a health check, and end at the first full batch.
"""

from dataclasses import dataclass

DEEPEP_MOST_ROWS = 1024
DEEPEP_RANKS_IN_NODE = 8
NORMAL_RANKS, NORMAL_NODES = (2, 4, 8), (2, 4, 8, 16, 18, 20)
LOW_LATENCY_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
SGLANG_DEFAULT_ROWS = 128
NVSHMEM_DEFAULT_DEPTH = 1024
_SCALED_TOGETHER = 128  # elements of a row in FP8 that share a scale


def low_latency_bytes(num_rows: int, hidden_size: int, num_experts: int) -> int:
    """Bytes of a device that DeepEP's low-latency buffers take: both ways, two sets, `num_rows` to every expert."""
    scales = hidden_size // _SCALED_TOGETHER
    sent = 16 + max(2 * hidden_size, hidden_size + 4 * scales)
    returned = 2 * hidden_size + 4 * scales
    sending = max(num_rows * sent, num_experts * num_rows * returned)
    return 2 * (sending + num_experts * num_rows * max(sent, returned))


def takes_ranks(num_ranks: int, *, is_low_latency: bool) -> bool:
    """Whether DeepEP's kernels run on this many ranks."""
    if is_low_latency:
        return num_ranks < DEEPEP_RANKS_IN_NODE or num_ranks % DEEPEP_RANKS_IN_NODE == 0
    num_nodes, rest = divmod(num_ranks, DEEPEP_RANKS_IN_NODE)
    return num_ranks in NORMAL_RANKS or (rest == 0 and num_nodes in NORMAL_NODES)


@dataclass(frozen=True, kw_only=True)
class LowLatency:
    """DeepEP's low-latency kernels for `num_rows` rows of a rank in one step: `why_not` is empty where they run."""

    num_rows: int
    why_not: str

    @property
    def environment(self) -> dict[str, int]:
        """Variables that SGLang and NVSHMEM need beside the command."""
        found = {}
        if self.num_rows > SGLANG_DEFAULT_ROWS:
            found["SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"] = self.num_rows
        return found | self.queue

    @property
    def queue(self) -> dict[str, int]:
        """The part of it that NVSHMEM needs, whatever the engine."""
        depth = 2 * (self.num_rows + 1)
        return {"NVSHMEM_QP_DEPTH": depth} if depth > NVSHMEM_DEFAULT_DEPTH else {}


def low_latency(num_rows: int, *, hidden_size: int, num_experts: int, room_bytes: float) -> LowLatency:
    """Whether they run in steps of `num_rows` rows of a rank, `room_bytes` being free on a device. `hidden_size` 0: not
    known, and then not checked."""
    if num_rows > DEEPEP_MOST_ROWS:
        reason = f"{num_rows:,} rows of a rank in a step: DeepEP's low-latency kernels take {DEEPEP_MOST_ROWS:,}"
        return LowLatency(num_rows=num_rows, why_not=reason)
    if hidden_size and hidden_size not in LOW_LATENCY_HIDDEN:
        return LowLatency(num_rows=num_rows, why_not=f"DeepEP has none for rows of {hidden_size:,} elements")
    needed = low_latency_bytes(num_rows, hidden_size, num_experts)
    reason = ""
    if needed > room_bytes:
        reason = f"low-latency buffers of {needed / 1e9:.3g} GB: a device has {room_bytes / 1e9:.3g} GB beside the plan"
    return LowLatency(num_rows=num_rows, why_not=reason)
