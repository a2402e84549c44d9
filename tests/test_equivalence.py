"""`swarmctl equivalence`: what its levels say of real kernels, of references, and of backends that are wrong."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from backends.experts import F32, I32
from backends.llama import LlamaModel, LlamaSettings
from backends.moe_hook import ServingHook
from backends.trace import TracingHook
from capabilities.errors import UnsupportedModel, UsageError
from swarmnode.equivalence.answers import PROMPT_TOKENS, race
from swarmnode.equivalence.causes import ACCUMULATION, ROUNDING
from swarmnode.equivalence.passes import WINDOW, decode
from swarmnode.equivalence.recipes import Sizes
from swarmnode.equivalence.run import run_equivalence
from swarmnode.equivalence.splits import split_model
from swarmnode.equivalence.targets import find_target
from swarmnode.local_experts import LocalExperts
from tests.equivalence_runs import OF_MODELS, WRONG, models, ops, products
from tests.expert_models import quiet, take_apart, tiny_file

# -- op ---------------------------------------------------------------------------------------------------------------


def test_a_backend_agrees_with_itself_to_the_bit() -> None:
    level = ops("ggml-cpu", "ggml-cpu")
    assert level["pass"]
    assert {row["op"] for row in level["ops"]} == {"matmul", "swiglu", "softmax", "rms_norm"}
    assert all(row["bit_identical"] and row["max_abs_diff"] == 0 for row in level["ops"])


def test_most_of_a_kernels_distance_to_exact_numbers_is_its_eight_bits() -> None:
    level = ops("ggml-cpu", "reference")
    assert level["pass"], level["reason"]
    for row in products(level):
        assert row["to_exact"]["a"] > 1e-3
        assert row["to_rounded"]["a"] < 1e-5
        assert row["cause"] == ROUNDING
    assert ops("ggml-cpu", "reference:q8")["pass"]


def test_single_precision_passes_and_half_precision_sums_are_caught() -> None:
    assert ops("reference", "reference:f32")["pass"]
    level = ops("reference", "reference:f16")
    assert not level["pass"]
    long = products(level)[-1]
    assert (long["length"], long["pass"], long["cause"]) == (2048, False, ACCUMULATION)
    assert long["measured"]["b"]["accumulation"] == "f16"


def test_the_rounding_of_one_side_hides_no_half_precision_of_the_other() -> None:
    level = ops("ggml-cpu", "reference:f16", Sizes(("q8_0",), (2048,), (1, 40)))
    (row,) = products(level)
    assert row["median_relative_l2"] < row["tolerance"]["median_relative_l2"]
    assert row["alone"] == {"a": True, "b": False}
    assert not level["pass"]
    assert "B is" in level["reason"]


def test_half_precision_in_wide_batches_alone_is_caught() -> None:
    level = ops("reference", f"{WRONG}HalfWhenWide")
    assert not level["pass"]
    assert products(ops("reference", f"{WRONG}HalfWhenWide", Sizes(("q8_0",), (2048,), (1, 5))))[0]["pass"]
    assert any("softmax" in note for note in level["skipped"])


def test_subtly_wrong_weights_are_caught() -> None:
    level = ops("ggml-cpu", f"{WRONG}OffByAThousandth")
    assert not level["pass"]
    assert "matmul q8_0" in level["reason"]


def test_types_that_a_side_does_not_know_are_named() -> None:
    level = ops("ggml-cpu", "reference", Sizes(("q8_0", "q1_0"), (256,), (1,)))
    assert any("q1_0" in note for note in level["skipped"])
    with pytest.raises(UnsupportedModel, match="q1_0"):
        ops("ggml-cpu", "reference", Sizes(("q1_0",), (256,), (1,)))


# -- whole models -----------------------------------------------------------------------------------------------------


def test_a_model_agrees_with_itself_at_every_level() -> None:
    levels = models("ggml-cpu", "ggml-cpu")
    assert tuple(levels) == OF_MODELS
    assert all(level["pass"] for level in levels.values())
    assert set(levels["layer"]["free"]["relative_l2"]) == {0.0}
    assert levels["layer"]["free"]["first_layer"] is None
    assert levels["logits"]["l_infinity"] == levels["logits"]["kl_max"] == 0
    assert levels["decisions"]["flips"] == levels["decisions"]["routing"]["sets_changed"] == 0
    assert levels["generation"]["identical"] == 12
    assert levels["task"]["nll_difference"] == 0
    assert levels["layer"]["noise_floor"]["pinned"]["relative_l2"][-1] > 0


def test_kernels_and_reference_make_one_model() -> None:
    levels = models("ggml-cpu", "reference")
    assert [name for name, level in levels.items() if not level["pass"]] == []
    pinned, free = levels["layer"]["pinned"], levels["layer"]["free"]
    assert 0 < pinned["relative_l2"][0] < pinned["relative_l2"][-1] < 0.05
    assert free["relative_l2"][0] == pinned["relative_l2"][0]
    assert pinned["relative_l2"][-1] < free["relative_l2"][-1]  # some experts changed, and pinning took that out
    assert levels["decisions"]["routing"]["first"]["layer"] > 0  # the first router sees the same rows on both sides


def compare_tiny(kind: str, *levels: str) -> dict[str, Any]:
    return run_equivalence(
        "ggml-cpu", "reference", levels=levels, model=lambda: tiny_file(kind, "q8_0"), own_model=True,
        tokens=WINDOW, prompts=2, answer_tokens=3, progress=quiet,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["deepseek2", "gemma4", "grovemoe", "lfm2moe", "gpt-oss"])
def test_other_architectures_are_compared_too(kind: str) -> None:
    result = compare_tiny(kind, "layer", "generation")
    assert result["pass"]
    assert result["levels"][0]["free"]["relative_l2"][-1] > 0


def test_an_architecture_that_cannot_be_traced_is_refused_with_what_can_be_compared() -> None:
    with pytest.raises(UnsupportedModel, match="cannot be traced") as caught:
        compare_tiny("step35", "layer")
    assert "op, generation and task" in str(caught.value.hint)
    assert compare_tiny("step35", "generation")["pass"]


def test_another_function_fails_at_every_level_that_judges_numbers() -> None:
    levels = models("ggml-cpu", f"{WRONG}WrongExpert")
    assert not levels["layer"]["pass"]
    assert "after layer 0" in levels["layer"]["reason"]
    assert levels["layer"]["divergence"]["first"]["layer"] == 0
    assert f"expert {levels['layer']['divergence']['worst']['expert']} of layer" in levels["layer"]["reason"]
    assert not levels["logits"]["pass"]
    assert not levels["decisions"]["pass"]


def test_a_split_without_the_tokens_asked_for_is_refused() -> None:
    with pytest.raises(UsageError, match="bundled text"):
        run_equivalence(
            "ggml-cpu", "ggml-cpu", levels=("logits",), model=lambda: tiny_file("olmoe"), own_model=True,
            tokens=1 << 20, prompts=1, answer_tokens=1, progress=quiet,
        )  # fmt: skip


class Counting:
    """A model that counts on from each sequence's last token. `slips`: (sequence, position) where it skips one."""

    def __init__(self, *slips: tuple[int, int]) -> None:
        self._slips = slips
        self.fed: dict[int, list[int]] = {}

    def clear_all(self) -> None:
        self.fed.clear()

    def decode(self, tokens: I32, positions: I32, sequences: I32, wants_logits: Any) -> F32:
        for token, sequence, position in zip(tokens.tolist(), sequences.tolist(), positions.tolist(), strict=True):
            before = self.fed.setdefault(sequence, [])
            assert position == len(before)
            before.append(token)
        logits = np.zeros((int(wants_logits.sum()), 64), np.float32)
        for row, at in zip(logits, np.flatnonzero(wants_logits).tolist(), strict=True):
            row[tokens[at] + 1] = 1.0
            row[tokens[at] + 2] = 2.0 if (int(sequences[at]), int(positions[at])) in self._slips else 0.5
        return logits


