"""The command lines as people and scripts use them: real processes, against a control server with made-up answers."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import click
import pytest
import trio

from capabilities.errors import ContextLengthExceeded, ExpertsUnavailable, NoDaemon
from swarmnode.cli import common, ctl, daemon, progress, render_audit
from swarmnode.config import default_text
from swarmnode.config_sections import Combine
from swarmnode.control import ControlReply
from swarmnode.version import VERSION
from tests.control_threads import SWARMCTL, control_thread, terminal
from tests.patience import PATIENCE_S

PEER = "12D3KooWBhSrGJeT5RQc6KsaYCsKu1R8R3Yk3zPpJ1CBhCsVYM2W"
STATUS = {
    "self": PEER,
    "leader": PEER,
    "term": 0,
    "epoch": 1,
    "ready": False,
    "reason": "attic is loading",
    "addresses": [f"/ip4/192.168.100.100/tcp/11436/p2p/{PEER}"],
    "http": {"listen": "127.0.0.1:11435", "url": "http://127.0.0.1:11435", "error": None},
    "model": {
        "name": "demo",
        "architecture": "deepseek",
        "combine": "partial-sum",
        "coverage": {"min_copies": 0, "missing": [{"layer": layer, "expert": 3} for layer in range(30)]},
        "degraded": ["output rank 7: expert 0 of layer 7 is on attic, which is unfit"],
    },
    "requests": {"running": 1, "waiting": 0, "finished": 12, "failed": 0},
    "peers": [
        {
            "peer_id": PEER,
            "name": "cellar",
            "roles": ["leader", "backbone"],
            "state": "ready",
            "fitness": "unfit",
            "rtt_ms": 0.0,
        },
        {
            "peer_id": PEER[:-1] + "X",
            "name": "attic-with-a-very-long-name-\x1b[2J",
            "roles": ["worker"],
            "state": "loading",
            "progress": {"phase": "fetching", "done_bytes": 45, "total_bytes": 100},
            "backends": [{"name": "ggml"}],
            "experts_held": 160,
            "rtt_ms": 0.2345,
            "load": 0.371,
            "version": "0.1.0",
            "error": {"type": "overloaded", "message": "the disk is full"},
        },
    ],
    "findings": [
        {"kind": "skewed_clock", "peer": PEER, "message": "its clock is 80 s behind", "hint": "Set it. \x1b[2J"},
        {"kind": "wire_version", "peer": None, "message": "some peer speaks otherwise", "hint": "Update it."},
    ],
}
ANSWER = {
    "text": "Hi 👋\x1b[2J",
    "tokens": [1, 2, 3],
    "finish_reason": "stop",
    "leader": PEER,
    "request_id": "req-1",
    "usage": {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7},
    "timings": {"queue_s": 0.0, "prefill_s": 0.1, "decode_s": 0.2, "total_s": 0.3, "first_token_s": 0.1},
}


class FakeDaemon:
    """A control server in a thread. `calls` has what was asked; `cancelled` is set when a hanging handler was."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.cancelled = threading.Event()

    def handlers(self) -> dict[str, Any]:
        names = ("status", "ask", "model_add", "model_list", "model_show", "model_remove")
        return {name: self._handler(name) for name in names}

    def _handler(self, name: str) -> Callable[[dict[str, Any], ControlReply], Any]:
        async def handle(params: dict[str, Any], reply: ControlReply) -> dict[str, Any]:
            self.calls.append((name, params))
            answer: dict[str, Any] = await getattr(self, name)(params, reply)
            return answer

        return handle

    async def status(self, params: dict[str, Any], reply: ControlReply) -> dict[str, Any]:
        return STATUS

    async def ask(self, params: dict[str, Any], reply: ControlReply) -> dict[str, Any]:
        await reply.event("queued", position=2)
        if params["prompt"] == "long":
            raise ContextLengthExceeded("the prompt has 5000 tokens, the context 4096")
        for index, text in enumerate(("Hi", "", " 👋\x1b[2J")):
            await reply.event("token", index=index, token=index + 1, text=text)
        if params["prompt"] == "break":
            raise ExpertsUnavailable("layer 3 is lost", layer=3, experts=[5], peer=PEER, cause="disconnected")
        if params["prompt"] == "hang":
            try:
                await trio.sleep_forever()
            finally:
                self.cancelled.set()
        return ANSWER

    async def model_add(self, params: dict[str, Any], reply: ControlReply) -> dict[str, Any]:
        await reply.event("progress", step="hashing", done=1, total=2)
        return {"name": params.get("name") or "m", "architecture": "olmoe", "files": [params["path"]], "fault": None}

    async def model_list(self, params: dict[str, Any], reply: ControlReply) -> dict[str, Any]:
        return {"models": [{"name": "demo", "architecture": "deepseek", "moe_layers": 30, "active": True}]}

    async def model_show(self, params: dict[str, Any], reply: ControlReply) -> dict[str, Any]:
        return {"name": params["name"], "experts": 16}

    async def model_remove(self, params: dict[str, Any], reply: ControlReply) -> dict[str, Any]:
        return {"removed": params["name"]}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("node")


