"""Any server with OpenAI's completions API as a peer (`--against-url`): vLLM's, llama.cpp's, or our own.

All requests of a workload are sent at once as token-id prompts, streamed, with `ignore_eos`. The server's own count
of generated tokens (`stream_options.include_usage`) must be what was asked for: a server that stops early anyway
fails instead of looking fast. Servers may put several tokens into one chunk; the times between chunks are then spread
over the tokens of the request. Token ids are not asked for, since servers differ in how; they are taken if sent.

Rejected: the `openai` client, which parses every chunk into models; on few cores the client's time is the server's.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from antiphon.bench.serving_peers import (
    RUN_TIMEOUT_S,
    Peer,
    PeerError,
    RunResult,
    Workload,
    run_result,
    steady_rate,
    tree_peak_rss_bytes,
)

REQUEST_TIMEOUT_S = 900.0
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


@dataclass(frozen=True)
class StreamedAnswer:
    """What one streamed completion showed: when text arrived, and how many tokens the server says it made."""

    arrivals_s: list[float]
    completion_tokens: int
    token_ids: list[int] | None


class OpenAIPeer(Peer):
    """A peer that runs already, asked for the first model that it lists. `pause` and `resume` do nothing: the process
    is not ours. `url`: the server, with or without `/v1`."""

    def __init__(self, url: str, *, name: str = "openai") -> None:
        self.name = name
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = ""

    @property
    def pid(self) -> int | None:
        """The process that listens on the URL's port, when that is on this machine and we may see it."""
        parts = urlsplit(self._url)
        if parts.hostname not in LOCAL_HOSTS:
            return None
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            connections = psutil.net_connections("tcp")
        except psutil.AccessDenied:
            return None
        listeners = [connection for connection in connections if connection.status == psutil.CONN_LISTEN]
        return next((listener.pid for listener in listeners if getattr(listener.laddr, "port", None) == port), None)

    def start(self) -> Mapping[str, str]:
        """Ask the server for its models."""
        try:
            response = httpx.get(f"{self._url}/v1/models", timeout=30, trust_env=False)
            response.raise_for_status()
            served = [str(entry["id"]) for entry in response.json()["data"]]
        except (httpx.HTTPError, httpx.InvalidURL, KeyError, TypeError, ValueError) as error:
            raise PeerError(f"{self.name}: {self._url}/v1/models does not answer as it should: {error}") from None
        if not served:
            raise PeerError(f"{self.name}: {self._url} serves no model")
        self._model = served[0]
        return {"url": self._url, "model": self._model}

    def run(self, workload: Workload) -> RunResult:
        prefill_s, total_s, start_s, streams = asyncio.run(self._both_passes(workload))
        token_ids = [stream.token_ids for stream in streams if stream.token_ids is not None]
        pid = self.pid
        return run_result(
            workload,
            tree_peak_rss_bytes(pid) if pid is not None else 0,
            prefill_s=prefill_s,
            total_s=total_s,
            ttft_s=[stream.arrivals_s[0] - start_s for stream in streams],
            itl_s=[gap_s for stream in streams for gap_s in inter_token_s(stream)],
            token_ids=token_ids if len(token_ids) == len(streams) else None,
        )

    def steady_decode_tokens_per_s(self, workload: Workload) -> float:
        """See `steady_rate`; the first pass leaves the prompts in a prefix cache, if there is one. Both take 900 s at
        most."""
        try:
            _, _, _, streams = asyncio.run(asyncio.wait_for(self._both_passes(workload), RUN_TIMEOUT_S))
        except TimeoutError:
            raise PeerError(f"{self.name}: {self._url} did not answer all within {RUN_TIMEOUT_S:.0f} s") from None
        rate = steady_rate([stream.arrivals_s for stream in streams])
        if rate is None:
            raise PeerError(
                f"{self.name}: {workload.output_tokens} output tokens are too few: never did all requests decode"
            )
        return rate

    async def _both_passes(self, workload: Workload) -> tuple[float, float, float, list[StreamedAnswer]]:
        """Seconds of the one-token pass and of the whole one; when the latter began, and its streams."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, limits=limits, trust_env=False) as client:

            def all_streams(output_tokens: int) -> Awaitable[list[StreamedAnswer]]:
                return asyncio.gather(*(self.stream(client, prompt, output_tokens) for prompt in workload.prompts))

            start_s = time.perf_counter()
            streams = await all_streams(1)
            prefill_s = total_s = time.perf_counter() - start_s
            if workload.output_tokens > 1:
                start_s = time.perf_counter()
                streams = await all_streams(workload.output_tokens)
                total_s = time.perf_counter() - start_s
        return prefill_s, total_s, start_s, streams

    async def stream(self, client: httpx.AsyncClient, prompt: list[int], output_tokens: int) -> StreamedAnswer:
        """One request, streamed. `PeerError` if it is refused, fails, or is not answered as asked."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        chunks: list[tuple[float, dict[str, Any]]] = []
        try:
            async with client.stream("POST", f"{self._url}/v1/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    text = (await response.aread()).decode(errors="replace")
                    raise PeerError(f"{self.name}: status {response.status_code}: {text[:300]}")
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        chunks.append((time.perf_counter(), json.loads(line[len("data: ") :])))
        except httpx.HTTPError as error:
            raise PeerError(f"{self.name}: {type(error).__name__}: {error}") from None
        return self._checked(chunks, output_tokens)

    def _checked(self, chunks: list[tuple[float, dict[str, Any]]], output_tokens: int) -> StreamedAnswer:
        """The chunks as a `StreamedAnswer`, or an error if the server did not generate what was asked for."""
        counts = [chunk["usage"]["completion_tokens"] for _, chunk in chunks if chunk.get("usage")]
        arrivals_s = [arrival_s for arrival_s, chunk in chunks if chunk.get("choices")]
        if not counts:
            problem = next((chunk["error"] for _, chunk in chunks if "error" in chunk), "it has no usage")
            raise PeerError(f"{self.name}: the stream is not usable: {problem}")
        if counts[-1] != output_tokens or not arrivals_s:
            raise PeerError(f"{self.name}: generated {counts[-1]} tokens instead of {output_tokens}")
        ids = [choice.get("token_ids") for _, chunk in chunks for choice in chunk.get("choices", ())]
        flat = [token for part in ids if part for token in part]
        return StreamedAnswer(arrivals_s, output_tokens, flat if len(flat) == output_tokens else None)


def inter_token_s(stream: StreamedAnswer) -> list[float]:
    """The times between a stream's tokens: those between chunks, or their mean if the server bundles tokens."""
    gaps_s = [after - before for before, after in itertools.pairwise(stream.arrivals_s)]
    num_gaps = stream.completion_tokens - 1
    if num_gaps <= 0:
        return []
    if len(gaps_s) < num_gaps:
        return [sum(gaps_s) / num_gaps] * num_gaps
    return gaps_s[:num_gaps]
