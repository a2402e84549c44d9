"""Who may ask over HTTP: hosts, origins, keys; and the address that it listens on."""

from __future__ import annotations

import json
import socket

import httpx
import pytest
import trio

from swarmnode.api import limits
from tests.api_tools import HELLO, answer, serving_http
from tests.patience import PATIENCE_S

CHAT = "/v1/chat/completions"


# -- who may ask -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "127.0.0.1:1"}, 200),
        ({"host": "localhost"}, 200),
        ({"host": "[::1]:11435"}, 200),
        ({"host": "chat.example.org"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example:80"}, 403),
        ({"host": "[::1"}, 403),
        ({"origin": "https://page.example"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://localhost:3000"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost", "host": "localhost"}, 200),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}, 403),
        ({"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
    ],
)
async def test_pages_of_other_origins_do_not_reach_it(headers: dict[str, str], status: int) -> None:
    config = {"origins": ("https://page.example",), "hosts": ("chat.example.org",)}
    async with serving_http(answer, **config) as served, served.client() as client:
        usual = {"content-type": "application/json"}
        response = await client.post(CHAT, content=json.dumps(HELLO), headers={**usual, **headers})
        assert response.status_code == status
        assert bool(served.swarm.conversations) == (status == 200), "nobody asked the swarm"


async def test_a_browser_learns_which_origins_may_ask() -> None:
    async with serving_http(answer, origins=("https://page.example",)) as served, served.client() as client:
        wants = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
            "access-control-request-private-network": "true",
        }
        for origin, status in (("https://page.example", 204), ("https://evil.example", 403)):
            response = await client.options(CHAT, headers={"origin": origin, **wants})
            assert response.status_code == status
            allowed = response.headers.get("access-control-allow-origin")
            assert allowed == (origin if status == 204 else None)
            assert ("access-control-allow-private-network" in response.headers) == (status == 204)
        response = await client.post(CHAT, json=HELLO, headers={"origin": "https://page.example"})
        assert response.headers["access-control-allow-origin"] == "https://page.example"
        assert "x-request-id" in response.headers["access-control-expose-headers"]


async def test_a_page_that_may_ask_can_read_why_it_is_refused() -> None:
    config = {"origins": ("https://page.example",), "keys": ("sk-0123456789abcdef",)}
    async with serving_http(answer, **config) as served, served.client() as client:
        response = await client.post(CHAT, json=HELLO, headers={"origin": "https://page.example"})
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    assert response.headers["access-control-allow-origin"] == "https://page.example"
    assert response.headers["www-authenticate"] == "Bearer"


async def test_an_address_that_others_reach_goes_by_keys_and_not_by_names() -> None:
    key = "sk-0123456789abcdef"
    async with serving_http(answer, listen="0.0.0.0:0", keys=(key,)) as served, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{served.port}/v1/models"
        for headers, status in (({}, 401), ({"authorization": f"Bearer {key}", "host": "my-machine.example"}, 200)):
            assert (await client.get(url, headers=headers)).status_code == status


async def test_with_keys_everything_but_its_health_needs_one() -> None:
    key = "sk-0123456789abcdef"
    async with serving_http(answer, keys=("another-key-of-24-letters", key)) as served, served.client() as client:
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer wrong-key-wrong-key"}, 401),
            ({"authorization": f"Basic {key}"}, 401),
            ({"authorization": f"Bearer {key}"}, 200),
        ):
            response = await client.post(CHAT, json=HELLO, headers=headers)
            assert response.status_code == status
            assert (await client.get("/v1/models", headers=headers)).status_code == status
        assert (await client.get("/healthz")).status_code == 200


# -- the address -------------------------------------------------------------------------------------------------------


async def test_a_port_that_is_taken_is_told_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LISTEN_RETRY_SECONDS", 0.05)
    taken = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{taken.getsockname()[1]}"
    async with serving_http(answer, listen=address) as served:
        status = served.http.in_status(await served.swarm.status())
        assert status["http"] == {"listen": address, "url": None, "error": "another program uses it"}
        (finding,) = status["findings"]
        assert (finding["kind"], finding["peer"]) == ("http_address", "me")
        assert "api.listen" in finding["hint"]
        taken.close()
        with trio.fail_after(PATIENCE_S):
            while served.http.url is None:  # noqa: ASYNC110 (nothing tells)
                await trio.sleep(0.01)
        assert served.http.in_status(await served.swarm.status())["findings"] == []
        async with served.client() as client:
            assert (await client.get("/healthz")).status_code == 200


async def test_switched_off_it_listens_nowhere() -> None:
    async with serving_http(answer, listen="off") as served:
        assert served.http.in_status(await served.swarm.status())["http"] == {
            "listen": "off",
            "url": None,
            "error": None,
        }
