"""Counts and times of a worker, cheap to update and to read from another thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec


class Histogram(msgspec.Struct):
    """Times in seconds, counted in buckets that double from one microsecond on."""

    buckets: list[int] = msgspec.field(default_factory=lambda: [0] * 32)
    """``buckets[i]`` counts times below ``2**i`` microseconds that no lower bucket counts; the last takes the rest."""
    total: float = 0.0
    """Sum of all times, in seconds."""

    def add(self, seconds: float) -> None:
        """Counts one time."""
        self.buckets[min(int(seconds * 1e6).bit_length(), len(self.buckets) - 1)] += 1
        self.total += seconds

    @property
    def count(self) -> int:
        """How many times were counted."""
        return sum(self.buckets)

    def bounds(self) -> Iterator[tuple[float, int]]:
        """Upper bounds in seconds with the number of times up to them."""
        seen = 0
        for index, count in enumerate(self.buckets):
            seen += count
            yield 2**index / 1e6, seen


class Stats(msgspec.Struct):
    """What a worker has done since it was made."""

    requests: dict[str, int] = msgspec.field(default_factory=dict)
    """Finished requests by ``kind.status``, for example ``read.done``."""
    failures: dict[str, int] = msgspec.field(default_factory=dict)
    """Failed requests by error class."""
    bytes: int = 0
    """Bytes moved by requests that ended well."""
    descriptors: int = 0
    """Descriptors of those requests."""
    merged: int = 0
    """What NIXL merges those descriptors to, as predicted."""
    plan_seconds: Histogram = msgspec.field(default_factory=Histogram)
    make_seconds: Histogram = msgspec.field(default_factory=Histogram)
    post_seconds: Histogram = msgspec.field(default_factory=Histogram)
    transfer_seconds: Histogram = msgspec.field(default_factory=Histogram)
    """From the first post of a request to the end of its last transfer."""
    handshakes: int = 0
    refused_peers: int = 0
    """Handshakes that ended in a refusal, on either side."""
    lost_peers: int = 0
    malformed_messages: int = 0
    """Messages and notifications that could not be decoded."""
    late_notifications: int = 0
    """Notifications for requests that are not waited for, or not any more, or of a promise that was not made."""
    repeated_notifications: int = 0
    """Notifications of a rank that had already notified."""
    leaked_handles: int = 0
    """Transfers that neither ended nor could be stopped before their request had to be given up."""
    live: int = 0
    """Requests without a result yet."""
    generation: int = 0
    """Generation of the registration in force."""
    peers: dict[str, int] = msgspec.field(default_factory=dict)
    """Connected ranks by engine id."""


class PrometheusCollector:
    """Shows a worker's statistics to ``prometheus_client``; register it with a ``CollectorRegistry``.

    Args:
        worker: Anything with a ``stats()`` that returns `Stats`.
        labels: Labels that every sample carries, such as the engine id.
    """

    def __init__(self, worker: Any, labels: dict[str, str] | None = None) -> None:
        self._worker = worker
        self._labels = labels or {}

    def collect(self) -> Iterator[Any]:
        """One metric family per statistic."""
        from prometheus_client.core import (  # noqa: PLC0415 - optional
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        stats: Stats = self._worker.stats()
        names, values = list(self._labels), list(self._labels.values())
        for field, text in (
            ("live", "Requests without a result yet"),
            ("generation", "Generation of the registration"),
        ):
            gauge = GaugeMetricFamily(f"nixl_fast_{field}", text, labels=names)
            gauge.add_metric(values, getattr(stats, field))
            yield gauge
        gauge = GaugeMetricFamily("nixl_fast_peers", "Connected ranks by engine", labels=[*names, "peer"])
        for key, count in sorted(stats.peers.items()):
            gauge.add_metric([*values, key], count)
        yield gauge
        for field, label in (("requests", "outcome"), ("failures", "error")):
            counter = CounterMetricFamily(f"nixl_fast_{field}", f"Finished {field} by {label}", labels=[*names, label])
            for key, count in sorted(getattr(stats, field).items()):
                counter.add_metric([*values, key], count)
            yield counter
        for name in stats.__struct_fields__:
            value = getattr(stats, name)
            if isinstance(value, Histogram):
                histogram = HistogramMetricFamily(f"nixl_fast_{name}", name.replace("_", " "), labels=names)
                buckets = [(f"{bound:g}", float(count)) for bound, count in value.bounds()]
                buckets[-1] = ("+Inf", buckets[-1][1])
                histogram.add_metric(values, buckets=buckets, sum_value=value.total)
                yield histogram
            elif isinstance(value, int) and name not in ("live", "generation"):
                counter = CounterMetricFamily(f"nixl_fast_{name}", name.replace("_", " "), labels=names)
                counter.add_metric(values, value)
                yield counter
