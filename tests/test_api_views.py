"""What monitors and pages read: health, readiness, status, placement and metrics, each of which docs/api.md names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from capabilities.errors import NoLeader
from swarmnode.api import app, limits
from swarmnode.api.fair_use import FairUse
from swarmnode.api.metrics import HttpMetrics
from swarmnode.config_sections import ApiConfig
from swarmnode.equivalence.kept import keep_matrix
from swarmnode.leader.link import LinkStatistics
from swarmnode.leader.remote_experts import LAYER_SECONDS_BOUNDS, FailoverStatistics, LayerTiming
from swarmnode.net.interface import NetworkStatistics
from swarmnode.worker.experts_service import ExpertsStatistics
from tests.api_tools import HELLO, MODEL, Conversation, done, serving_http, token
from tests.documents import rows, section
from tests.patience import PATIENCE_S

NETWORK = dict.fromkeys(NetworkStatistics.__dataclass_fields__, 7)
WORKER = {**ExpertsStatistics(3, 9, 2_000_000, 1).__dict__, "experts_held": 4, "bytes_held": 100}
LINK = {"peer": "12D3KooWother", "name": "other", **LinkStatistics(5, 50, 5, 1000, 2000, 10, 20, 1).__dict__}
STATUS: dict[str, Any] = {
    "ready": True,
    "term": 3,
    "epoch": 2,
    "uptime_s": 12.5,
    "requests": {"running": 1, "waiting": 2, "finished": 3, "failed": 4, "cancelled": 5, "tokens": 600},
    "model": {**MODEL, "coverage": {"min_copies": 1, "missing": [{"layer": 0, "expert": 3}]}},
    "peers": [
        {"peer_id": "12D3KooWother", "state": "ready", "audits": {"agreed": 8, "differed": 1}},
        {"peer_id": "12D3KooWself", "state": "ready"},
    ],
}


def leading() -> dict[str, Any]:
    timing = LayerTiming(layers=4, round_trip_s=1.0, decode_layers=3, decode_round_trip_s=9.006)
    timing.by_seconds[2] = 2
    timing.by_seconds[-1] = 1
    failover = FailoverStatistics(failures=1, hedges=2, own_rows=3, mixed_steps=4)
    return {"steps": 10, "layers": timing.__dict__, "failover": failover.__dict__, "links": [LINK]}


def read(text: str) -> dict[str, float]:
    """Every sample by its name and labels."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def all_metrics() -> str:
    metrics = HttpMetrics(FairUse(ApiConfig()))
    metrics.answered("/v1/models/x", 200)
    return metrics.text(STATUS, {"network": NETWORK, "worker": WORKER}, leading()).decode()


def test_metrics_are_what_was_counted() -> None:
    found = read(all_metrics())
    assert found["swarmnode_layer_seconds_bucket{le=0.001}"] == 0
    assert found["swarmnode_layer_seconds_bucket{le=0.002}"] == 2
    assert found[f"swarmnode_layer_seconds_bucket{{le={LAYER_SECONDS_BOUNDS[-1]}}}"] == 2
    assert found["swarmnode_layer_seconds_bucket{le=+Inf}"] == found["swarmnode_layer_seconds_count"] == 3
    assert found["swarmnode_layer_seconds_sum"] == 9.006
    assert found["swarmnode_tokens_total"] == 600
    assert found["swarmnode_requests_total{end=failed}"] == 4
    assert found["swarmnode_dispatch_bytes_total{direction=back,peer=12D3KooWother}"] == 2000
    assert found["swarmnode_audits_total{peer=12D3KooWother,result=differed}"] == 1
    assert found["swarmnode_failovers_total{kind=hedge}"] == 2
    assert found["swarmnode_peers{state=ready}"] == 2
    assert found["swarmnode_coverage_missing_experts"] == 1
    assert found["swarmnode_worker_compute_seconds_total"] == 2
    assert found["swarmnode_http_requests_total{route=/v1/models/,status=200}"] == 1


def test_every_metric_is_documented() -> None:
    told = {name for name in re.findall(r"^# TYPE (\S+)", all_metrics(), re.MULTILINE) if not name.endswith("_created")}
    documented = {cells[0].strip("`").partition("{")[0] for cells in rows(section("api.md", "Metrics"))} - {"metric"}
    assert told == documented


def test_a_node_that_does_not_lead_tells_nothing_of_the_swarm() -> None:
    metrics = HttpMetrics(FairUse(ApiConfig()))
    alone = read(metrics.text({**STATUS, "ready": False}, {"network": None, "worker": None}, None).decode())
    assert (alone["swarmnode_ready"], alone["swarmnode_leading"]) == (0, 0)
    assert not [name for name in alone if name.startswith(("swarmnode_tokens", "swarmnode_peers", "swarmnode_network"))]


