"""How audits grade peers that round coarsely, and cheats of every size: `python -m tests.measure_grades [NAME...]`.

Each peer answers AUDITS dispatches of the demo model, as in `swarmctl audit experiment`, and all are recomputed. A line
says after how many it was out, what its rows were graded, and how far off the median one was. Peers whose name has one
of the words that are given are measured; without any, all are.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from backends.device import Device
from backends.experts import F32, I32, ExpertBackend, GgmlExperts, ReadSlice
from backends.known_roundings import BF16_SUMS, ROUNDINGS
from backends.llama import start_library
from backends.manifest import LayerExperts
from backends.numpy_functions import Rows
from backends.numpy_reference import NumpyExperts
from backends.program import ExpertProgram, Node
from capabilities.row_grades import Grade
from scheduler.audit_tests import Change
from swarmnode.bench import find_model
from swarmnode.experiment.cheats import Cheat, OtherWeights
from swarmnode.experiment.dispatches import PEER, Dispatches, open_dispatches
from swarmnode.experiment.trials import FullAudits
from swarmnode.leader.audit_evidence import found_of
from swarmnode.leader.audit_tap import AuditTap
from swarmnode.leader.recomputing import Judged, Recomputing, advance
from tests.expert_models import quiet
from tests.kernel_models import Interleaved, Rounds

AUDITS: Final = 40
SEED: Final = 5
Peers = Iterator[tuple[str, Callable[[], ExpertBackend]]]


# -- honest ------------------------------------------------------------------------------------------------------------


class Bf16(NumpyExperts):
    """Factors, and each product's result, in bfloat16, as frameworks compute; or sums in it, too."""

    def __init__(self, sums: Callable[[F32, F32], F32] | None = None) -> None:
        super().__init__("float32")
        self._sums = sums or (lambda a, weight: a @ weight.T)

    def _multiply(self, a: Rows, weight: Rows, kind: GGMLQuantizationType) -> Rows:
        rounded = ROUNDINGS["bf16"]
        return rounded(self._sums(rounded(np.asarray(a, np.float32)), rounded(np.asarray(weight, np.float32))))


def honest() -> Peers:
    for name, each in ROUNDINGS.items():
        yield f"{name}, in both places", partial(Rounds, [each])
    for name in ("codes by row", "codes with offset by row", "e4m3 by 32", "mxfp4"):
        each = ROUNDINGS[name]
        yield f"{name}, the input", partial(Rounds, [each, each, None])
        yield f"{name}, the input of ggml's arithmetic", partial(Rounds, [each, each, None], as_kernels=True)
        yield f"{name}, between the products", partial(Rounds, [None, None, each])
    yield "bf16 everywhere", Bf16
    for sums in BF16_SUMS[::3]:
        yield f"sums in bf16, runs of {sums.keywords['run']}", partial(Bf16, sums)  # type: ignore[attr-defined]
    yield "sums in f16, runs of 16", partial(NumpyExperts, "float16")
    for lanes in (8, 1):
        yield f"sums in f16, {lanes} side by side", partial(Interleaved, lanes)


# -- cheats ------------------------------------------------------------------------------------------------------------


class RowsBy(Cheat):
    """Right rows [R, n_out], changed by a function of them, of their experts and of numbers by chance."""

    def __init__(self, change: Callable[[F32, I32, np.random.Generator], Any]) -> None:
        super().__init__(every=1, honest_first=0)
        self._change, self._random = change, np.random.default_rng(SEED)

    def wrong(self, layer: int, x: F32, tokens: I32, experts: I32, right: F32, ask_f32: bool) -> F32:
        return np.asarray(self._change(right.copy(), experts, self._random), np.float32)


class WeightsBy(OtherWeights):
    """Weights [rows, n] changed by a function; as_is: in NumPy, where their type could not hold them."""

    def __init__(self, change: Callable[[F32], Any], *, as_is: bool = False) -> None:
        kernels = partial(NumpyExperts, "float32", quantize_activations=True)
        super().__init__(kernels if as_is else None, every=1, honest_first=0)
        self._change = change

    def change(self, values: F32, kind: GGMLQuantizationType) -> F32:
        return np.asarray(self._change(values.copy()), np.float32)


