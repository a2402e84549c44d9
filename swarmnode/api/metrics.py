"""/metrics, for Prometheus: what this daemon counts of itself, read when somebody asks. docs/api.md lists them.

What a leader knows of the whole swarm, it alone tells, so that sums over all daemons are right. No label holds anything
of a request. Counters of a leadership begin anew with it, which Prometheus understands.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from swarmnode.api.fair_use import FairUse
from swarmnode.leader.remote_experts import LAYER_SECONDS_BOUNDS
from swarmnode.version import VERSION

Json = Mapping[str, Any]

_ROUTES: Final = ("/", "/healthz", "/readyz", "/metrics", "/v1/models", "/v1/chat/completions", "/v1/completions")
_FIRST_TOKEN_BOUNDS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_MICROSECONDS: Final = 1e-6


class HttpMetrics:
    """What the HTTP interface counts, and everything else that is read for `text`."""

    def __init__(self, fair_use: FairUse) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._swarm = _SwarmCollector(fair_use)
        self._registry.register(self._swarm)
        self._requests = Counter(
            "swarmnode_http_requests", "Requests to the HTTP interface", ["route", "status"], registry=self._registry
        )
        self._tokens = Counter(
            "swarmnode_http_answer_tokens", "Tokens of answers to HTTP clients", registry=self._registry
        )
        self._first_token = Histogram(
            "swarmnode_http_first_token_seconds",
            "From a request to the first token of its answer",
            buckets=_FIRST_TOKEN_BOUNDS,
            registry=self._registry,
        )

    def answered(self, path: str, status: int) -> None:
        """A request got an answer, or at least its beginning."""
        self._requests.labels(_route_of(path), str(status)).inc()

    def token(self) -> None:
        self._tokens.inc()

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def text(self, status: Json, counters: Json, leading: Json | None) -> bytes:
        """Everything in Prometheus's text format.

        `status`: as of `swarmctl status`. `counters`: this node's own. `leading`: of the leader, where it is this node.
        """
        self._swarm.told = status, counters, leading
        return generate_latest(self._registry)


def _route_of(path: str) -> str:
    if path in _ROUTES:
        return path
    for prefix in ("/v1/models/", "/api/", "/static/"):
        if path.startswith(prefix):
            return prefix
    return "other"


class _SwarmCollector(Collector):
    """What is counted elsewhere, as metrics."""

    def __init__(self, fair_use: FairUse) -> None:
        self.told: tuple[Json, Json, Json | None] = ({}, {}, None)
        self._fair_use = fair_use

    def collect(self) -> Iterable[Metric]:
        status, counters, leading = self.told
        yield _gauge("build_info", "Version of swarmnode", 1, version=VERSION)
        yield _gauge("http_answers_running", "Answers to HTTP clients under way", self._fair_use.running)
        yield _gauge("http_answers_waiting", "Answers to HTTP clients that wait in this daemon", self._fair_use.waiting)
        yield from _node(status, leads=leading is not None)
        if (network := counters.get("network")) is not None:
            yield from _network(network)
        if (worker := counters.get("worker")) is not None:
            yield from _worker(worker)
        if leading is not None:
            yield from _requests(status.get("requests") or {})
            yield from _swarm(status)
            yield from _leading(leading)


def _gauge(name: str, text: str, value: float, **labels: str) -> Metric:
    family = GaugeMetricFamily(f"swarmnode_{name}", text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, text: str, label: str = "", values: Mapping[str, float] | float = 0) -> Metric:
    family = CounterMetricFamily(f"swarmnode_{name}", text, labels=[label] if label else [])
    for key, value in values.items() if isinstance(values, Mapping) else [("", values)]:
        family.add_metric([key] if label else [], value)
    return family


def _node(status: Json, *, leads: bool) -> Iterable[Metric]:
    yield _gauge("ready", "1 if the swarm is ready, as far as this node sees", bool(status.get("ready")))
    yield _gauge("leading", "1 if this node leads", leads)
    yield _gauge("term", "The newest certified term", status.get("term") or 0)
    yield _gauge("uptime_seconds", "Since this daemon's start", status.get("uptime_s") or 0)


def _network(network: Json) -> Iterable[Metric]:
    directions = {"sent": network["bytes_sent"], "received": network["bytes_received"]}
    yield _counter("network_bytes", "Bytes of this node's connections", "direction", directions)
    yield _gauge("network_connections", "Connections to other peers", network["connections_open"])
    yield _gauge("network_streams", "Streams with other peers", network["streams_open"])
    faults = ("streams_refused", "peer_mistakes", "handler_errors", "junk_connections", "connections_broken")
    yield _counter("network_faults", "What went wrong", "kind", {kind: network[kind] for kind in faults})


def _worker(worker: Json) -> Iterable[Metric]:
    yield _counter("worker_dispatches", "Dispatches that this worker computed", values=worker["dispatches"])
    yield _counter("worker_rows", "Expert rows in them", values=worker["rows"])
    yield _counter("worker_compute_seconds", "Time in its kernels", values=worker["compute_us"] * _MICROSECONDS)
    yield _counter("worker_refused", "Dispatches and streams that it refused", values=worker["refused"])
    yield _gauge("worker_experts", "Experts in its memory", worker["experts_held"])
    yield _gauge("worker_memory_bytes", "Memory that they take", worker["bytes_held"])


def _requests(requests: Json) -> Iterable[Metric]:
    ends = ("finished", "failed", "cancelled")
    yield _counter("requests", "Requests to this leader", "end", {end: requests.get(end, 0) for end in ends})
    yield _counter("tokens", "Tokens that this leader generated", values=requests.get("tokens", 0))
    yield _counter("tainted_answers", "Answers that a convicted peer had a part in", values=requests.get("tainted", 0))
    yield _gauge("requests_running", "Requests that have a slot", requests.get("running", 0))
    yield _gauge("requests_waiting", "Requests in the leader's queue", requests.get("waiting", 0))


def _swarm(status: Json) -> Iterable[Metric]:
    peers = status.get("peers") or []
    family = GaugeMetricFamily("swarmnode_peers", "Peers that the leader knows", labels=["state"])
    for state, number in sorted(Count(str(peer["state"]) for peer in peers).items()):
        family.add_metric([state], number)
    yield family
    yield _gauge("epoch", "The placement that serves", status.get("epoch") or 0)
    if (model := status.get("model")) is not None:
        coverage = model["coverage"]
        yield _gauge("coverage_min_copies", "The fewest usable copies of any expert", coverage["min_copies"])
        yield _gauge("coverage_missing_experts", "Experts that have none", len(coverage["missing"]))
    audits = CounterMetricFamily("swarmnode_audits", "Audits of peers' answers", labels=["peer", "result"])
    for peer in peers:
        if (held := peer.get("audits")) is not None:
            audits.add_metric([peer["peer_id"], "agreed"], held["agreed"])
            audits.add_metric([peer["peer_id"], "differed"], held["differed"])
    yield audits


def _leading(leading: Json) -> Iterable[Metric]:
    layers, failover, links = leading["layers"], leading["failover"], leading["links"]
    yield _histogram(layers["by_seconds"], layers["decode_round_trip_s"])
    yield _counter("steps", "Steps of the decode thread", values=leading["steps"])
    kinds = {"failure": failover["failures"], "hedge": failover["hedges"]}
    yield _counter("failovers", "Peers replaced, or asked past, within a layer", "kind", kinds)
    yield _counter("own_rows", "Expert rows of the leader's own copy", values=failover["own_rows"])
    yield _counter("mixed_steps", "Steps with a peer of another numeric class", values=failover["mixed_steps"])
    for name, key, text in (
        ("dispatches", "dispatches", "Dispatches to a peer"),
        ("dispatch_rows", "rows", "Expert rows in them"),
        ("dispatch_failures", "failures", "Dispatches that it did not answer well"),
    ):
        yield _counter(name, text, "peer", {link["peer"]: link[key] for link in links})
    traffic = CounterMetricFamily("swarmnode_dispatch_bytes", "Bytes of frames", labels=["peer", "direction"])
    for link in links:
        traffic.add_metric([link["peer"], "out"], link["bytes_out"])
        traffic.add_metric([link["peer"], "back"], link["bytes_back"])
    yield traffic


def _histogram(counts: Sequence[int], total_s: float) -> Metric:
    """`counts`: of each bucket alone; the last is everything above the highest bound."""
    text = "From handing a layer of one token over to having its rows"
    family = HistogramMetricFamily("swarmnode_layer_seconds", text)
    bounds = [*map(floatToGoString, LAYER_SECONDS_BOUNDS), "+Inf"]
    family.add_metric([], list(zip(bounds, accumulate(counts), strict=True)), total_s)
    return family