async def test_health_is_the_daemons_and_readiness_the_swarms(monkeypatch: Any) -> None:
    monkeypatch.setattr(limits, "SEEN_SECONDS", 0.0)
    async with serving_http() as served, served.client() as client:
        for ready, status, text in ((True, 200, "ready\n"), (False, 503, "not ready\n")):
            served.swarm.ready = ready
            response = await client.get("/readyz")
            assert (response.status_code, response.text) == (status, text)
            assert (await client.get("/healthz")).text == "ok\n"


async def test_status_and_placement_are_those_of_swarmctl() -> None:
    async with serving_http() as served, served.client() as client:
        status = (await client.get("/api/status")).json()
        assert status["http"]["url"] == served.url
        assert status["model"] == MODEL
        assert (await client.get("/api/placement?without=x")).json() == {"epoch": 1, "without": "x"}
        assert (await client.get("/api/placement")).json()["without"] is None
        served.swarm.refusal = NoLeader("nobody")
        assert (await client.get("/api/placement?without=y")).status_code == 503


async def test_what_changes_something_needs_the_token_of_the_data_folder(tmp_path: Path) -> None:
    async with serving_http(folder=tmp_path) as served, served.client() as client:
        file = tmp_path / "run" / "http.token"
        assert file.stat().st_mode & 0o777 == 0o600
        token = file.read_text().strip()
        for headers in ({}, {"x-swarmnode-token": token[:-1]}, {"authorization": f"Bearer {token}"}):
            refused = await client.post("/api/drain", json={"on": True}, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "invalid_token")
        assert not served.swarm.draining
        answer = await client.post("/api/drain", json={"on": True}, headers={"x-swarmnode-token": token})
        assert answer.json() == {"draining": True}
        assert served.swarm.draining


async def test_the_last_comparison_of_all_peers_is_shown(tmp_path: Path) -> None:
    level = {"level": "op", "pass": True, "reason": None, "ops": [1, 2, 3]}
    async with serving_http(folder=tmp_path) as served, served.client() as client:
        assert (await client.get("/api/equivalence")).json() == {"peers": [], "measured": None}
        keep_matrix(tmp_path, {"pass": True, "pairs": [{"a": "x", "b": "y", "pass": True, "levels": [level]}]})
        measured = (await client.get("/api/equivalence")).json()["measured"]
    assert measured["pairs"] == [
        {"a": "x", "b": "y", "pass": True, "levels": [{"level": "op", "pass": True, "reason": None}]}
    ]
    assert measured["measured_at"] > 0


async def test_a_page_of_the_daemons_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index.html").write_text("<p>hello")
    (tmp_path / "page.js").write_text("1")
    monkeypatch.setattr(app, "STATIC", tmp_path)
    async with serving_http(keys=("a-key-of-16-letters",)) as served, served.client() as client:
        page = await client.get("/")
        assert (page.text, page.headers["x-content-type-options"]) == ("<p>hello", "nosniff")
        assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
        assert (await client.get("/static/page.js")).text == "1"
        for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/nothing"):
            assert (await client.get(path)).status_code in (401, 404)


async def test_many_pages_make_one_look(monkeypatch: Any) -> None:
    monkeypatch.setattr(limits, "SEEN_SECONDS", PATIENCE_S)
    looks = 0
    async with serving_http() as served, served.client() as client:
        status = served.swarm.status

        async def slow() -> Any:
            nonlocal looks
            looks += 1
            await trio.sleep(0.05)
            return await status()

        served.swarm.status = slow  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            for path in ("/api/status", "/readyz", "/v1/models", "/metrics") * 3:
                nursery.start_soon(client.get, path)
    assert looks == 1


async def test_metrics_count_answers() -> None:
    def answer(conversation: Conversation) -> None:
        conversation.say(token(0, "a"), token(1, "b"), done())

    async with serving_http(answer) as served, served.client() as client:
        await client.post("/v1/chat/completions", json=HELLO)
        await client.post("/v1/chat/completions", json={**HELLO, "n": 99})
        await client.get("/secret/path")
        found = read((await client.get("/metrics")).text)
    assert found["swarmnode_http_answer_tokens_total"] == 2
    assert found["swarmnode_http_first_token_seconds_count"] == 1
    assert found["swarmnode_http_requests_total{route=/v1/chat/completions,status=200}"] == 1
    assert found["swarmnode_http_requests_total{route=/v1/chat/completions,status=400}"] == 1
    assert found["swarmnode_http_requests_total{route=other,status=404}"] == 1
