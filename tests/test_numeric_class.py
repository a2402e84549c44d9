"""Numeric classes: what goes into one, what two kernels must differ in to get two, and the words for them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from backends import numeric_class
from backends.class_inputs import product_rows, rows_on_ties, unit_values
from backends.device import Device
from backends.experts import F32, I32, ExpertBackend, GgmlExperts
from backends.gguf_types import GGML_TYPES
from backends.measure import Request, measure_class
from backends.numeric_class import Fingerprint, fingerprint
from backends.numpy_functions import Rows
from backends.numpy_reference import NumpyExperts
from backends.probe_weights import noise_layer, unit_layer
from backends.program import ExpertProgram, Node
from backends.variant_process import KernelProcess
from backends.variants import VARIANTS
from capabilities.errors import UnsupportedModel
from capabilities.numeric_class import CLASS_CHARS, joined, named, shown_different
from swarmnode.kernels.store import is_built, launch_of
from tests.kernel_models import ChangesWithWidth

KINDS = {known.name: kind for kind, known in GGML_TYPES.items()}
F16, Q4_0, Q4_1, Q4_K = KINDS["f16"], KINDS["q4_0"], KINDS["q4_1"], KINDS["q4_K"]
NARROW = Request((), 256, 256)


@cache
def cpu() -> Device:
    return Device("CPU")


def class_of(backend: ExpertBackend, kind: int, request: Request = NARROW) -> Fingerprint:
    return measure_class(backend, kind, request)


def whole_experts_alone(backend: ExpertBackend, kind: int) -> str:
    """The fingerprint of whole experts, without that of their steps."""
    probe = noise_layer(kind, NARROW.n_in, NARROW.n_ff, 2)
    backend.load_layer(probe.layer, probe.program, probe.experts, probe.read)
    return fingerprint(backend, probe, lambda: None).numeric_class


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less work: fewer widths."""
    monkeypatch.setattr(numeric_class, "WIDTHS", (1, 2, 5, 9))


# -- inputs on ties ---------------------------------------------------------------------------------------------------


def test_rows_fall_on_ties() -> None:
    x = rows_on_ties(8, 256)
    assert x.tobytes() == rows_on_ties(8, 256).tobytes()
    codes = x[1].astype(np.float64) * 64
    assert set((np.abs(codes) % 1).tolist()) == {0.0, 0.5}  # the largest of each block, and halves
    assert np.abs(codes).max() == 127
    blocks = x[2].reshape(-1, 32)
    steps = blocks.astype(np.float64) / (np.abs(blocks).max(axis=1, keepdims=True).astype(np.float64) / 127)
    assert np.abs(np.abs(steps[:, 1:]) % 1 - 0.5).max() < 1e-5
    halves = x[3][1::2].astype(np.float64)
    down, up = np.floor(halves * 1024) / 1024, np.ceil(halves * 1024) / 1024
    assert np.array_equal(halves - down, up - halves)


# -- numeric classes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["f32", "f16", "q4_0", "q4_K"])
def test_ggmls_cpu_kernels_are_one_class_with_themselves(name: str) -> None:
    found = class_of(GgmlExperts(cpu()), KINDS[name])
    assert found == class_of(GgmlExperts(cpu()), KINDS[name])
    assert (found.batch_invariant, found.repeatable) == (True, True)
    assert len(found.numeric_class) == CLASS_CHARS


@pytest.mark.usefixtures("quick")
def test_a_class_is_of_an_arithmetic_and_a_type() -> None:
    backends = [NumpyExperts("float64"), NumpyExperts("float32"), NumpyExperts("float16"), GgmlExperts(cpu())]
    backends += [NumpyExperts("float64", quantize_activations=True)]
    classes = [class_of(backend, kind).numeric_class for backend in backends for kind in (F16, Q4_0)]
    assert len(set(classes)) == 10


@pytest.mark.usefixtures("quick")
def test_one_rounding_of_ties_makes_another_class() -> None:
    """Half away from zero where kernels of SIMD code go to the even neighbour, and nothing else."""

    class Scalar(NumpyExperts):
        def _multiply(self, a: Any, weight: Any, kind: GGMLQuantizationType) -> Any:
            blocks = np.asarray(a, np.float32).reshape(-1, 32)
            scale = (np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)).astype(np.float32)
            inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
            steps = blocks * inverse
            self.steps = np.floor(np.abs(steps) + np.float32(0.5)) * np.sign(steps) if self.away else np.rint(steps)
            return (self.steps * scale).reshape(a.shape) @ weight.T

    classes = []
    for away in (False, True):
        backend = Scalar("float32")
        backend.away = away  # type: ignore[attr-defined]
        classes.append(class_of(backend, Q4_0).numeric_class)
    assert classes[0] != classes[1]


def test_kernels_that_change_with_width_are_not_batch_invariant() -> None:
    steady = class_of(NumpyExperts("float64"), F16)
    for at in (2, 6, 33):
        found = class_of(ChangesWithWidth(NumpyExperts("float64"), NumpyExperts("float16"), at), F16)
        assert (found.batch_invariant, found.repeatable) == (False, True)
        assert found.numeric_class != steady.numeric_class
    when_asked = class_of(ChangesWithWidth(NumpyExperts("float64"), NumpyExperts("float16"), 1, honours=True), F16)
    assert when_asked.numeric_class not in ("", steady.numeric_class)


