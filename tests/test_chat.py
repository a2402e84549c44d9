"""`swarmctl chat`: turns are remembered, Ctrl-C stops an answer and not the session, nothing is kept unasked."""

from __future__ import annotations

import json
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from capabilities.errors import NotReady, UsageError
from swarmnode.cli.chat import Conversation, private_file, run_command
from swarmnode.control import ControlReply
from swarmnode.handlers import parse_ask
from tests.control_threads import SWARMCTL, control_thread, terminal
from tests.patience import PATIENCE_S


class Talker:
    """Answers "heard N: TEXT" with N the number of messages; "hang" never ends, "fail" fails."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, str]]] = []

    async def status(self, params: dict[str, Any], reply: ControlReply) -> dict[str, Any]:
        return {"ready": True, "model": {"name": "demo"}, "swarm": {"name": "home"}}

    async def ask(self, params: dict[str, Any], reply: ControlReply) -> dict[str, Any]:
        messages = params["messages"]
        self.asked.append(messages)
        text = messages[-1]["content"]
        if text == "fail":
            raise NotReady("attic is loading")
        answer = f"heard {len(messages)}: {text}"
        await reply.event("token", index=0, token=1, text=answer)
        if text == "hang":
            await trio.sleep_forever()
        return {"text": answer, "usage": {}, "timings": {}}


@pytest.fixture
def talker(tmp_path: Path) -> Iterator[Talker]:
    made = Talker()
    with control_thread(tmp_path, {"status": made.status, "ask": made.ask}):
        yield made


def contents(messages: list[dict[str, str]]) -> list[str]:
    return [message["content"] for message in messages]


def test_a_session_on_a_terminal(talker: Talker, tmp_path: Path) -> None:
    with terminal("chat", "--system", "Be brief.", "--data-dir", str(tmp_path), PROMPT_TOOLKIT_NO_CPR="1") as session:
        prompts = 0

        def wait(text: str) -> None:
            """Until this was said, and the next prompt is there (it lets the terminal tell what is pasted)."""
            nonlocal prompts
            prompts += 1
            session.wait(lambda shown: text in shown and shown.count("\x1b[?2004h") >= prompts)

        wait("demo of the swarm home")
        session.press("one\x1b\rtwo\r")  # Alt-Enter between the lines
        wait("heard 2")
        session.press("hang\r")
        session.wait(lambda shown: "heard 4: hang" in shown)
        session.press("\x03")
        wait("(stopped)")
        session.press("fail\r")
        wait("Error: attic is loading")
        session.press("\x03")  # at the prompt it empties the line
        wait("(Ctrl-D ends)")
        session.press("go on\r")
        wait(": go on")
        session.press("\x04")
        assert session.end() == 0
    assert contents(talker.asked[0]) == ["Be brief.", "one\ntwo"]
    assert contents(talker.asked[-1]) == [
        "Be brief.", "one\ntwo", "heard 2: one\ntwo", "hang", "heard 4: hang", "go on"
    ]  # fmt: skip
    assert not [path for path in tmp_path.rglob("*") if "history" in path.name]


def test_lines_of_a_pipe_are_messages_and_an_error_keeps_the_session(talker: Talker, tmp_path: Path) -> None:
    command = [*SWARMCTL, "chat", "--json", "--data-dir", str(tmp_path)]
    lines = "one\n\nfail\n/reset\n/nothing\ntwo\n/exit\nthree\n"
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one.get("text") or one["error"]["type"] for one in said] == [
        "heard 1: one", "not_ready", "usage", "heard 1: two"
    ]  # fmt: skip
    assert all(one["error"]["hint"] for one in said if "error" in one)
    assert (done.returncode, done.stderr) == (1, "")


def test_what_is_saved_is_whole_private_and_never_written_over(tmp_path: Path) -> None:
    talk, path = Conversation("Be brief."), tmp_path / "talk.json"
    talk.add("why?", "because")
    assert run_command(f"/save {path}", talk) == f"Saved in {path}."
    assert contents(json.loads(path.read_text())["messages"]) == ["Be brief.", "why?", "because"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for line in (f"/save {path}", "/save", f"/save {tmp_path}/no/where", "/sav x"):
        with pytest.raises(UsageError) as caught:
            run_command(line, talk)
        assert caught.value.hint
    assert run_command("/system", talk) is not None
    assert talk.system == ""


def test_history_is_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "typed"
    path.write_text("+older\n")
    path.chmod(0o644)
    assert private_file(path).read_text() == "+older\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_daemon_takes_a_conversation_in_place_of_a_prompt() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    assert parse_ask({"messages": messages}).messages == tuple(messages)
    for wrong in ({"messages": []}, {"messages": ["hi"]}, {"messages": messages, "prompt": "x"},
                  {"messages": messages, "raw": True}, {"messages": [{"role": "king", "content": "x"}]}):  # fmt: skip
        with pytest.raises(UsageError):
            parse_ask(wrong)
