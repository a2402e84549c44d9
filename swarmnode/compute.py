"""Which expert backend this daemon computes with, from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import numpy as np

from backends.device import Device
from backends.experts import ExpertBackend, GgmlExperts
from backends.numpy_reference import NumpyExperts
from backends.row_operators import GgmlRows, NumpyRows, RowOperators
from backends.variant_process import KernelProcess
from capabilities.errors import UsageError
from swarmnode.config_sections import ComputeConfig
from swarmnode.kernels.store import launch_of


@dataclass(frozen=True, slots=True)
class Compute:
    """A backend that can be made afresh for each epoch.

    `rounds_as_ggml_cpu`: it rounds activations as ggml's CPU kernels do, so they may travel rounded already. `rows`:
    softmax and norms by the same kernels, None where they have none.
    """

    make: Callable[[], ExpertBackend]
    name: str
    device: str
    rounds_as_ggml_cpu: bool
    rows: RowOperators | None = None


class BackendFactory(Protocol):
    """A class of an ExpertBackend, or what stands for one."""

    def __call__(self, *, threads: int) -> ExpertBackend: ...


def load_factory(name: str) -> BackendFactory:
    """What `module:Class` names.

    Raises:
        UsageError: it cannot be loaded.
    """
    module, _, attribute = name.partition(":")
    try:
        found: BackendFactory = getattr(import_module(module), attribute)
    except Exception as error:  # whatever somebody's module raises
        said = str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        raise UsageError(
            f"{name} cannot be loaded: {said}",
            hint="Name it as module:Class, in a module that this Python can import.",
        ) from error
    return found


@contextmanager
def _said_of(key: str) -> Iterator[None]:
    """What is found wrong in here is that key of the configuration."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"[compute] {key}: {error.message}", hint=error.hint) from error


def choose_compute(config: ComputeConfig, threads: int) -> Compute:
    """The configured backend. `factory` names a class that is called with `threads=` and gives an ExpertBackend.

    Raises:
        UsageError: no such device or kernels, or the factory cannot be loaded; it names the key.
    """
    if config.factory:
        with _said_of("factory"):
            made = load_factory(config.factory)
        return Compute(lambda: made(threads=threads), config.factory, "factory", False)
    if config.kernel:
        with _said_of("kernel"):
            launch = launch_of(config.kernel)
        process = KernelProcess(launch, threads=threads)
        return Compute(process.experts, launch.name, launch.meaning, launch.is_cpu, process)
    if config.backend == "numpy":
        return Compute(lambda: NumpyExperts("float32"), "numpy-f32", "NumPy", False, NumpyRows(np.float32))
    with _said_of("device"):
        device = Device(config.device, threads=threads)
    info, rows = device.info, GgmlRows(device)
    return Compute(lambda: GgmlExperts(device), device.name, info.description, info.is_cpu, rows)
