"""Measurements kept between starts: seconds saved, as long as nothing that computes has changed.

A measurement is found again under everything that its numbers rest on: ggml's version and the bytes of its libraries,
the environment variables that choose kernels, the device, the processor, its driver as far as the system tells, the
threads, and what was measured. Drivers that the system does not tell of may still change, so none is kept for long.
A file that cannot be read is no error: it is measured again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from backends import class_inputs
from backends.atomic_file import replacing
from backends.device import Device
from backends.ggml import library
from backends.measure import DEADLINE_S, Progress, Request, measure_device, usable_memory
from capabilities import measurement
from capabilities.errors import PeerMistake
from capabilities.measurement import BackendMeasurement

AGE_S_MAX: Final = 7 * 24 * 3600
FILES_MAX: Final = 16  # devices times models that a machine goes back and forth between
FILE_BYTES_MAX: Final = 256 << 10  # 28 weight types take 12 KiB
# Variables of ggml, of the drivers and BLAS libraries below it, and of an emulated processor.
_FLAGS: Final = (
    "GGML_", "QEMU_", "VK_", "CUDA_", "HIP_", "ROCR_", "HSA_", "MESA_", "LP_", "GALLIUM_", "SYCL_", "ONEAPI_",
)  # fmt: skip
_DRIVERS: Final = ("nvidia", "amdgpu", "i915", "xe", "v3d", "panfrost")
_CPU_FACTS: Final = ("model name", "flags", "CPU implementer", "CPU part", "CPU revision", "Features", "microcode")


def cached_measurement(
    folder: Path,
    device: Device,
    request: Request,
    *,
    threads: int = 1,
    deadline_s: float = DEADLINE_S,
    progress: Progress | None = None,
    anew: bool = False,
) -> BackendMeasurement:
    """What `measure_device` says, from `folder` if nothing has changed since. Memory is always looked up anew.

    Args:
        threads: those that the device was started with; rates depend on them.
        anew: measure, whatever is kept.

    Raises:
        SwarmError: the device failed.
    """
    key = measurement_key(device, request, threads)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    path = folder / f"measurement-{digest}.json"
    found = None if anew else _read(path, key)
    if found is not None:
        return replace(found, memory_bytes=usable_memory(device))
    measured = measure_device(device, request, deadline_s=deadline_s, progress=progress)
    if measured.complete:
        _write(path, key, measured)
    return measured


def measurement_key(device: Device, request: Request, threads: int) -> dict[str, Any]:
    """Everything that a measurement rests on, ready for JSON."""
    info = device.info
    return {
        "versions": [class_inputs.VERSION, measurement.FORMAT_VERSION],
        "ggml": library().ggml_version().decode(),
        "libraries": _libraries(),
        "flags": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_FLAGS)},
        "device": [info.name, info.description, info.backend, info.total_bytes],
        "driver": _driver(),
        "threads": threads,
        "kinds": list(request.kinds),
        "widths": [request.n_in, request.n_ff],
        "units": [[unit.op, unit.name, list(unit.params)] for unit in request.units],
        "declared": [request.accumulation.value, request.source.value],
    }


@cache
def _libraries() -> dict[str, str]:
    """SHA-256 of ggml's libraries by name: those beside llama-cpp-python, and backends that load at run time."""
    folder = library().folder
    files = {
        path.resolve()
        for place in (folder, folder.parent.parent / "bin")
        for path in place.glob("*ggml*")
        if path.suffix != ".a"
    }
    return {path.name: _sha256(path) for path in sorted(files) if path.is_file()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _driver() -> list[str]:
    """The system and processor, and versions of kernel modules and Vulkan drivers, where there are such files."""
    facts = [platform.platform(), platform.machine()]
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
        facts += [line for line in lines if line.startswith(_CPU_FACTS)]
    except OSError:
        facts.append(platform.processor())
    for name in _DRIVERS:
        version = Path("/sys/module", name, "version")
        if version.is_file():
            facts.append(f"{name} {version.read_text().strip()}")
    for description in sorted(Path("/usr/share/vulkan/icd.d").glob("*.json")):
        facts.append(f"{description.name} {description.stat().st_mtime_ns}")
    return facts


def _read(path: Path, key: dict[str, Any]) -> BackendMeasurement | None:
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            return None
        stored = json.loads(path.read_bytes())
        age_s = time.time() - stored["at"]
        if stored["key"] != key or not 0 <= age_s <= AGE_S_MAX:
            return None
        return BackendMeasurement.from_json(stored["measurement"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, PeerMistake):
        return None


def _write(path: Path, key: dict[str, Any], measured: BackendMeasurement) -> None:
    """A folder that cannot be written to costs time at the next start, no more."""
    stored = {"at": time.time(), "key": key, "measurement": measured.to_json()}
    try:
        with replacing(path) as partial:
            partial.write_text(json.dumps(stored))
        files = sorted(path.parent.glob("measurement-*.json"), key=lambda file: file.stat().st_mtime)
        for old in files[:-FILES_MAX]:
            old.unlink(missing_ok=True)
    except OSError:
        return