def test_answers_go_on_from_their_own_tokens_until_they_part() -> None:
    prompts = np.tile(np.arange(PROMPT_TOKENS, dtype=np.int32), (3, 1))
    a, b = Counting(), Counting((1, PROMPT_TOKENS + 1), (2, PROMPT_TOKENS - 1), (2, PROMPT_TOKENS + 2))
    forks, _ = race(cast(LlamaModel, a), cast(LlamaModel, b), prompts, 5)
    assert [None if fork is None else fork.index for fork in forks] == [None, 2, 0]
    assert forks[1] is not None
    assert forks[1].margin == 0.5
    assert a.fed[0] == list(range(PROMPT_TOKENS + 4))


def test_the_swarms_answers_are_those_of_llama_cpp() -> None:
    model = take_apart("olmoe", "q8_0")
    target, settings = find_target("ggml-cpu"), LlamaSettings(PROMPT_TOKENS + 6, 2, 2 * PROMPT_TOKENS)
    prompts = np.random.default_rng(1).integers(0, 256, (2, PROMPT_TOKENS)).astype(np.int32)
    with split_model(model.path, target, target, quiet) as split:
        hook, _ = split.plain_hooks()
        with split.open_trunk(settings, hook) as trunk, split.open_whole(settings) as whole:
            forks, _ = race(whole, trunk, prompts, 6)
    assert forks == [None, None]