class MatricesBy(OtherWeights):
    """An expert's matrices exchanged: what `choose` makes of an expert, and of a tensor's name."""

    def __init__(self, choose: Callable[[int, str, Sequence[int]], tuple[int, str]]) -> None:
        super().__init__(every=1, honest_first=0)
        self._choose = choose

    def load_layer(self, layer: LayerExperts, program: ExpertProgram, experts: Sequence[int], read: ReadSlice) -> None:
        names = [tensor.name for tensor in layer.tensors]

        def changed(expert: int, index: int) -> Any:
            other, name = self._choose(expert, names[index], experts)
            return read(other, names.index(name))

        Cheat.load_layer(self, layer, program, experts, read)
        self._other.load_layer(layer, program, experts, changed)


class Gated(NumpyExperts):
    """Another gated unit, with ggml's rounding."""

    def __init__(self, unit: str) -> None:
        super().__init__("float32", quantize_activations=True)
        self._unit = unit

    def load_layer(self, layer: LayerExperts, program: ExpertProgram, experts: Sequence[int], read: ReadSlice) -> None:
        nodes = [Node("glu", n.inputs, self._unit, n.params) if n.op == "glu" else n for n in program.nodes]
        super().load_layer(layer, ExpertProgram(tuple(nodes)), experts, read)


class Clipped(GgmlExperts):
    """No activation is larger than so many times the root mean square of its row."""

    def __init__(self, times: float) -> None:
        super().__init__(Device("CPU", threads=1))
        self._times = times

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        limit = np.float32(self._times) * np.sqrt((x * x).mean(axis=1, keepdims=True))
        return super().compute(layer, np.clip(x, -limit, limit), tokens, experts, ask_f32=ask_f32)


def cheats() -> Peers:
    yield "weights of Q4_0 in place of Q4_1", partial(WeightsBy, _through_q4_0)
    yield "weights quantised once more, as finely", partial(WeightsBy, _once_more)
    yield "weights with 1 % of noise", partial(WeightsBy, lambda v: v * (1 + 0.01 * _noise(v)), as_is=True)
    yield "weights in E4M3", partial(WeightsBy, ROUNDINGS["e4m3 by row"], as_is=True)
    yield "one weight in 10,000 of the other sign", partial(WeightsBy, _some_signs)
    for share in (16, 64):
        yield f"the last {share}th of each matrix' rows zero", partial(WeightsBy, partial(_last_rows, share=share))
    for share in (2, 18):
        yield f"a {share}th of each sum left out", partial(WeightsBy, partial(_last_columns, share=share))
    yield "the next expert's down projection", partial(MatricesBy, _next_down)
    yield "gate and up exchanged", partial(MatricesBy, _gate_up)
    for unit in ("GEGLU", "GEGLU_ERF", "GEGLU_QUICK", "REGLU"):
        yield f"{unit} for SWIGLU", partial(Gated, unit)
    for times in (3.0, 6.0, 10.0):
        yield f"activations cut at {times:.0f} rms", partial(Clipped, times)
    for percent in (5.0, 2.0, 1.0, 0.5, 0.2):
        yield f"{percent} % of noise", partial(RowsBy, partial(_noisy, share=percent / 100))
    for factor in (1.01, 1.005, 1.002):
        yield f"rows times {factor}", partial(RowsBy, lambda y, _e, _r, factor=factor: y * factor)
    for name in ("bf16", "f16", "e4m3 by row", "codes by row"):
        yield f"rows rounded: {name}", partial(RowsBy, lambda y, _e, _r, name=name: ROUNDINGS[name](y))
    yield "the sign of one expert's rows", partial(RowsBy, _other_sign)
    yield "one expert of four 5 % too large", partial(RowsBy, _one_of_four)


def _through_q4_0(values: F32) -> Any:
    kind = GGMLQuantizationType.Q4_0
    return gguf.dequantize(gguf.quantize(values, kind), kind).reshape(values.shape)


