"""A swarm of real daemons, one of which cheats: it must end quarantined, and what was delivered must be right.

The cheat computes right until it has been proven and trusted with work, and then begins. Prompts are asked until the
leader says that it is quarantined, or the time is up, and a few more after that. Each answer is held against llama.cpp
on the undivided model: it must be equal, or say that it is tainted. An answer may end unnoticed in the few dispatches
between a cheat's first wrong one and its first audit: one at the most, but of a cheat that cheats now and then.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from capabilities.errors import SwarmError
from scheduler.sampling import SamplingParams
from swarmnode.chat_messages import chat
from swarmnode.experiment.cheats import EVERY, HONEST_FIRST, by_name
from swarmnode.experiment.run import find_cheat
from swarmnode.local_swarm import LocalSwarm
from swarmnode.prompt_messages import Ask, new_request_id
from swarmnode.undivided import Undivided

Progress = Callable[[str, int, int], None]

WORKERS: Final = 4
_HONEST_FIRST: Final = 400  # dispatches: measurements and the probe are fewer, and some real ones come before it begins
_CONTEXT_TOKENS: Final = 512
_ANSWER_TOKENS: Final = 12
_AFTERWARDS: Final = 3  # answers, without the cheat
_LOOK_S: Final = 0.5
_PROMPTS: Final = (
    "Name three colours.", "What is two and two?", "Tell me about the sea.", "Who wrote Hamlet?", "What is bread?",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Answers:
    """What the swarm said: equal to llama.cpp's own, else tainted, else wrong; failed ones say why.

    unnoticed: wrong, and asked before anything had been found against the cheat.
    """

    equal: list[int]
    tainted: list[int]
    wrong: list[int]
    unnoticed: list[int]
    failed: list[str]


def run_daemons(model: Path, cheat: str, *, minutes: float, progress: Progress) -> dict[str, Any]:
    """A swarm of WORKERS with one cheat (a name of cheats.CHEATS, or module:Class); the result is what `--json` prints.

    Raises:
        SwarmError: the swarm cannot be had.
    """
    kind, every = by_name().get(cheat), find_cheat(cheat).every
    factory = cheat if kind is None else f"{kind.make.__module__}:{kind.make.__name__}"
    root = Path(tempfile.mkdtemp(prefix="swarmnode-audit-"))
    swarm = LocalSwarm(
        root,
        WORKERS,
        backbone=1,
        leader={"leader": {"context_tokens": _CONTEXT_TOKENS, "parallel": 2}, "swarm": {"replicas": 2}},
        each={"compute": {"threads": 1}},
    )
    liar = swarm.workers[0]
    liar.settings["compute"] = {"threads": 1, "factory": factory}
    liar.environment = {EVERY: str(every), HONEST_FIRST: str(_HONEST_FIRST)}
    undivided = Undivided(model, context_tokens=_CONTEXT_TOKENS, threads=1)
    try:
        with swarm:
            swarm.add_model(model, progress, name="experiment")
            swarm.wait_ready(progress)
            return _observe(swarm, liar.peer_id, undivided, cheat, every, minutes, progress)
    finally:
        undivided.close()
        shutil.rmtree(root, ignore_errors=True)


def _observe(
    swarm: LocalSwarm, peer: str, undivided: Undivided, cheat: str, every: int, minutes: float, progress: Progress
) -> dict[str, Any]:
    started, answers, out_s = time.monotonic(), _Answers([], [], [], [], []), None
    expected = {prompt: list(undivided.answer(_ask(prompt)).tokens) for prompt in _PROMPTS}
    number = afterwards = noticed = 0
    while afterwards < _AFTERWARDS and time.monotonic() - started < 60 * minutes:
        progress(f"{cheat}: asking the swarm", number, 0)
        _ask_once(swarm, _PROMPTS[number % len(_PROMPTS)], expected, number, answers, noticed=noticed > 0)
        number += 1
        shown = swarm.leader.call("peer", name=peer)
        noticed = (shown["audits"] or {}).get("differed", 0)
        if out_s is not None:
            afterwards += 1
        elif shown["fitness"] == "quarantined":
            out_s = time.monotonic() - started
    explained = swarm.leader.call("peer", name=peer)
    others = [row for row in swarm.leader.status()["peers"] if row["peer_id"] != peer]
    convicted = [row["name"] for row in others if row["fitness"] == "quarantined"]
    everywhere = _known_everywhere(swarm, peer)
    in_time = every > 1 or len(answers.unnoticed) <= 1
    return {
        "cheat": cheat,
        "workers": WORKERS,
        "quarantined": out_s is not None,
        "seconds": out_s,
        "asked": number,
        "equal": len(answers.equal),
        "tainted": len(answers.tainted),
        "unnoticed": len(answers.unnoticed),
        "wrong": len(answers.wrong),
        "failed": answers.failed,
        "honest_quarantined": convicted,
        "known_to_all": everywhere,
        "verdict": explained["verdict"],
        "pass": out_s is not None and in_time and not answers.wrong and not convicted and everywhere,
    }


def _ask_once(
    swarm: LocalSwarm,
    prompt: str,
    expected: dict[str, list[int]],
    number: int,
    answers: _Answers,
    *,
    noticed: bool,
) -> None:
    try:
        answer = swarm.workers[-1].ask(prompt, max_tokens=_ANSWER_TOKENS, temperature=0.0)
    except SwarmError as error:
        answers.failed.append(error.message)
        return
    if answer["tokens"] == expected[prompt]:
        answers.equal.append(number)
    elif answer.get("tainted"):
        answers.tainted.append(number)
    elif not noticed:
        answers.unnoticed.append(number)
    else:
        answers.wrong.append(number)


def _known_everywhere(swarm: LocalSwarm, peer: str) -> bool:
    """Whether every member has heard the verdict, within a few seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        verdicts = [node.call("peer", name=peer)["verdict"] for node in swarm.nodes]
        if all(verdict is not None and verdict["fitness"] == "quarantined" for verdict in verdicts):
            return True
        time.sleep(_LOOK_S)
    return False


def _ask(prompt: str) -> Ask:
    return Ask(
        new_request_id(), SamplingParams(temperature=0.0), messages=chat(prompt, None), max_tokens=_ANSWER_TOKENS
    )