# -- tracing ----------------------------------------------------------------------------------------------------------


class Dispatches:
    """Passes on what is dispatched, and keeps the router's choice."""

    def __init__(self, executor: LocalExperts) -> None:
        self._executor = executor
        self.ids: dict[int, I32] = {}

    def dispatch(self, layer: int, x: F32, ids: I32) -> None:
        self.ids[layer] = ids.copy()
        self._executor.dispatch(layer, x, ids)

    def collect(self, layer: int) -> F32:
        return self._executor.collect(layer)


def test_traces_of_trunk_and_whole_model_are_the_same() -> None:
    model = take_apart("qwen3moe", "q8_0")
    target, settings = find_target("ggml-cpu"), LlamaSettings(context_tokens=WINDOW, batch_tokens=WINDOW)
    window = np.arange(20, dtype=np.int32)
    layers = model.learned.layers.values()
    with split_model(model.path, target, target, quiet) as split:
        dispatches = Dispatches(split.executors[0])
        hook, (watching, _) = TracingHook(layers, ServingHook(layers, dispatches)), split.watching_hooks()
        with split.open_trunk(settings, hook) as trunk, split.open_whole(settings, watching) as whole:
            assert np.array_equal(decode(trunk, window), decode(whole, window))
    hook.check()
    assert set(dispatches.ids) == set(hook.routes) == set(watching.routes)
    for layer, chosen in dispatches.ids.items():
        assert np.array_equal(chosen, hook.routes[layer])
        assert np.array_equal(chosen, watching.routes[layer])
    assert len(hook.residuals) == 2
    for layer, residual in hook.residuals.items():
        assert np.array_equal(residual, watching.residuals[layer])


def test_routers_choose_what_they_are_told_to() -> None:
    model = take_apart("qwen3moe", "q8_0")
    settings, window = LlamaSettings(context_tokens=WINDOW, batch_tokens=WINDOW), np.arange(20, dtype=np.int32)
    target = find_target("ggml-cpu")
    with split_model(model.path, target, target, quiet) as split:
        hook, _ = split.hooks()
        with split.open_trunk(settings, hook) as trunk:
            free = decode(trunk, window)
            own = dict(hook.routes)
            hook.pinned = own
            assert np.array_equal(decode(trunk, window), free)  # told what they would choose anyway
            hook.pinned = {layer: (chosen + 1) % 8 for layer, chosen in own.items()}
            other = decode(trunk, window)
            assert all(np.array_equal(hook.routes[layer], chosen) for layer, chosen in hook.pinned.items())
    assert not np.allclose(free, other)
