"""Kernels in a process of their own: what a child that dies, hangs or speaks nonsense does, and what it never does."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from backends.device import Device
from backends.experts import GgmlExperts
from backends.row_operators import GgmlRows
from backends.variant_child import describe_layer, described_layer
from backends.variant_frames import Frames
from backends.variant_process import KernelExperts, KernelProcess
from backends.variants import VARIANTS, find_variant
from capabilities.errors import KernelFailed, LibraryMismatch, UsageError
from tests.expert_models import DOWN_ONLY, made_up_layer
from tests.kernel_processes import installed_kernels, script
from tests.patience import PATIENCE_S

ONES = {"ffn_down_exps.weight": np.ones((4, 32, 32), np.float32)}
X, ROW = np.ones((1, 32), np.float32), np.zeros(1, np.int32)


@pytest.fixture
def process() -> Iterator[KernelProcess]:
    made = KernelProcess(installed_kernels(call_s=20))
    yield made
    made.close()


def load(experts: KernelExperts | GgmlExperts) -> None:
    layer, read = made_up_layer(ONES, 32, 32, "q4_0")
    experts.load_layer(layer, DOWN_ONLY, [0, 1], read)


def broken(text: str, **deadlines: float) -> KernelFailed:
    """What loading on such a child ends with."""
    process = KernelProcess(script(text, **deadlines))
    with pytest.raises(KernelFailed) as caught:
        load(process.experts())
    assert process.pid is None  # nothing is left of it
    return caught.value


# -- a sound child ----------------------------------------------------------------------------------------------------


def test_the_same_bits_as_in_this_process(process: KernelProcess) -> None:
    device = Device("CPU")
    here, there = GgmlExperts(device), process.experts()
    x = np.random.default_rng(0).standard_normal((5, 32), np.float32)
    rows = np.arange(5, dtype=np.int32)
    results = []
    for backend in (here, there):
        load(backend)
        results.append(backend.compute(0, x, rows, rows % 2))
    assert np.array_equal(*results)
    assert np.array_equal(GgmlRows(device).softmax(x), process.softmax(x))
    assert np.array_equal(GgmlRows(device).rms_norm(x), process.rms_norm(x))


def test_nothing_starts_before_the_first_use_and_all_ends_with_the_owner(process: KernelProcess) -> None:
    experts = process.experts()
    assert process.pid is None
    experts.start()
    assert process.pid is not None
    load(experts)
    pid = process.pid
    assert pid is not None
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_experts_of_one_process_are_apart(process: KernelProcess) -> None:
    first, second = process.experts(), process.experts()
    load(first)
    load(second)
    first.close()
    first.close()
    assert second.compute(0, X, ROW, ROW).shape == (1, 32)
    assert process.pid is not None


def test_calls_from_many_threads_take_turns(process: KernelProcess) -> None:
    experts = process.experts()
    load(experts)
    expected = experts.compute(0, X, ROW, ROW)
    wrong: list[int] = []

    def call(number: int) -> None:
        results = [experts.compute(0, X * number, ROW, ROW) for _ in range(20)]
        wrong.extend(number for y in results if not np.array_equal(y, expected * number))

    threads = [threading.Thread(target=call, args=(2**n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not wrong


def test_a_layer_survives_its_description() -> None:
    layer, _ = made_up_layer(ONES, 32, 32, "q4_0")
    assert described_layer(describe_layer(layer)).tensors == layer.tensors


# -- a child that breaks ----------------------------------------------------------------------------------------------


def test_a_killed_child_is_named_and_new_experts_start_another(process: KernelProcess) -> None:
    experts = process.experts()
    load(experts)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(KernelFailed, match="ended with status -9"):
        experts.compute(0, X, ROW, ROW)
    with pytest.raises(KernelFailed, match="is gone"):
        experts.compute(0, X, ROW, ROW)
    experts.close()
    fresh = process.experts()
    load(fresh)
    assert fresh.compute(0, X, ROW, ROW).shape == (1, 32)


def test_a_suspended_child_is_ended_at_the_deadline() -> None:
    process = KernelProcess(installed_kernels(call_s=20))
    experts = process.experts()
    load(experts)
    object.__setattr__(process.launch, "call_s", 0.3)
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(KernelFailed, match=r"did not answer within 0 s"):
        experts.compute(0, X, ROW, ROW)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("print('no such library'); sys.exit(3)", "ended with status 3: no such library"),
        ("end.sendall(b'x' * 12)", "speaks nonsense: no frame"),
        ("end.sendall(b'KRN1' + b'\\xff' * 8)", "speaks nonsense: no frame"),
        ("end.sendall(b'KRN1\\x01\\0\\0\\0\\0\\0\\0\\0\\xc1')", "speaks nonsense: a header that is no msgpack"),
        ("end.sendall(b'KRN1\\x01\\0\\0\\0\\0\\0\\0\\0\\x01')", "speaks nonsense: a header that is no map"),
        ("frames.send({'error': 5})", "speaks nonsense: an error that is no map"),
        ("hello(); frames.receive(); frames.send({'slice': 'all'})", "speaks nonsense: it asks for a slice all"),
        ("hello(); frames.receive(); frames.send({}, b'more')", "speaks nonsense: no frame"),
        ("hello(); frames.receive(); sys.exit(0)", "ended with status 0"),
    ],
)  # fmt: skip
def test_nonsense_is_named(text: str, reason: str) -> None:
    assert reason in broken(text).message


def test_a_child_that_never_speaks_is_ended() -> None:
    assert "did not start within 1 s" in broken("time.sleep(60)", start_s=1.0).message


def test_a_slice_that_nobody_named_ends_the_load() -> None:
    process = KernelProcess(
        script("hello(); frames.receive(); frames.send({'slice': [3, 0]}); print(frames.receive())")
    )
    with pytest.raises(KernelFailed):
        load(process.experts())


def test_a_child_cannot_ask_for_weights_while_it_computes() -> None:
    text = "hello(); frames.receive(); frames.send({'slice': [0, 0]})\nwhile True: time.sleep(1)"
    process = KernelProcess(script(text))
    with pytest.raises(KernelFailed, match="asks for weights"):
        process.softmax(X)


def test_another_version_is_refused() -> None:
    process = KernelProcess(script("frames.send({'protocol': 1, 'ggml': '0.1'})"))
    with pytest.raises(LibraryMismatch, match="another version"):
        process.softmax(X)


def test_a_program_that_is_not_there_is_named() -> None:
    launch = installed_kernels()
    object.__setattr__(launch, "command", ("/nowhere/qemu",))
    with pytest.raises(KernelFailed, match="cannot be started"):
        KernelProcess(launch).softmax(X)


def test_frames_have_deadlines_for_sending_too() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        Frames(ours).send({}, bytes(8 << 20), seconds=0.2)


# -- names ------------------------------------------------------------------------------------------------------------


def test_names_are_ggmls_and_unique() -> None:
    assert len({variant.target for variant in VARIANTS}) == len(VARIANTS)
    assert find_variant("x64").target == "ggml-cpu:x64"
    assert find_variant("vulkan").library == "libggml-vulkan.so"
    with pytest.raises(UsageError, match="no kernels called 'z80'"):
        find_variant("z80")


def test_what_a_processor_lacks_is_named(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags : fpu sse4_2 avx f16c\n")
    haswell = next(variant for variant in VARIANTS if variant.name == "haswell")
    assert set(haswell.missing(cpuinfo)) <= {"fma", "avx2", "bmi2", "an x86-64 processor"}
    assert haswell.missing(cpuinfo)