@pytest.mark.usefixtures("quick")
def test_calls_that_do_not_repeat_have_no_class() -> None:
    class Restless(NumpyExperts):
        calls = 0

        def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
            y = super().compute(layer, x, tokens, experts)
            self.calls += 1
            y[-1, -1] += np.float32(1e-3 * (self.calls % 2))
            return y

    found = class_of(Restless("float64"), F16)
    assert found == Fingerprint("", batch_invariant=False, repeatable=False)


# -- what vanishes on the way through an expert ------------------------------------------------------------------------


class OffByABit(NumpyExperts):
    """Rounds activations as ggml's kernels do, and its gated unit is off by a last bit in values whose bits end so."""

    def __init__(self, every: int) -> None:
        super().__init__("float32", quantize_activations=True)
        self._every = every

    def _run(self, held: Any, weights: Any, x: F32) -> Rows:
        nodes, self.values = held.program.nodes, [x.astype(np.float32)]
        for node in nodes[1:]:
            inputs = [self.values[i] for i in node.inputs]
            if node.op == "mul_mat_id":
                out = self._multiply(inputs[0], weights[node.name], held.types[node.name])
            else:
                bits = (inputs[0] / (1 + np.exp(-inputs[0])) * inputs[-1]).astype(np.float32).view(np.int32)
                off = bits % self._every == 0 if self._every else 0
                out = (bits + off).astype(np.int32).view(np.float32)
            self.values.append(out)
        return self.values[-1]


@pytest.mark.usefixtures("quick")
def test_a_last_bit_of_the_gated_unit_makes_another_class_though_whole_experts_hide_it() -> None:
    plain, off = OffByABit(0), OffByABit(1000)
    assert whole_experts_alone(plain, Q4_0) == whole_experts_alone(off, Q4_0)
    assert class_of(plain, Q4_0).numeric_class != class_of(off, Q4_0).numeric_class


class OffInTheRest(NumpyExperts):
    """Computes what is left over when a row is cut into vectors by another formula, as kernels do."""

    def _run(self, held: Any, weights: Any, x: F32) -> Rows:
        y: Rows = super()._run(held, weights, x).astype(np.float32)
        rest = y.shape[1] // 16 * 16 if len(held.program.weights) == 2 else y.shape[1]  # of a gated unit alone
        y[:, rest:] *= np.float32(1 + 2**-22)
        return y


@pytest.mark.parametrize("n_ff", [40, 256, 264])
def test_what_a_row_leaves_over_counts_where_the_models_own_rows_leave_some_over(n_ff: int) -> None:
    request = Request((), 256, n_ff)
    plain, off = (class_of(make("float32"), F16, request).numeric_class for make in (NumpyExperts, OffInTheRest))
    assert (plain == off) == (n_ff % 16 == 0)


class LargestBySign(NumpyExperts):
    """Takes the last of several largest values of a block for its scale's sign, where others take the first."""

    def __init__(self, *, last: bool) -> None:
        super().__init__("float32")
        self._last = last

    def _multiply(self, a: Rows, weight: Rows, kind: GGMLQuantizationType) -> Rows:
        blocks = np.asarray(a, np.float32).reshape(-1, 32)
        size = np.abs(blocks)
        place = 31 - size[:, ::-1].argmax(axis=1) if self._last else size.argmax(axis=1)
        scale = np.take_along_axis(blocks, place[:, None], axis=1) / np.float32(-128)
        steps = np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale != 0)
        return (np.minimum(127, np.rint(steps)) * scale).reshape(a.shape) @ weight.T


def test_rows_hold_blocks_whose_largest_value_comes_with_both_signs() -> None:
    assert len({class_of(LargestBySign(last=last), Q4_0).numeric_class for last in (False, True)}) == 2


def test_product_rows_are_of_the_sizes_that_activations_have() -> None:
    x = product_rows(64, 512).astype(np.float64)
    assert 0.9 < x[4::8].std() < 1.4
    behind_gates = np.abs(x[5::8])
    assert np.median(behind_gates) < 0.5
    assert behind_gates.max() > 6
    sizes = np.abs(x[6::8].reshape(-1, 32)).max(axis=1)
    assert (sizes == 0).any()
    assert sizes[sizes > 0].min() < 127 * 2.0**-14 < 100 < sizes.max(), "a scale may be too small for half precision"
    assert np.isfinite(x).all()


def test_a_unit_meets_all_sizes_and_every_turn_of_the_exponential_function() -> None:
    values = unit_values()
    assert np.isfinite(values).all()
    size = np.abs(values.astype(np.float64))
    assert 128 < size.max() < 136
    assert 0 < size[size > 0].min() < 2.0**-140
    assert (size < 8).mean() > 0.6
    found = set(values.tolist())
    for step in range(-120, 120):
        turn = np.float32((step + 0.5) * np.log(2))
        near = [np.nextafter(turn, np.float32(-1e9)), turn, np.nextafter(turn, np.float32(1e9))]
        assert {float(value) for value in near} <= found, step