def _once_more(values: F32) -> Any:
    blocks = values.reshape(-1, 32)
    low = blocks.min(axis=1, keepdims=True)
    step = np.maximum((blocks.max(axis=1, keepdims=True) - low) / np.float32(15), np.float32(1e-20))
    return (np.round((blocks - low) / step) * step + low).reshape(values.shape)


def _noise(values: F32) -> Any:
    return np.random.default_rng(1).standard_normal(values.shape)


def _some_signs(values: F32) -> Any:
    return np.where(np.random.default_rng(3).random(values.shape) < 1e-4, -values, values)


def _last_rows(values: F32, share: int) -> Any:
    values[-max(1, len(values) // share) :] = 0
    return values


def _last_columns(values: F32, share: int) -> Any:
    values[:, -max(1, values.shape[1] // share) :] = 0
    return values


def _next_down(expert: int, name: str, experts: Sequence[int]) -> tuple[int, str]:
    return (experts[(experts.index(expert) + 1) % len(experts)] if "down" in name else expert), name


def _gate_up(expert: int, name: str, experts: Sequence[int]) -> tuple[int, str]:
    other = {"gate": "up", "up": "gate"}
    return expert, next((name.replace(f"_{a}_", f"_{b}_") for a, b in other.items() if f"_{a}_" in name), name)


def _noisy(rows: F32, _experts: I32, random: np.random.Generator, share: float) -> Any:
    sizes = np.linalg.norm(rows, axis=1, keepdims=True) / np.sqrt(rows.shape[1])
    return rows + share * random.standard_normal(rows.shape) * sizes


def _other_sign(rows: F32, experts: I32, _random: np.random.Generator) -> Any:
    return np.where(experts[:, None] == experts.min(), -rows, rows)


def _one_of_four(rows: F32, experts: I32, _random: np.random.Generator) -> Any:
    return np.where(experts[:, None] % 4 == 2, 1.05 * rows, rows)


# -- measured ----------------------------------------------------------------------------------------------------------


def measure(dispatches: Dispatches, recomputing: Recomputing, backend: ExpertBackend) -> str:
    draw, audits = random.Random(SEED), FullAudits(SEED.to_bytes(8, "big") * 2)
    tap, graded, out = AuditTap(audits, lambda: None), [], "-"
    tap.open = True
    dispatches.load(backend)
    for number in range(1, AUDITS + 1):
        dispatch = draw.choice(dispatches.each)
        answer = dispatch.answer(backend)
        if not np.isfinite(answer).all():
            continue
        tap.answered(
            PEER, dispatch.layer, dispatch.x, dispatch.part, None, answer, rounded=False, ask_f32=dispatch.ask_f32
        )
        taken = tap.take()
        assert taken is not None
        steps = recomputing.steps(taken[1])
        while not isinstance(judged := advance(steps), Judged):
            pass
        graded.append(judged.graded)
        if Change.QUARANTINED in audits.found(taken[0], found_of(taken[1], judged)):
            out = str(number)
    backend.close()
    grades = np.concatenate([each.grade for each in graded])
    odd, off = (np.concatenate([getattr(each, name) for each in graded]) for name in ("odd", "distance"))
    shares = [f"{(grades == grade).mean():.0%}" for grade in (Grade.COARSE, Grade.WRONG)]
    near = f"{(grades < Grade.COARSE).mean():.0%}"
    return f"{out} | {near} | {' | '.join(shares)} | {odd.mean():.0%} | {np.median(off):.1e} |"


def main() -> None:
    start_library()
    wanted = sys.argv[1:]
    print("| peer | out after | near | coarse | wrong | odd | median row off by |\n|---|---|---|---|---|---|---|")
    with open_dispatches(find_model("demo", quiet), 1, quiet) as dispatches:
        recomputing = Recomputing(dispatches.manifest, dispatches.source, partial(Device, threads=1))
        for name, make in (*honest(), *cheats()):
            if not wanted or any(part in name for part in wanted):
                print(f"| {name} | {measure(dispatches, recomputing, make())}", flush=True)


if __name__ == "__main__":
    main()
