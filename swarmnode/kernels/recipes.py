"""What `swarmctl kernels build` builds: one recipe for each group of kernels.

The source is that of the pinned llama-cpp-python, and the flags are those of its wheel (bootstrap.py says why), except
that every backend becomes a library of its own. A result's name in the cache is made of the version and of all flags.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from backends.ggml import LLAMA_CPP_VERSIONS
from backends.variants import Group, of_group
from swarmnode.kernels.arm64 import EMULATOR

VERSION: Final = LLAMA_CPP_VERSIONS[0]
SHIM: Final = Path(__file__).with_name("vulkan_layer_settings.hpp")
SHIM_PLACE: Final = "{shim}"  # stands for the path, so that the result's name does not depend on it

COMMON_FLAGS: Final = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_BACKEND_DL=ON", "-DGGML_NATIVE=OFF",
    "-DGGML_LLAMAFILE=OFF", "-DGGML_OPENMP=OFF", "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON", "-DLLAMA_BUILD_COMMON=OFF",
    "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_TOOLS=OFF", "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_CURL=OFF",
)  # fmt: skip
_ARM64_FLAGS: Final = (
    "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
    "-DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc", "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """One configuration of the source and what is built in it.

    ggml's target `ggml` would build every variant of a configuration, also those that a compiler does not know: so the
    library that loads them comes from a configuration without any.
    """

    name: str
    flags: tuple[str, ...]
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Need:
    """Something that the machine must have.

    program: on PATH; or header: that the C++ compiler finds. packages: Debian's that bring it.
    """

    packages: str
    program: str = ""
    header: str = ""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one group is built. minutes: of two quiet processor cores, for the person who waits."""

    group: Group
    parts: tuple[Part, ...]
    needs: tuple[Need, ...]
    minutes: int

    @property
    def key(self) -> str:
        """The result's name in the cache: equal names mean interchangeable files."""
        text = repr((self.parts, SHIM.read_text() if self.group == "vulkan" else ""))
        return f"{self.group}-{VERSION}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _variants(group: Group) -> tuple[str, ...]:
    return tuple(variant.cmake_target for variant in of_group(group))


_LOADER_FLAGS: Final = (*COMMON_FLAGS, "-DGGML_CPU=OFF")
_KERNEL_FLAGS: Final = (*COMMON_FLAGS, "-DGGML_CPU_ALL_VARIANTS=ON")

RECIPES: Final[dict[Group, Recipe]] = {
    "x86-64": Recipe(
        "x86-64",
        (
            Part("loader", _LOADER_FLAGS, ("ggml",)),
            Part("kernels", _KERNEL_FLAGS, ("ggml-base", *_variants("x86-64"))),
        ),
        (),
        minutes=6,
    ),
    "arm64": Recipe(
        "arm64",
        (
            Part("loader", (*_LOADER_FLAGS, *_ARM64_FLAGS), ("ggml", "llama")),
            Part("kernels", (*_KERNEL_FLAGS, *_ARM64_FLAGS), ("ggml-base", *_variants("arm64"))),
        ),
        (
            Need("gcc-aarch64-linux-gnu", program="aarch64-linux-gnu-gcc"),
            Need("g++-aarch64-linux-gnu", program="aarch64-linux-gnu-g++"),
            Need("qemu-user-static", program=EMULATOR),
            Need("apt", program="apt-get"),
            Need("dpkg", program="dpkg"),
        ),
        minutes=6,
    ),
    "vulkan": Recipe(
        "vulkan",
        (Part("shaders", (*_LOADER_FLAGS, "-DGGML_VULKAN=ON", f"-DCMAKE_CXX_FLAGS=-include {SHIM_PLACE}"), ("ggml",)),),
        (
            Need("glslc", program="glslc"),
            Need("libvulkan-dev", header="vulkan/vulkan.hpp"),
            Need("spirv-headers", header="spirv/unified1/spirv.hpp"),
        ),
        minutes=6,
    ),
}
