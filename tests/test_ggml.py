"""The ctypes layer: the layout check notices differences, another version is refused, memory is read as it lies."""

from __future__ import annotations

import ctypes as ct
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from backends import ggml
from backends.device import Device, list_devices
from backends.experts import GgmlExperts
from backends.ggml import InitParams, Library, library, read_tensor, tensor_at, write_tensor
from backends.program import GLU, UNARY
from capabilities.errors import LibraryMismatch, UsageError
from tests.expert_models import take_apart

FIELDS = list(ggml.Tensor._fields_)


def structure(fields: list[Any]) -> type[ct.Structure]:
    class Other(ct.Structure):
        pass

    Other._fields_ = fields
    return Other


def swapped(first: str, second: str) -> type[ct.Structure]:
    names = [field[0] for field in FIELDS]
    fields, i, j = list(FIELDS), names.index(first), names.index(second)
    fields[i], fields[j] = fields[j], fields[i]
    return structure(fields)


# Every pair of neighbours but those that the library has nothing to say of: padding, and pointers of a new tensor
# that are null (`extra`), and the flags, which nobody here reads.
NEIGHBOURS = [(a[0], b[0]) for a, b in pairwise(FIELDS) if {a[0], b[0]}.isdisjoint({"padding", "extra", "flags"})]


@pytest.mark.parametrize(("first", "second"), [*NEIGHBOURS, ("ne", "src"), ("type", "op"), ("view_src", "data")])
def test_a_field_in_another_place_is_noticed(first: str, second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml, "Tensor", swapped(first, second))
    with pytest.raises(LibraryMismatch):
        ggml._check_layout(library())


