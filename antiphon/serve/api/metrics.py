"""`/metrics`: what the server times itself, and the engine's counters read at every scrape.

The engine's reading hands over the queue times since the last one, so there is one place that reads: `read_stats`, for
scrapes and health checks alike. `antiphon:prediction_error_ratio` (measured / predicted time per output token) is there
only when a plan predicted something and tokens have been measured: a sample without a meaning would end up in
averages. Per-expert series are left out on purpose: layers x experts makes thousands.
"""

import time
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from antiphon import __version__
from antiphon.serve.engine_api import AsyncEngine, EngineStats
from antiphon.specs.plan import Predicted

_LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_INTER_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_TPOT_SMOOTHING = 0.02


class ServerMetrics(Collector):
    """All metrics of one server, in a registry of their own."""

    def __init__(self, engine: AsyncEngine, predicted: Predicted | None) -> None:
        self.registry = CollectorRegistry()
        self._engine = engine
        self._predicted = predicted
        self._measured_tpot_s: float | None = None
        self._latest: EngineStats | None = None
        self.time_to_first_token = self._histogram("time_to_first_token", "until the first token", _LATENCY_BUCKETS_S)
        self.inter_token = self._histogram("inter_token_latency", "between tokens", _INTER_TOKEN_BUCKETS_S)
        self.end_to_end = self._histogram("e2e_request_latency", "from arrival to end", _LATENCY_BUCKETS_S)
        self.queue_time = self._histogram("request_queue_time", "until first scheduled", _LATENCY_BUCKETS_S)
        self.finished = Counter(
            "antiphon:requests_finished", "Answers ended, by reason", ["reason"], registry=self.registry
        )
        self.connections = Gauge("antiphon:connections", "Open connections", registry=self.registry)
        self.connections_ended = Counter(
            "antiphon:connections_ended",
            "Connections that the server ended, by reason",
            ["reason"],
            registry=self.registry,
        )
        self.slow_readers = Counter(
            "antiphon:slow_readers", "Streams cancelled because the client did not keep up", registry=self.registry
        )
        self.registry.register(self)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"antiphon:{name}_seconds", f"Seconds {what}", buckets=buckets, registry=self.registry)

    def observe_tpot(self, seconds_per_token: float) -> None:
        measured = self._measured_tpot_s
        self._measured_tpot_s = (
            seconds_per_token if measured is None else measured + _TPOT_SMOOTHING * (seconds_per_token - measured)
        )

    @property
    def num_answers(self) -> float:
        """Answers that have ended, for whatever reason."""
        samples = (sample for metric in self.finished.collect() for sample in metric.samples)
        return sum(sample.value for sample in samples if sample.name.endswith("_total"))

    def read_stats(self) -> EngineStats:
        """The engine's counters; its queue times are taken into the histogram on the way."""
        stats = self._engine.stats()
        for queue_time_s in stats.queue_times_s:
            self.queue_time.observe(queue_time_s)
        return stats

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        self._latest = self.read_stats()
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        """Called by the registry while it is scraped."""
        stats = self._latest
        if stats is None:
            return
        yield from _gauges(stats)
        yield from _counters(stats)
        balancedness = dict(sorted(stats.balancedness_per_layer.items()))
        yield _labelled("expert_balancedness_ratio", "Mean / max tokens per expert worker", "layer", balancedness)
        speed = "Rows per second of computing of an expert worker"
        yield _labelled("expert_rows_per_second", speed, "worker", stats.expert_rows_per_s)
        yield from _exchange(stats)
        yield from _pools(stats)
        yield self._prediction_error()
        yield from _predicted(self._predicted)
        info = self._engine.info
        build = GaugeMetricFamily("antiphon:build_info", "What runs here", labels=["version", "model", "layout"])
        build.add_metric([__version__, info.model_name, info.layout], 1)
        yield build

    def _prediction_error(self) -> Metric:
        family = GaugeMetricFamily(
            "antiphon:prediction_error_ratio", "Measured / predicted time per output token; absent without a plan"
        )
        predicted_s = self._predicted.tpot_s if self._predicted is not None else None
        if predicted_s and self._measured_tpot_s is not None:
            family.add_metric([], self._measured_tpot_s / predicted_s)
        return family


