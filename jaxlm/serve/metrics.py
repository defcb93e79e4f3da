"""Metrics of the server for Prometheus, under vLLM's names if they mean the same."""

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from jaxlm.generate.requests import Counters
from jaxlm.serve.bridge import Bridge

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


def cost_per_million(counters: Counters, price: float) -> float | None:
    """Return the cost of a million tokens, of prompts and drawn, while the device computes.

    Args:
      counters: totals of the engine.
      price: price of the device for an hour; the result has its currency.

    Returns None before the first token.
    """
    tokens = counters.prompt_tokens + counters.cached_tokens + counters.drawn_tokens
    return 1e6 * price * counters.seconds / 3600 / tokens if tokens else None


class _EngineMetrics(Collector):
    """Numbers that the engine has."""

    def __init__(self, bridge: Bridge, price: float | None):
        self._bridge, self._price = bridge, price

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        engine = self._bridge.engine
        if engine is None:
            return
        counters = engine.counters
        gauges = {
            "num_requests_running": ("requests in slots", engine.running),
            "num_requests_waiting": ("requests without a slot", engine.waiting),
            "tokens_waiting": ("tokens of requests without a slot", engine.waiting_tokens),
            "kv_cache_usage_perc": ("share of slots in use", engine.running / engine.rows),
            "prefix_cache_bytes": ("bytes of kept beginnings of prompts", engine.prefixes.size),
        }
        totals = {
            "compiles": ("compilations after the start", counters.compiles),
            "passes": ("decode passes", counters.passes),
            "spec_decode_passes": ("decode passes with guesses", counters.guessed_passes),
            "chunks": ("chunks of prompts", counters.chunks),
            "prefix_cache_queries": (
                "tokens of prompts in slots",
                counters.prompt_tokens + counters.cached_tokens,
            ),
            "prefix_cache_hits": (
                "tokens of prompts that were not read again",
                counters.cached_tokens,
            ),
            "spec_decode_num_drafts": ("rows of passes with guesses", counters.drafts),
            "spec_decode_num_draft_tokens": ("guessed tokens", counters.guessed_tokens),
            "spec_decode_num_accepted_tokens": ("guesses that stood", counters.accepted_tokens),
            "device_seconds": ("seconds of passes", counters.seconds),
            "failed_passes": ("passes that raised an exception", counters.failures),
        }
        if self._price is not None:
            cost = cost_per_million(counters, self._price)
            doc = "price of a million tokens, of prompts and drawn, in device seconds"
            gauges["cost_per_million_tokens"] = doc, cost or 0.0
        if (mean := counters.mean_acceptance_length) is not None:
            doc = "tokens of a row in a pass with guesses, the last one included"
            gauges["spec_decode_mean_acceptance_length"] = doc, mean
        for name, (doc, value) in gauges.items():
            yield GaugeMetricFamily(f"jaxlm:{name}", doc, value=value)
        for name, (doc, value) in totals.items():
            yield CounterMetricFamily(f"jaxlm:{name}", doc, value=value)
        by_position = CounterMetricFamily(
            "jaxlm:spec_decode_num_accepted_tokens_per_pos",
            "guesses that stood, by position",
            labels=["position"],
        )
        for position, count in enumerate(counters.accepted):
            by_position.add_metric([str(position)], count)
        yield by_position


class Metrics:
    """Counters and histograms of requests."""

    def __init__(self, bridge: Bridge, price: float | None = None):
        self._registry = CollectorRegistry()
        self._registry.register(_EngineMetrics(bridge, price))

        def counter(name: str, doc: str, *labels: str) -> Counter:
            return Counter(f"jaxlm:{name}", doc, labels, registry=self._registry)

        def histogram(name: str, doc: str) -> Histogram:
            return Histogram(f"jaxlm:{name}", doc, buckets=SECONDS, registry=self._registry)

        self._rejected = counter("rejected", "requests with an error, by status", "status")
        self._prompt = counter("prompt_tokens", "tokens of prompts")
        self._drawn = counter("generation_tokens", "drawn tokens")
        self._success = counter("request_success", "results, by reason", "finished_reason")
        self._first = histogram("time_to_first_token_seconds", "time to the first text of a stream")
        self._between = histogram("inter_token_latency_seconds", "time between parts of a stream")
        self._whole = histogram("e2e_request_latency_seconds", "time of a request")

    def count_rejected(self, status: int) -> None:
        """Count a request with an error."""
        self._rejected.labels(str(status)).inc()

    def observe_delta(self, seconds: float, *, is_first: bool) -> None:
        """Count the time before a part of a stream."""
        (self._first if is_first else self._between).observe(seconds)

    def finish(self, usage: dict[str, Any], reasons: Sequence[str | None], seconds: float) -> None:
        """Count a finished call."""
        self._prompt.inc(usage["prompt_tokens"])
        self._drawn.inc(usage["completion_tokens"])
        for reason in reasons:
            self._success.labels(str(reason)).inc()
        self._whole.observe(seconds)

    def text(self) -> str:
        """Return all metrics in Prometheus' text form."""
        return generate_latest(self._registry).decode()