@pytest.mark.parametrize("field", ["ne", "op_params", "src"])
def test_an_array_of_another_length_is_noticed(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One element more here and bytes less at the end: the size is right, the places are not."""
    fields = [(name, kind._type_ * (kind._length_ + 1) if name == field else kind) for name, kind in FIELDS]
    grown = ct.sizeof(structure(fields)) - ct.sizeof(ggml.Tensor)
    monkeypatch.setattr(ggml, "Tensor", structure(fields))
    with pytest.raises(LibraryMismatch, match="bytes here"):
        ggml._check_layout(library())
    fields = [f for f in fields if f[0] not in ("extra", "padding")] + [("rest", ct.c_char * (16 - grown))]
    monkeypatch.setattr(ggml, "Tensor", structure(fields))
    assert ct.sizeof(ggml.Tensor) == 336
    with pytest.raises(LibraryMismatch, match="another layout"):
        ggml._check_layout(library())


def test_the_layout_is_right() -> None:
    ggml._check_layout(library())


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, "__version__", "0.3.37")
        with pytest.raises(LibraryMismatch, match=r"0\.3\.37 is installed.*0\.3\.36 only") as caught:
            Library()
        assert "make setup" in caught.value.hint
    monkeypatch.setattr(ggml, "GGML_VERSIONS", ("0.99.0",))
    with pytest.raises(LibraryMismatch, match=r"ggml 0\.\d+\.\d+ is installed"):
        Library()


def test_every_function_of_the_table_exists() -> None:
    lib = library()
    for name in ggml._PROTOTYPES:
        assert callable(getattr(lib, name))


def test_a_missing_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ggml._PROTOTYPES, "ggml_of_tomorrow", (None, ()))
    with pytest.raises(LibraryMismatch, match="no function ggml_of_tomorrow"):
        Library()
    with pytest.raises(AttributeError, match="ggml_of_yesterday is not in the table"):
        library().ggml_of_yesterday()


def test_an_incomplete_installation_is_named(tmp_path: Path) -> None:
    with pytest.raises(LibraryMismatch, match="has no libggml-base"):
        ggml._open_libraries(tmp_path)


def test_operators_have_their_names() -> None:
    lib = library()
    assert {"MUL_MAT_ID", "GLU", "ADD_ID", "UNARY", "CLAMP", "GET_ROWS"} <= set(lib.op_names.values())
    assert set(lib.unary_ops) >= UNARY
    assert set(lib.glu_ops) >= GLU
    assert "" not in lib.unary_ops
    with pytest.raises(LibraryMismatch, match="no operator NOTHING"):
        ggml._index_of(lib.ggml_glu_op_name, "NOTHING", len(lib.glu_ops))


def test_kernels_whose_bits_depend_on_the_batch_are_off() -> None:
    library()
    assert os.environ["GGML_CPU_TILED_MM"] == "0"


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["host", "device"])
def lib(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    """The library; as "device" its buffers claim not to be in host memory, as those of a GPU."""
    if request.param == "device":
        monkeypatch.setattr(library(), "ggml_backend_buffer_is_host", lambda buffer: False)
    return library()


@pytest.fixture
def context(lib: Library) -> Iterator[int]:
    address = lib.ggml_init(InitParams(1 << 16, None, True))
    yield address
    lib.ggml_free(address)


def test_tensors_are_read_and_written_as_they_lie(lib: Library, context: int) -> None:
    whole = lib.ggml_new_tensor_3d(context, ggml.TYPE_F32, 4, 3, 2)
    part = lib.ggml_view_3d(context, whole, 2, 2, 2, 16, 48, 24)  # columns 2 and 3 of rows 1 and 2
    buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(context, Device("CPU").buffer_type)
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    write_tensor(lib, whole, values)
    assert np.array_equal(read_tensor(lib, whole, np.float32), values[None])
    assert np.array_equal(read_tensor(lib, part, np.float32), values[None, :, 1:, 2:])
    for wrong in (values[:1], values.astype(np.float64), np.asfortranarray(values)):
        with pytest.raises(ValueError, match="bytes for a tensor of 96"):
            write_tensor(lib, whole, wrong)
    lib.ggml_backend_buffer_free(buffer)


def test_an_empty_tensor_is_read_without_memory(lib: Library, context: int) -> None:
    empty = lib.ggml_new_tensor_3d(context, ggml.TYPE_I32, 4, 0, 2)
    assert tensor_at(empty).data is None
    assert read_tensor(lib, empty, np.int32).shape == (1, 2, 0, 4)


def test_experts_in_device_memory_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = take_apart("gpt-oss", "q4_0")
    x = np.random.default_rng(0).standard_normal((3, model.layer.n_in), dtype=np.float32)
    tokens, experts = np.array([0, 2, 1, 0], np.int32), np.array([1, 1, 7, 0], np.int32)

    def results() -> list[bytes]:
        backend = GgmlExperts(Device("CPU"))
        layer = model.load(backend)
        several = backend.compute(layer.layer, x, tokens, experts)
        one_token = backend.compute(layer.layer, x[:1], tokens[:3] * 0, experts[1:])
        backend.close()
        return [several.tobytes(), one_token.tobytes()]

    in_host_memory = results()
    monkeypatch.setattr(library(), "ggml_backend_buffer_is_host", lambda buffer: False)
    monkeypatch.setattr(ct, "memmove", None)  # nothing may be copied past the backend
    assert results() == in_host_memory


# -- devices ----------------------------------------------------------------------------------------------------------


def test_devices_of_this_machine() -> None:
    devices = list_devices()
    cpu = next(device for device in devices if device.is_cpu)
    assert cpu.name == "CPU"
    assert 0 < cpu.free_bytes <= cpu.total_bytes
    assert Device("cpu").name == "ggml-cpu"
    with pytest.raises(UsageError, match="no device 'tpu'") as caught:
        Device("tpu")
    assert "CPU" in caught.value.hint


def test_threads_change_no_bits() -> None:
    model = take_apart("qwen3moe", "q4_k")
    x = np.random.default_rng(0).standard_normal((40, model.layer.n_in), dtype=np.float32)
    tokens = np.arange(40, dtype=np.int32)
    results = []
    for threads in (1, 2):
        backend = GgmlExperts(Device("CPU", threads=threads))
        layer = model.load(backend)
        results.append(backend.compute(layer.layer, x, tokens, tokens % 8))
        backend.close()
    assert np.array_equal(*results)