@pytest.fixture(scope="module")
def fake(data_dir: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon()
    with control_thread(data_dir, fake.handlers()):
        yield fake


@pytest.fixture
def run(fake: FakeDaemon, data_dir: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs swarmctl in this process: (exit status, standard output, standard error)."""

    def run(*words: str) -> tuple[int, str, str]:
        fake.calls.clear()
        capfd.readouterr()
        status = common.main(ctl.swarmctl, "swarmctl", ["--data-dir", str(data_dir), *words])
        return status, *capfd.readouterr()

    return run


Run = Callable[..., tuple[int, str, str]]


def process(
    *words: str, program: list[str] = SWARMCTL, encoding: str = "utf-8", **options: Any
) -> subprocess.CompletedProcess[str]:
    command = [*program, *words]
    return subprocess.run(command, capture_output=True, encoding=encoding, timeout=PATIENCE_S, check=False, **options)


# ask


def test_ask_streams_text_and_nothing_else(run: Run, fake: FakeDaemon) -> None:
    status, out, err = run("ask", "Hello")
    assert (status, out, err) == (0, "Hi 👋\x1b[2J\n", "")
    assert fake.calls == [("ask", {"prompt": "Hello", "stop": [], "raw": False})]


def test_ask_sends_what_is_given_and_only_that(run: Run, fake: FakeDaemon) -> None:
    numbers = {"max-tokens": 5, "temperature": 0, "top-p": 0.9, "top-k": 3, "min-p": 0.1, "seed": 2**64 - 1}
    words = [f"--{name}={value}" for name, value in numbers.items()]
    run("ask", *words, "--stop", "\n", "--stop", "Alice:", "--system", "Be brief.", "--raw", "--", "-x")
    assert fake.calls[0][1] == {
        "prompt": "-x",
        "max_tokens": 5,
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "seed": 2**64 - 1,
        "stop": ["\n", "Alice:"],
        "system": "Be brief.",
        "raw": True,
    }


def test_ask_sends_what_an_answer_must_look_like(run: Run, fake: FakeDaemon, tmp_path: Path) -> None:
    for name, text in (("schema", "{}"), ("gbnf", 'root ::= "a"')):
        (tmp_path / name).write_text(text)
    run("ask", "--json-schema", str(tmp_path / "schema"), "--logprobs", "3", "--presence-penalty", "1", "x")
    given = fake.calls[0][1]
    assert (given["json_schema"], given["logprobs"], given["presence_penalty"]) == ("{}", 3, 1.0)
    run("ask", "--grammar", str(tmp_path / "gbnf"), "x")
    assert fake.calls[0][1]["grammar"] == 'root ::= "a"'
    assert run("ask", "--grammar", str(tmp_path / "nothing"), "x")[0] == 2


def test_ask_json_is_one_object(run: Run) -> None:
    status, out, _ = run("ask", "Hello", "--json")
    assert status == 0
    assert json.loads(out) == ANSWER


def test_ask_reads_standard_input(data_dir: Path, fake: FakeDaemon) -> None:
    fake.calls.clear()
    done = process("ask", "-", "--data-dir", str(data_dir), input="from a pipe: é\n")
    assert done.returncode == 0
    assert fake.calls[0][1]["prompt"] == "from a pipe: é\n"
    assert process("ask", "--data-dir", str(data_dir), input="no dash\n").returncode == 0
    assert fake.calls[1][1]["prompt"] == "no dash\n"
    empty = process("ask", "--data-dir", str(data_dir), "--json", input=" \n")
    error = json.loads(empty.stdout)["error"]
    assert (empty.returncode, error["message"]) == (2, "the prompt is empty")
    assert "standard input" in error["hint"]
    latin = process("ask", "-", "--data-dir", str(data_dir), input="é", encoding="latin-1")
    assert latin.returncode == 2
    assert "not UTF-8" in latin.stderr


@pytest.mark.parametrize(
    ("prompt", "kind", "out"),
    [("long", "context_length_exceeded", ""), ("break", "experts_unavailable", "Hi 👋\x1b[2J\n")],
)
def test_ask_that_fails_says_why_and_what_to_do(run: Run, prompt: str, kind: str, out: str) -> None:
    status, shown, err = run("ask", prompt)
    assert (status, shown) == (1, out)
    assert err.startswith("Error: ")
    assert len(err.splitlines()) == 2, "message, then hint"
    status, shown, err = run("ask", prompt, "--json")
    error = json.loads(shown)["error"]
    assert (status, error["type"], err) == (1, kind, "")
    if kind == "experts_unavailable":
        assert (error["layer"], error["experts"], error["peer"]) == (3, [5], PEER)


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_frees_the_daemon_at_once(data_dir: Path, fake: FakeDaemon, as_json: bool) -> None:
    fake.cancelled.clear()
    command = [*SWARMCTL, "ask", "hang", "--data-dir", str(data_dir), *(["--json"] if as_json else [])]
    fake.calls.clear()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        deadline = time.monotonic() + PATIENCE_S
        while not fake.calls and time.monotonic() < deadline:
            time.sleep(0.01)
        out = "" if as_json else child.stdout.read(2)
        child.send_signal(signal.SIGINT)
        assert fake.cancelled.wait(PATIENCE_S)
        out, err = out + child.stdout.read(), child.stderr.read()
    assert child.returncode == 130
    assert "Traceback" not in err
    if as_json:
        assert json.loads(out)["error"]["type"] == "cancelled"
    else:
        assert out.startswith("Hi")


def test_reader_that_leaves_ends_the_request_quietly(data_dir: Path, fake: FakeDaemon) -> None:
    command = f"{sys.executable} -c 'from swarmnode.cli.ctl import main; main()' ask Hello --data-dir {data_dir} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stderr == ""


def test_terminal_gets_no_control_characters_and_a_summary(data_dir: Path, fake: FakeDaemon) -> None:
    main_end, end = pty.openpty()
    with subprocess.Popen([*SWARMCTL, "ask", "Hello", "--data-dir", str(data_dir)], stdout=end, stderr=end) as child:
        os.close(end)
        shown = b""
        while chunk := _read(main_end):
            shown += chunk
    os.close(main_end)
    assert child.returncode == 0
    assert "Hi 👋\\x1b[2J" in shown.decode()
    assert "number 2 in the queue" in shown.decode()
    assert "[3 tokens (stop), first after 0.10 s, 10.0 tokens/s]" in shown.decode()


def _on_a_terminal(*words: str, until: Callable[[str], bool], **environment: str) -> tuple[int, str]:
    """Run swarmctl on a terminal, press Ctrl-C once `until` holds of what it showed; exit status and all of it."""
    with terminal(*words, **environment) as session:
        session.wait(until)
        session.press("\x03")
        return session.end(), session.shown


def test_watching_redraws_without_clearing_and_ctrl_c_leaves_the_last_picture(data_dir: Path, fake: FakeDaemon) -> None:
    words = ("status", "--watch", "--data-dir", str(data_dir))
    status, shown = _on_a_terminal(*words, until=lambda text: text.count("not ready") >= 2)
    assert status == 0
    assert shown.startswith("\x1b[?1049h")  # the alternate screen
    drawn, left = shown.split("\x1b[?1049l")
    assert drawn.count("\x1b[2J") <= 1, "a screen that is cleared each time flickers"
    assert drawn.count("\x1b[H") >= 2
    assert "not ready: attic is loading" in left
    assert "\x1b[1;33mnot ready" in left
    assert max(len(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)) for line in left.splitlines()) <= 80


def test_top_measures_peers_and_no_color_means_no_color(data_dir: Path, fake: FakeDaemon, run: Run) -> None:
    status, shown = _on_a_terminal(
        "top", "--data-dir", str(data_dir), until=lambda text: text.count("37 %") >= 2, NO_COLOR="1"
    )
    assert status == 0
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", shown)
    rates = json.loads(run("top", "--json")[1])
    assert [peer["load"] for peer in rates["peers"]] == [None, 0.371]
    assert rates["peers"][1]["dispatches_per_s"] is None


def test_watching_as_json_is_an_object_a_line_also_while_the_daemon_is_away(data_dir: Path, fake: FakeDaemon) -> None:
    command = [*SWARMCTL, "status", "--json", "--watch", "--data-dir", str(data_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        first = json.loads(child.stdout.readline())
        assert json.loads(child.stdout.readline()) == first == STATUS
        child.send_signal(signal.SIGINT)
        assert child.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_of_clicks(shell: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert common.main(ctl.swarmctl, "swarmctl", ["completion", shell]) == 0
    assert f"_SWARMCTL_COMPLETE={shell}_complete" in capfd.readouterr().out


def test_tab_finishes_a_command(tmp_path: Path) -> None:
    program = tmp_path / "swarmctl"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(SWARMCTL)} "$@"\n')
    program.chmod(0o755)
    script = """
        eval "$(swarmctl completion bash)"
        COMP_WORDS=(swarmctl stat) COMP_CWORD=1
        _swarmctl_completion swarmctl
        echo "${COMPREPLY[@]}"
    """
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=True, env=environment
    )
    assert done.stdout.strip() == "status"


def _read(file: int) -> bytes:
    try:
        return os.read(file, 1 << 16)
    except OSError:  # a terminal whose other side is closed
        return b""


# status and models


def test_status_fits_and_is_plain_without_a_terminal(run: Run) -> None:
    status, out, _ = run("status")
    assert status == 0
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert "not ready: attic is loading" in out
    assert "30 experts missing (layer/expert 0/3, 1/3" in out
    assert re.search(r"combine +partial-sum", out)
    assert re.search(rf"this peer +{PEER} *\n +/ip4/192.168.100.100/tcp/11436 *\n", out)
    assert re.search(r"http +http://127.0.0.1:11435 *\n", out)
    assert re.search(r"attic-wit\S+ hCsVYM2X worker +loading 45 % +ggml +160 +0.2 +37 % +0.1.0", out)
    assert "the disk is full" in out
    assert "ready, unfit" in out
    assert "output rank 7: expert 0 of layer 7" in out
    assert "cellar: its clock is 80 s behind (skewed_clock)" in out
    assert "some peer speaks otherwise" in out


def test_status_json_is_what_the_daemon_said(run: Run) -> None:
    assert json.loads(run("status", "--json")[1]) == STATUS
    assert json.loads(run("--json", "status")[1]) == STATUS


def test_status_of_another_version_still_shows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for odd in ({}, {"peers": [{}, 3], "model": [], "requests": None}, {"peers": "x", "ready": "yes", "leader": 3}):
        monkeypatch.setitem(globals(), "STATUS", odd)
        status, out, err = run("status")
        assert (status, err) == (0, "")
        assert "not ready" in out


def test_status_says_once_that_the_swarm_is_not_ready(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "STATUS", {"ready": False, "reason": "the swarm is not ready: 3 experts wait"})
    assert "swarm        not ready: 3 experts wait" in run("status")[1]


def test_models(run: Run, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "demo" in run("model", "list")[1]
    assert json.loads(run("model", "list", "--json")[1])["models"][0]["name"] == "demo"
    assert "experts  16" in run("model", "show", "demo")[1]
    assert json.loads(run("model", "remove", "demo", "--json")[1]) == {"removed": "demo"}
    monkeypatch.chdir(tmp_path)
    status, out, _ = run("model", "add", "m.gguf", "--name", "mine")
    assert status == 0
    absolute = str(tmp_path / "m.gguf")  # the daemon runs in another folder
    assert fake.calls == [("model_add", {"path": absolute, "name": "mine"})]
    assert "olmoe" in out


# The frame: help, usage, exit status, JSON on failure


def test_no_daemon_is_status_3(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for words in (["status"], ["ask", "x"], ["model", "list"]):
        assert common.main(ctl.swarmctl, "swarmctl", [*words, "--data-dir", str(tmp_path)]) == 3
        assert capfd.readouterr().err.startswith("Error: no daemon listens at ")
        assert common.main(ctl.swarmctl, "swarmctl", [*words, "--json", "--data-dir", str(tmp_path)]) == 3
        assert json.loads(capfd.readouterr().out)["error"]["type"] == "no_daemon"


@pytest.mark.parametrize(
    "line",
    [
        "dance", "ask x --seed -1", "ask x --top-p 2", "ask x y", "model show", "model dance", "demo now",
        "invite --expires 367d", "invite --expires 0m",
    ],
)  # fmt: skip
def test_wrong_usage_is_status_2_also_as_json(line: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = line.split()
    assert common.main(ctl.swarmctl, "swarmctl", words) == 2
    assert "Error: " in capfd.readouterr().err
    assert common.main(ctl.swarmctl, "swarmctl", [*words, "--json"]) == 2
    out, err = capfd.readouterr()
    error = json.loads(out)["error"]
    assert (error["type"], err) == ("usage", "")
    assert "--help" in error["hint"]


def test_what_nobody_foresaw_is_still_one_object(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(kind: BaseException) -> Callable[..., None]:
        def run(*_: Any, **__: Any) -> None:
            raise kind

        return run

    for error, status, name in (
        (ZeroDivisionError("x"), 1, "internal"),
        (ExceptionGroup("g", [ExceptionGroup("g", [NoDaemon("worker-1 is gone")])]), 1, "internal"),
        (BaseExceptionGroup("g", [KeyboardInterrupt(), ValueError("x")]), 130, "cancelled"),
    ):
        _module(monkeypatch, "swarmnode.bench", run_bench=fail(error))
        assert common.main(ctl.swarmctl, "swarmctl", ["bench", "--json"]) == status
        assert json.loads(capfd.readouterr().out)["error"]["type"] == name


def test_later_data_dir_wins(run: Run, tmp_path: Path, data_dir: Path) -> None:
    assert run("status", "--json", "--data-dir", str(tmp_path))[0] == 3
    assert run("--data-dir", str(tmp_path), "status", "--json", "--data-dir", str(data_dir))[0] == 0


def test_help_is_there_at_once_for_every_command() -> None:
    script = "import sys; from swarmnode.cli.ctl import *; common.main(swarmctl, 'swarmctl'); print(*sys.modules)"
    for words in ([], ["status"], ["ask"], ["model"], ["model", "check"], ["demo"], ["bench"]):
        done = process(*words, "--help", program=[sys.executable, "-c", script])
        assert "Usage: swarmctl" in done.stdout
        assert "--json" in done.stdout
        heavy = {"trio", "libp2p", "numpy", "pydantic", "structlog", "rich", "llama_cpp", "platformdirs"}
        assert not heavy & set(done.stdout.splitlines()[-1].split())


def test_examples_in_help_texts_can_be_typed() -> None:
    from tests.test_docs import fault_of

    seen = 0
    for name, command in leaves(ctl.swarmctl):
        _, _, examples = (command.help or "").partition("Examples:\n")
        for line in examples.splitlines():
            typed = re.split(r" (?:\||>>?|<|&&) |   ", line[line.index("swarmctl") :])[0] if "swarmctl" in line else ""
            if typed:
                assert fault_of(shlex.split(typed), whole=True) is None, f"{name}: {typed}"
                seen += 1
    assert seen > 30


def test_help_texts_fit_80_columns() -> None:
    for name, command in leaves(ctl.swarmctl):
        text = command.get_help(click.Context(command, info_name=f"swarmctl{name}", terminal_width=80))
        assert [line for line in text.splitlines() if len(line) > 80] == []


def leaves(group: click.Group, name: str = "") -> Iterator[tuple[str, click.Command]]:
    for word, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def test_ask_help_says_who_can_read_along() -> None:
    text = " ".join(process("ask", "--help").stdout.split())
    assert "leader reads prompt and answer in plain text" in text
    assert "workers see activations" in text


# Commands that need no daemon


def _module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, module)


def _demo(monkeypatch: pytest.MonkeyPatch, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Puts a demo that is over at once in place of the real one; returns the options that it was called with."""
    asked: list[dict[str, Any]] = []

    def run_demo(*, progress: Any, show: Callable[[str], None], **options: Any) -> dict[str, Any]:
        progress("starting", 0, 1)
        show("worker-3 asks: Why?\n\nBecause.\x1b[2J\n")
        asked.append(options)
        return result

    others = {"proof_line": lambda _: "Proof!", "stop_kept": lambda: {"stopped": []}}
    _module(monkeypatch, "swarmnode.demo", run_demo=run_demo, **others)
    return asked


def test_demo_shows_answer_status_and_proof(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    result = {"identical": True, "status": STATUS, "peers": [{"name": "leader", "data_dir": "/d/leader"}]}
    asked = _demo(monkeypatch, result)
    assert common.main(ctl.swarmctl, "swarmctl", ["demo", "--keep", "--max-tokens", "9"]) == 0
    out = capfd.readouterr().out
    assert out.startswith("worker-3 asks: Why?\n\nBecause.\\x1b[2J\n")
    assert "not ready: attic is loading" in out
    assert "\nProof!\n" in out
    assert "swarmctl --data-dir /d/leader ask PROMPT" in out
    assert "swarmctl demo --stop" in out
    assert asked == [{"prompt": None, "max_tokens": 9, "keep": True}]


def test_demo_json_and_verdict(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    result = {"identical": False, "status": STATUS, "peers": []}
    _demo(monkeypatch, result)
    assert common.main(ctl.swarmctl, "swarmctl", ["demo", "--json"]) == 1
    assert json.loads(capfd.readouterr().out) == result
    assert common.main(ctl.swarmctl, "swarmctl", ["demo", "--stop", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"stopped": []}


def test_losing_a_daemon_of_its_own_is_no_missing_daemon(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise NoDaemon("worker-2 is gone")

    _module(monkeypatch, "swarmnode.demo", run_demo=lost, proof_line=None, stop_kept=None)
    _module(monkeypatch, "swarmnode.bench", run_bench=lost)
    for command in ("demo", "bench"):
        assert common.main(ctl.swarmctl, "swarmctl", [command, "--json"]) == 1
        assert json.loads(capfd.readouterr().out)["error"]["message"] == "worker-2 is gone"


def test_bench_shows_ratios(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    result = {
        "llama_cpp": {"prefill_tokens_per_s": 200.0, "decode_tokens_per_s": 100.0},
        "swarm": {"prefill_tokens_per_s": 150.0, "decode_tokens_per_s": 80.0},
        "layer_rtt_ms": 0.91,
    }
    _module(monkeypatch, "swarmnode.bench", run_bench=lambda *_, **__: result)
    assert common.main(ctl.swarmctl, "swarmctl", ["bench"]) == 0
    out = capfd.readouterr().out
    assert re.search(r"decode +100 +80 +0\.80", out)
    assert "layer rtt ms  0.91" in out


def test_bench_passes_on_how_to_combine(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert get_args(Combine) == ctl.COMBINES
    _module(monkeypatch, "swarmnode.bench", run_bench=lambda *_, combine, **__: {"combine": combine})
    for words, combine in (([], "router-order"), (["--combine", "partial-sum"], "partial-sum")):
        assert common.main(ctl.swarmctl, "swarmctl", ["bench", "--json", *words]) == 0
        assert json.loads(capfd.readouterr().out) == {"combine": combine}
    assert common.main(ctl.swarmctl, "swarmctl", ["bench", "--combine", "sum"]) == 2


def test_check_of_a_broken_file_is_one_line_and_status_1(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 100)
    assert common.main(ctl.swarmctl, "swarmctl", ["model", "check", str(broken)]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "broken.gguf" in err.splitlines()[0]
    assert common.main(ctl.swarmctl, "swarmctl", ["model", "check", str(broken), "--json"]) == 1
    assert json.loads(capfd.readouterr().out)["error"]["type"] == "bad_model_file"


# swarmnode


def test_default_configuration_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    assert common.main(daemon.swarmnode, "swarmnode", ["config", "--default"]) == 0
    assert capfd.readouterr().out == default_text()
    assert common.main(daemon.swarmnode, "swarmnode", ["config"]) == 2


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert common.main(ctl.swarmctl, "swarmctl", ["--version"]) == 0
    assert capfd.readouterr().out == f"swarmctl {VERSION}\n"
    assert common.main(daemon.swarmnode, "swarmnode", ["version", "--json"]) == 0
    assert json.loads(capfd.readouterr().out).keys() == {"swarmnode", "llama-cpp-python", "libp2p", "python"}


def test_run_reads_the_configuration_that_is_meant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, Path]] = []
    _module(monkeypatch, "swarmnode.daemon", run=lambda config, paths: ran.append((config.node.name, paths.data)))
    monkeypatch.setattr("swarmnode.logs.configure", lambda *_, **__: None)
    (tmp_path / "config.toml").write_text("[node]\nname = 'own'")
    (tmp_path / "other.toml").write_text("[node]\nname = 'other'")
    data = ["--data-dir", str(tmp_path)]
    assert common.main(daemon.swarmnode, "swarmnode", ["run", *data]) == 0
    assert common.main(daemon.swarmnode, "swarmnode", ["run", *data, "--config", str(tmp_path / "other.toml")]) == 0
    assert ran == [("own", tmp_path), ("other", tmp_path)]
    (tmp_path / "config.toml").write_text("[node]\nnmae = 'own'")
    assert common.main(daemon.swarmnode, "swarmnode", ["run", *data]) == 2
    assert "did you mean name?" in capfd.readouterr().err


def test_progress_without_a_terminal_is_a_line_for_each_long_step(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, seconds in (("REDRAW_S", 0.01), ("QUIET_S", 0.5), ("AGAIN_S", 2 * PATIENCE_S)):
        monkeypatch.setattr(progress, name, seconds)
    shown = ""

    def until_shown(lines: int) -> None:
        nonlocal shown
        deadline = time.monotonic() + PATIENCE_S
        while shown.count("\n") < lines and time.monotonic() < deadline:
            time.sleep(0.01)
            shown += capfd.readouterr().err

    with progress.ProgressLine() as line:
        line("short", 0, 1)
        line("hash\x1bing", 1, 4)
        until_shown(1)
        line("hash\x1bing", 2, 4)
        time.sleep(0.05)
        line("waiting", 0, 1)
        until_shown(2)
    shown += capfd.readouterr().err
    assert re.sub(r"0:\d\d", "0:00", shown) == "hash\\x1bing 25 % (0:00)\nwaiting (0:00)\n"


def test_the_table_of_audits_says_who_differs_from_itself(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"agreed": 11, "differed": 12, "self_differed": 13, "answers": 14, "audited": 15, "share": 0.16}
    peer = {"name": "one", "peer_id": "12D3KooW", "fitness": "fit", "audits": counts, "verdict": None}
    render_audit.print_audits({"peers": [peer]})
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["peer", "id", "fitness", "agreed", "differed", "itself", "answers", "audited", "share"]
    assert row.split()[-6:] == ["11", "12", "13", "14", "15", "16%"]
