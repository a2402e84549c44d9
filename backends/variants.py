"""Which kernels can be built beside the installed ones, by name, and what each needs.

ggml's source holds several implementations of every product, chosen when it is compiled. One build makes a library of
each for this machine's processor, others make ARM's (run under an emulator) and Vulkan's. A variant is named as ggml
names its library.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from capabilities.errors import UsageError

Group = Literal["x86-64", "arm64", "vulkan"]


@dataclass(frozen=True, slots=True)
class Variant:
    """One library of kernels.

    needs: the processor's features that it uses, as Linux names them in /proc/cpuinfo; of emulated ones, none.
    """

    name: str
    group: Group
    meaning: str
    needs: tuple[str, ...] = ()

    @property
    def is_cpu(self) -> bool:
        """Whether activations are rounded to 8 bits before products with quantised weights."""
        return self.group != "vulkan"

    @property
    def target(self) -> str:
        """Its name as an expert backend."""
        return f"ggml-cpu:{self.name}" if self.is_cpu else f"ggml-{self.name}"

    @property
    def cmake_target(self) -> str:
        return f"ggml-cpu-{self.name}" if self.is_cpu else f"ggml-{self.name}"

    @property
    def library(self) -> str:
        return f"lib{self.cmake_target}.so"

    def missing(self, cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
        """What this processor lacks; nothing where the system does not say what it has."""
        if self.group == "x86-64" and platform.machine() != "x86_64":
            return ("an x86-64 processor",)
        try:
            flags = next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")).split()
        except (OSError, StopIteration):
            return ()
        return tuple(need for need in self.needs if need not in flags)


_AVX: Final = ("sse4_2", "avx")
_AVX2: Final = (*_AVX, "f16c", "fma", "avx2", "bmi2")
_AVX512: Final = (*_AVX2, "avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw")

VARIANTS: Final = (
    Variant("x64", "x86-64", "no SIMD beyond what every x86-64 has"),
    Variant("sse42", "x86-64", "SSE4.2", ("sse4_2",)),
    Variant("sandybridge", "x86-64", "AVX", _AVX),
    Variant("piledriver", "x86-64", "AVX and FMA", (*_AVX, "f16c", "fma")),
    Variant("haswell", "x86-64", "AVX2 and FMA", _AVX2),
    Variant("skylakex", "x86-64", "AVX-512", _AVX512),
    Variant("icelake", "x86-64", "AVX-512 with VNNI", (*_AVX512, "avx512vbmi", "avx512_vnni")),
    Variant("zen4", "x86-64", "AVX-512 with VNNI and bfloat16", (*_AVX512, "avx512vbmi", "avx512_vnni", "avx512_bf16")),
    Variant("armv8.0_1", "arm64", "ARM64 of 2011: NEON"),
    Variant("armv8.2_1", "arm64", "ARM64 with dot products"),
    Variant("armv8.2_2", "arm64", "ARM64 with dot products and half-precision arithmetic"),
    Variant("vulkan", "vulkan", "a GPU's shaders, or Mesa's software driver where there is no GPU"),
)


def of_group(group: Group) -> tuple[Variant, ...]:
    return tuple(variant for variant in VARIANTS if variant.group == group)


def find_variant(name: str) -> Variant:
    """A variant by its name.

    Raises:
        UsageError: there is none, or this processor lacks something that it needs.
    """
    found = next((variant for variant in VARIANTS if variant.name == name), None)
    if found is None:
        names = ", ".join(variant.name for variant in VARIANTS)
        raise UsageError(f"there are no kernels called {name!r}", hint=f"Choose from: {names}.")
    if missing := found.missing():
        raise UsageError(
            f"this processor cannot run the kernels {name}: it lacks {', '.join(missing)}",
            hint="`swarmctl kernels list` shows which ones run here.",
        )
    return found