def test_units_pass_values_on_unrounded() -> None:
    """A product with ones and noughts in F32 changes nothing, so a unit sees what was meant for it."""
    backend, probe = GgmlExperts(cpu()), unit_layer(Node("glu", (), "REGLU", (0.0, 0.0, 0.0)), 192)
    backend.load_layer(probe.layer, probe.program, probe.experts, probe.read)
    x = np.resize(unit_values(), (64, 192))
    x[:, 0] = 1
    rows = np.arange(64, dtype=np.int32)
    assert np.array_equal(backend.compute(probe.layer.layer, x, rows, rows % 2), np.maximum(x, 0))


def test_a_models_own_units_and_widths_make_its_class() -> None:
    backend = GgmlExperts(cpu())
    gates = [Node("glu", (), name, (0.0, 0.0, 0.0)) for name in ("SWIGLU", "GEGLU")]
    units = [*gates, Node("unary", (), "RELU")]
    requests = [Request((), 256, n_ff, units=(unit,)) for unit in units for n_ff in (256, 288)]
    found = [class_of(backend, Q4_0, request).numeric_class for request in requests]
    assert len(set(found)) == len(found)
    assert not any(shown_different(found[0], other) for other in found[1:]), "they are of other work"


def test_a_backend_without_the_unit_has_a_class_all_the_same() -> None:
    class NoHalves(NumpyExperts):
        def load_layer(self, layer: Any, program: ExpertProgram, *args: Any) -> None:
            if any(node.name == "SWIGLU" for node in program.nodes) and layer.tensors[0].type == 0:
                raise UnsupportedModel("no F32 here")
            super().load_layer(layer, program, *args)

    assert len(class_of(NoHalves("float64"), F16).numeric_class) == CLASS_CHARS


# -- the kernels that are built ----------------------------------------------------------------------------------------


def kernels(name: str) -> KernelProcess:
    variant = next(variant for variant in VARIANTS if variant.name == name)
    if not is_built(variant):
        pytest.skip(f"the kernels {name} are not built: swarmctl kernels build")
    if missing := variant.missing():
        pytest.skip(f"this processor lacks {', '.join(missing)}, which the kernels {name} need")
    return KernelProcess(launch_of(name))


def test_avx2_and_avx512_are_two_classes_though_few_rows_tell_them_apart() -> None:
    """Over most quantised weights their products have the same bits, and their exponential functions do not."""
    haswell, skylakex = kernels("haswell"), kernels("skylakex")
    try:
        assert whole_experts_alone(haswell.experts(), Q4_1) == whole_experts_alone(skylakex.experts(), Q4_1)
        assert shown_different(*(class_of(of.experts(), Q4_1).numeric_class for of in (haswell, skylakex)))
    finally:
        haswell.close()
        skylakex.close()


def test_kernels_of_one_class_have_the_same_bits() -> None:
    """Of AVX-512 with and without VNNI. `python -m tests.measure_classes` does the same for all of them."""
    one, other = kernels("skylakex"), kernels("icelake")
    x = np.random.default_rng(5).standard_normal((2000, 256), np.float32)
    rows = np.arange(len(x), dtype=np.int32)
    try:
        for kind in (Q4_1, Q4_K):
            assert class_of(one.experts(), kind) == class_of(other.experts(), kind)
            probe, results = noise_layer(kind, 256, 256, 2), []
            for backend in (one.experts(), other.experts()):
                backend.load_layer(probe.layer, probe.program, probe.experts, probe.read)
                results.append(backend.compute(probe.layer.layer, x, rows, rows % 2))
            assert np.array_equal(*results)
    finally:
        one.close()
        other.close()


# -- words -------------------------------------------------------------------------------------------------------------


def test_a_word_says_what_was_computed_and_what_came_of_it() -> None:
    one, other = named("q4_0 of 2048", "ab" * 32), named("q4_0 of 2048", "cd" * 32)
    elsewhere = named("q4_0 of 576", "ab" * 32)
    assert {len(word) for word in (one, other, elsewhere)} == {CLASS_CHARS}
    assert shown_different(one, other)
    assert not shown_different(one, one)
    assert not shown_different(one, elsewhere), "nothing can be said"
    assert not shown_different(one, "")
    assert not shown_different(None, one)


def test_a_word_over_several_types() -> None:
    a, b, c = (named("work", digest * 32) for digest in ("ab", "cd", "ef"))
    assert joined([("q4_0", a), ("q6_K", b)]) == joined([("q6_K", b), ("q4_0", a)])
    assert shown_different(joined([("q4_0", a), ("q6_K", b)]), joined([("q4_0", a), ("q6_K", c)]))
    assert not shown_different(joined([("q4_0", a), ("q6_K", b)]), joined([("q4_0", a)]))
    assert joined([("q4_0", a), ("q6_K", "")]) == joined([]) == ""
