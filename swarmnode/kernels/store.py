"""Where built kernels are kept, and how the process that runs one is started."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import backends
from backends.variant_process import Launch
from backends.variants import VARIANTS, Group, Variant, find_variant
from capabilities.errors import UsageError
from swarmnode.kernels.arm64 import EMULATOR
from swarmnode.kernels.recipes import RECIPES
from swarmnode.paths import shared_cache_folder

# An emulated processor takes ten to forty times as long, and its first imports half a minute on a busy machine.
EMULATED_START_S: Final = 300.0
EMULATED_CALL_S: Final = 600.0
SOFTWARE_DRIVER_CALL_S: Final = 300.0  # shaders are compiled at their first use, on the processor

_CHILD: Final = ("-m", "backends.variant_child")


class KernelTarget(NamedTuple):
    """Kernels as `swarmctl equivalence` names them. ask_f32: every product asks to be added in F32."""

    variant: str
    ask_f32: bool


def kernels_called(target: str) -> KernelTarget | None:
    """What a target's name means: ggml-cpu:NAME, ggml-vulkan, ggml-vulkan:f32. None if it is none of these."""
    for variant in VARIANTS:
        if target == variant.target:
            return KernelTarget(variant.name, ask_f32=False)
        if target == f"{variant.target}:f32" and not variant.is_cpu:  # a CPU's sums are in single precision anyway
            return KernelTarget(variant.name, ask_f32=True)
    return None


def kernels_folder() -> Path:
    return shared_cache_folder() / "kernels"


def group_folder(group: Group) -> Path:
    return kernels_folder() / RECIPES[group].key


def libraries_folder(group: Group) -> Path:
    """ARM64's libraries are where its llama_cpp looks for them."""
    return group_folder(group) / ("site/llama_cpp/lib" if group == "arm64" else "lib")


def is_built(variant: Variant) -> bool:
    return (libraries_folder(variant.group) / variant.library).is_file()


def launch_of(name: str) -> Launch:
    """How to start the process of a variant.

    Raises:
        UsageError: there is none of that name, it is not built, or it cannot run here.
    """
    variant = find_variant(name)
    if not is_built(variant):
        option = "" if variant.group == "x86-64" else f" --{variant.group}"
        raise UsageError(
            f"the kernels {name} are not built on this machine", hint=f"`swarmctl kernels build{option}` builds them."
        )
    file, name, meaning = libraries_folder(variant.group) / variant.library, variant.target, variant.meaning
    if variant.group == "arm64":
        command, environ = (*emulated_python(), *_CHILD), emulated_environ()
        return Launch(name, meaning, command, file, True, environ, EMULATED_START_S, EMULATED_CALL_S)
    command = (sys.executable, *_CHILD)
    environ = {"PYTHONPATH": os.pathsep.join(filter(None, (_code(), os.environ.get("PYTHONPATH", ""))))}
    if variant.is_cpu:
        return Launch(name, meaning, command, file, True, environ)
    environ |= {} if has_gpu() else _SOFTWARE_DRIVER
    return Launch(name, meaning, command, file, False, environ, call_s=SOFTWARE_DRIVER_CALL_S)


def _code() -> str:
    """The folder that our packages are in."""
    return str(Path(backends.__file__).parent.parent)


# ggml passes over devices that are processors unless they are named, and llvmpipe would take every core.
_SOFTWARE_DRIVER: Final = {"GGML_VK_VISIBLE_DEVICES": "0", "LP_NUM_THREADS": "1"}


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Whether the system has a node of a GPU that renders."""
    return any(devices.glob("dri/renderD*")) or any(devices.glob("nvidia[0-9]*"))


def emulated_python() -> tuple[str, ...]:
    """The command of ARM64's Python; it starts itself again as its `sys.executable`.

    Raises:
        UsageError: it is not built, or the emulator is not installed.
    """
    if shutil.which(EMULATOR) is None:
        raise UsageError(f"{EMULATOR} is not installed", hint="`sudo apt install qemu-user-static` (Debian, Ubuntu).")
    python = group_folder("arm64") / "bin" / "python"
    if not python.is_file():
        raise UsageError("there is no ARM64 Python here", hint="`swarmctl kernels build --arm64` makes one.")
    return (str(python),)


def emulated_environ() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join((str(group_folder("arm64") / "site"), _code()))}


def listing() -> list[dict[str, Any]]:
    """Every variant, as `swarmctl kernels list --json` prints it."""
    return [
        {
            "name": variant.name,
            "target": variant.target,
            "group": variant.group,
            "meaning": variant.meaning,
            "built": is_built(variant),
            "missing": list(variant.missing()),
        }
        for variant in VARIANTS
    ]