def _predicted(predicted: Predicted | None) -> Iterable[Metric]:
    """What the loaded plan promised; nothing without a plan, and nothing of what the plan leaves open."""
    if predicted is None:
        return
    for name, text, value in (
        ("tpot_seconds", "Time per output token", predicted.tpot_s),
        ("time_to_first_token_seconds", "Time to the first token", predicted.ttft_s),
        ("tokens_per_second", "Output tokens per second", predicted.tokens_per_s or None),
        ("attention_seconds", "Attention of one layer and micro-batch", predicted.t_a_s),
        ("experts_seconds", "Experts of one layer and micro-batch", predicted.t_e_s),
        ("exchange_seconds", "Exchange of one layer and micro-batch, one way", predicted.t_c_s),
    ):
        if value is not None:
            yield GaugeMetricFamily(f"antiphon:predicted_{name}", f"{text}, as the plan predicts", value=value)


def _gauges(stats: EngineStats) -> Iterable[Metric]:
    used_ratio = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
    for name, text, value in (
        ("num_requests_running", "Requests being computed", stats.num_running),
        ("num_requests_waiting", "Requests in the queue", stats.num_waiting),
        ("kv_cache_usage_ratio", "Share of KV blocks in use", used_ratio),
        ("attention_idle_ratio", "Share of time attention workers wait", stats.attention_idle_ratio),
        ("expert_idle_ratio", "Share of time expert workers wait", stats.expert_idle_ratio),
        ("engine_healthy", "1 when the engine answers", float(stats.healthy)),
    ):
        yield GaugeMetricFamily(f"antiphon:{name}", text, value=value)


def _counters(stats: EngineStats) -> Iterable[Metric]:
    for name, text, value in (
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.prefix_cache_hit_tokens),
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prefix_cache_query_tokens),
        ("preemptions", "Requests set back to make room", stats.num_preemptions),
        ("prompt_tokens", "Prompt tokens computed", stats.prompt_tokens),
        ("generation_tokens", "Tokens generated", stats.generation_tokens),
        ("engine_steps", "Engine steps", stats.num_steps),
        ("worker_restarts", "Workers started again after a loss", stats.num_worker_restarts),
        ("exposed_communication_seconds", "Communication not hidden by compute", stats.exposed_communication_s),
        ("dispatch_bytes", "Bytes sent from attention to experts", stats.dispatch_bytes),
        ("placement_changes", "Times that experts were placed anew", stats.placement_changes),
        ("expert_forecasts", "Layers whose expert rows were expected ahead", stats.prefetch.num_forecasts),
        ("expert_forecasts_corrected", "Forecasts that named other experts", stats.prefetch.num_phase_two),
        ("experts_prefetched", "Copies asked for ahead of a layer", stats.prefetch.num_copies),
        ("experts_prefetched_late", "Copies asked for with a layer's rows", stats.prefetch.num_late),
    ):
        yield CounterMetricFamily(f"antiphon:{name}", text, value=value)


def _labelled(name: str, text: str, label: str, values: Mapping[int, float]) -> Metric:
    family = GaugeMetricFamily(f"antiphon:{name}", text, labels=[label])
    for number, value in values.items():
        family.add_metric([str(number)], value)
    return family


