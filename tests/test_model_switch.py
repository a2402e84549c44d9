"""The leader is told to serve another model, in the middle of its term: no number of the first one is taken for it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import trio

from backends.add_model import add_model
from swarmnode.leader.service import Leader
from swarmnode.model_choice import ModelChoice
from swarmnode.models import Models
from swarmnode.undivided import Undivided
from tests.expert_models import quiet, tiny_file
from tests.leading_swarm import CONTEXT_TOKENS, Heard, ask, leading_swarm
from tests.net_tools import eventually

SETTINGS = """
[swarm]
workers_expected = 2
[leader]
context_tokens = 256
parallel = 2
"""


async def test_another_model_in_the_same_term(tmp_path: Path) -> None:
    # The same shapes, so that nothing but the epoch tells the two apart.
    path = tiny_file("olmoe", "q8_0")
    async with leading_swarm(tmp_path, SETTINGS) as swarm, trio.open_nursery() as nursery:
        models, choice = Models(tmp_path / "models"), ModelChoice(tmp_path / "choice", "")
        leader = Leader(swarm.protocols, swarm.trunks, partial(choice.open, models), swarm.config, 1, 1)
        swarm.leader = leader
        nursery.start_soon(leader.run)
        await swarm.until_ready()
        await swarm.check(ask("req-1"))
        await trio.to_thread.run_sync(add_model, path, tmp_path / "models" / "other", "other", quiet)
        leader.models_changed()
        running = Heard()
        nursery.start_soon(swarm.hear, ask("req-2", max_tokens=200), running)
        await eventually(lambda: len(running.tokens) > 2)
        assert leader.active is not None
        assert leader.active.manifest.name == "tiny", "there is a choice now; better the one that is served than none"
        choice.remember(models.ids()["other"])
        leader.models_changed()
        await eventually(lambda: leader.active is not None and leader.active.manifest.name == "other")
        assert running.error.type == "no_leader"
        await swarm.until_ready()
        undivided = Undivided(path, context_tokens=CONTEXT_TOKENS)
        heard = Heard()
        await swarm.hear(ask("req-3"), heard)
        assert heard.tokens == list(undivided.answer(ask("req-3")).tokens) != swarm.expected(ask("req-3"))
        undivided.close()
        nursery.cancel_scope.cancel()
