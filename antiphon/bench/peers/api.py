"""What the serving benchmark asks of an engine, ours or another: one workload in, rates and latencies out.

All requests of a workload arrive together and every one produces exactly `output_tokens` tokens by greedy
decoding, without ever stopping early. A run is two passes over the same prompts: one that asks for a single
token (its duration is the prefill) and one that asks for all; the difference of their durations is the
decode. That definition needs nothing from inside an engine and treats engines that mix prefill and decode in
one step like those that do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class PeerError(RuntimeError):
    """An engine could not be started, failed, or took too long; the message names the engine and the reason."""


class PeerUnavailableError(PeerError):
    """An engine is not installed here; the message says how to get it. Reports skip it with this reason."""


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, all sent at once, and the number of tokens to generate for each."""

    prompts: list[list[int]]
    output_tokens: int

    def __post_init__(self) -> None:
        if not self.prompts or not all(self.prompts):
            raise ValueError("a workload needs at least one prompt, and none may be empty")
        if self.output_tokens < 1:
            raise ValueError(f"output_tokens is {self.output_tokens}; it must be at least 1")

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)


@dataclass(frozen=True, kw_only=True)
class RawRun:
    """What an engine observed: durations of both passes, and times seen from the start of the second."""

    prefill_s: float
    total_s: float
    ttft_s: list[float]
    itl_s: list[float]
    token_ids: list[list[int]] | None


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One run of one workload.

    `output_tokens_per_s`: generated tokens over the whole duration, prefill included (what load clients call
    output throughput).
    `decode_tokens_per_s`: tokens after each request's first, over the duration less the prefill's (the one-token pass,
    or the time until all had their first token if that was shorter); to be held against the decode bound. None for
    `output_tokens == 1`, and when the longer pass was not the slower one.
    `prefill_tokens_per_s`: prompt tokens over the duration of the one-token pass.
    `ttft_s`: time to first token, one per request where the engine tells them apart, else one for all.
    `itl_s`: times between tokens.
    `peak_rss_bytes`: the engine's processes together, since they started; 0 for an engine that runs
    elsewhere.
    """

    output_tokens_per_s: float
    decode_tokens_per_s: float | None
    prefill_tokens_per_s: float
    ttft_s: list[float]
    itl_s: list[float]
    peak_rss_bytes: int
    token_ids: list[list[int]] | None


def steady_rate(arrivals_s: Sequence[Sequence[float]]) -> float | None:
    """Tokens per second while all requests decode, from when each one's tokens came: from the last first token to the
    first last one. None if they never did."""
    begin, end = max(each[0] for each in arrivals_s), min(each[-1] for each in arrivals_s)
    return sum(begin < moment <= end for each in arrivals_s for moment in each) / (end - begin) if end > begin else None


class Peer(Protocol):
    """An engine under test. Not thread safe; every call blocks, with a timeout, and raises `PeerError`."""

    @property
    def name(self) -> str:
        """The engine's name in report rows."""
        ...

    @property
    def pid(self) -> int | None:
        """Root of the engine's process tree while it runs on this machine; its CPU time is not foreign."""
        ...

    def start(self) -> Mapping[str, str]:
        """Start the engine and load the model; returns what a report should say of it (version, kernels chosen)."""
        ...

    def run(self, workload: Workload) -> RunResult:
        """Run the workload once, both passes."""
        ...

    def pause(self) -> None:
        """Take the engine off the CPUs while another is measured; its memory stays."""
        ...

    def resume(self) -> None:
        """Undo `pause`."""
        ...

    def close(self) -> None:
        """Stop the engine and free what it holds; harmless when it never started."""
        ...


def run_result(workload: Workload, raw: RawRun, peak_rss_bytes: int) -> RunResult:
    """Turn an engine's durations into rates; every engine goes through here, so all are defined alike."""
    num_outputs = len(workload.prompts) * workload.output_tokens
    num_decoded = len(workload.prompts) * (workload.output_tokens - 1)
    # A disturbed one-token pass would flatter the decode; the second pass's own prefill is the limit where known.
    prefill_s = min(raw.prefill_s, max(raw.ttft_s, default=raw.prefill_s))
    decode_s = raw.total_s - prefill_s  # not above 0 when noise exceeds a very short decode
    return RunResult(
        output_tokens_per_s=num_outputs / raw.total_s,
        decode_tokens_per_s=num_decoded / decode_s if num_decoded and decode_s > 0 else None,
        prefill_tokens_per_s=workload.num_prompt_tokens / raw.prefill_s,
        ttft_s=raw.ttft_s,
        itl_s=raw.itl_s,
        peak_rss_bytes=peak_rss_bytes,
        token_ids=raw.token_ids,
    )