def _exchange(stats: EngineStats) -> Iterable[Metric]:
    """Traffic for each (worker, peer), and how long workers waited; absent where nothing is exchanged."""
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {
        field: CounterMetricFamily(f"antiphon:m2n_{name}", text, labels=["worker", "peer"])
        for field, name, text in (
            ("messages_sent", "messages", "Messages sent between workers"),
            ("bytes_sent", "bytes", "Payload bytes sent"),
            ("credit_waits", "credit_waits", "Sends that found no free slot"),
            ("stale", "stale_messages", "Messages of steps that had been given up"),
        )
    }
    families["credits"] = GaugeMetricFamily("antiphon:m2n_credits", "Free slots at the peer", labels=["worker", "peer"])
    waits = HistogramMetricFamily("antiphon:m2n_wait_seconds", "Waits for messages", labels=["worker"])
    trips = HistogramMetricFamily(
        "antiphon:m2n_round_trip_seconds", "From a send to the return of its credit", labels=["worker"]
    )
    for worker, traffic in sorted(stats.exchange.items()):
        for pair in traffic.pairs:
            for field, family in families.items():
                family.add_metric([worker, pair.peer], getattr(pair, field))
        waits.add_metric([worker], *_buckets(traffic.waits))
        trips.add_metric([worker], *_buckets(traffic.round_trips))
    if stats.exchange:
        yield from (*families.values(), waits, trips)


def _pools(stats: EngineStats) -> Iterable[Metric]:
    """Pools and hand-overs; absent where prefill and decode are together and no worker was drained."""
    if not (stats.pools or stats.handovers.num_begun):
        return
    requests = GaugeMetricFamily("antiphon:pool_requests", "Requests of a pool", labels=["pool", "state"])
    usage = GaugeMetricFamily("antiphon:pool_kv_cache_usage_ratio", "Share of KV blocks in use", labels=["pool"])
    for pool in stats.pools:
        requests.add_metric([pool.name, "running"], pool.num_requests_running)
        requests.add_metric([pool.name, "waiting"], pool.num_requests_waiting)
        requests.add_metric([pool.name, "arriving"], pool.num_requests_arriving)
        usage.add_metric([pool.name], pool.kv_cache_usage_ratio)
    yield from (requests, usage)
    counts = stats.handovers
    for kind, text, value in (
        ("handovers", "Requests whose keys and values arrived", counts.num_done),
        ("handover_tokens", "Tokens whose keys and values arrived", counts.num_tokens),
        ("handovers_failed", "Hand-overs that were tried again or given up", counts.num_failed),
        ("handovers_recomputed", "Prompts that a decode worker computed after all", counts.num_recomputed),
        ("handover_exposed_seconds", "Prefill steps that waited for keys and values to leave", counts.exposed_s),
    ):
        yield CounterMetricFamily(f"antiphon:{kind}", text, value=value)


def _buckets(counts: list[int]) -> tuple[list[tuple[str, float]], float]:
    """Cumulative Prometheus buckets from counts by powers of two of nanoseconds, and the sum of durations as far as the
    buckets tell (their middles)."""
    total, sum_s = 0, 0.0
    buckets = []
    for exponent, count in enumerate(counts):
        total += count
        sum_s += count * 1.5 * 2.0**exponent * 1e-9
        if 10 <= exponent <= 34 and exponent % 2 == 0:  # 2 microseconds to 34 seconds
            buckets.append((str(2.0 ** (exponent + 1) * 1e-9), float(total)))
    return [*buckets, ("+Inf", float(total))], sum_s


class RequestClock:
    """Times one answer, from the moment its HTTP request arrived (`arrived_s` on the `perf_counter` clock)."""

    def __init__(self, metrics: ServerMetrics, arrived_s: float) -> None:
        self._metrics = metrics
        self._started_s = arrived_s
        self._last_token_s: float | None = None

    def tokens_arrived(self, num_tokens: int) -> None:
        """Tokens that arrive together count with an equal share of the time since the last ones."""
        if num_tokens == 0:
            return
        now_s = time.perf_counter()
        if self._last_token_s is None:
            self._metrics.time_to_first_token.observe(now_s - self._started_s)
        else:
            share_s = (now_s - self._last_token_s) / num_tokens
            self._metrics.observe_tpot(share_s)
            for _ in range(num_tokens):
                self._metrics.inter_token.observe(share_s)
        self._last_token_s = now_s

    def finished(self, reason: str) -> None:
        self._metrics.end_to_end.observe(time.perf_counter() - self._started_s)
        self._metrics.finished.labels(reason).inc()
