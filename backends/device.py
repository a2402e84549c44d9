"""One compute device of this machine, as ggml sees it: a CPU, or a GPU where llama-cpp-python was built for one."""

from __future__ import annotations

import ctypes as ct
from dataclasses import dataclass
from typing import Final

from backends.ggml import DEVICE_CPU, TYPE_F32, TYPE_I32, InitParams, Library, library, tensor_at
from capabilities.errors import Internal, UsageError

_THREADS_MAX: Final = 512  # GGML_MAX_N_THREADS
# The polling level of idle worker threads, 0 to 100. Low: a volunteer's machine has other things to do, and spinning
# threads of several daemons on the same cores cost far more than waking up does.
_POLL: Final = 0


class _ThreadpoolParams(ct.Structure):
    """`struct ggml_threadpool_params`."""

    _fields_ = (
        ("cpumask", ct.c_bool * _THREADS_MAX),
        ("n_threads", ct.c_int),
        ("prio", ct.c_int),
        ("poll", ct.c_uint32),
        ("strict_cpu", ct.c_bool),
        ("paused", ct.c_bool),
    )


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What ggml says of a device: name ("CPU", "CUDA0", "Vulkan0"), description, backend, memory in bytes."""

    name: str
    description: str
    backend: str
    is_cpu: bool
    free_bytes: int
    total_bytes: int


def list_devices() -> tuple[DeviceInfo, ...]:
    """Every device that the installed llama-cpp-python was built for and finds here, in ggml's order."""
    lib = library()
    return tuple(_info(lib, lib.ggml_backend_dev_get(i)) for i in range(lib.ggml_backend_dev_count()))


def _info(lib: Library, handle: int) -> DeviceInfo:
    free, total = ct.c_size_t(), ct.c_size_t()
    lib.ggml_backend_dev_memory(handle, ct.byref(free), ct.byref(total))
    return DeviceInfo(
        name=lib.ggml_backend_dev_name(handle).decode(),
        description=lib.ggml_backend_dev_description(handle).decode(),
        backend=lib.ggml_backend_reg_name(lib.ggml_backend_dev_backend_reg(handle)).decode(),
        is_cpu=lib.ggml_backend_dev_type(handle) == DEVICE_CPU,
        free_bytes=free.value,
        total_bytes=total.value,
    )


class Device:
    """An initialised backend of one device.

    Args:
        name: ggml's name of the device; "" takes the first GPU, or the CPU where there is none.
        threads: CPU threads of its kernels; ignored by GPUs.

    Raises:
        UsageError: no such device.
    """

    def __init__(self, name: str = "", *, threads: int = 1) -> None:
        lib = library()
        infos = list_devices()
        wanted = name or next((i.name for i in infos if not i.is_cpu), infos[0].name)
        index = next((n for n, i in enumerate(infos) if i.name.lower() == wanted.lower()), None)
        if index is None:
            raise UsageError(
                f"there is no device {wanted!r} here", hint=f"Choose one of: {', '.join(i.name for i in infos)}."
            )
        self.info = infos[index]
        self.name = f"ggml-{self.info.name.lower()}"
        self.handle: int = lib.ggml_backend_dev_get(index)
        self.buffer_type: int = lib.ggml_backend_dev_buffer_type(self.handle)
        self.backend: int = lib.ggml_backend_dev_init(self.handle, None)
        if not self.backend:
            raise Internal(f"ggml could not start the device {self.info.name}")
        self._registry: int = lib.ggml_backend_dev_backend_reg(self.handle)
        self.extra_buffer_types = self._extra_buffer_types() if self.info.is_cpu else ()
        if self.info.is_cpu:
            self._set_threads(max(1, min(threads, _THREADS_MAX)))

    def _procedure(self, name: str) -> int:
        return int(library().ggml_backend_reg_get_proc_address(self._registry, name.encode()) or 0)

    def _set_threads(self, threads: int) -> None:
        if address := self._procedure("ggml_backend_set_n_threads"):
            ct.CFUNCTYPE(None, ct.c_void_p, ct.c_int)(address)(self.backend, threads)
        attach = self._procedure("ggml_backend_cpu_set_threadpool")
        if attach and (pool := self.new_threadpool(threads)):
            ct.CFUNCTYPE(None, ct.c_void_p, ct.c_void_p)(attach)(self.backend, pool)

    def new_threadpool(self, threads: int) -> int:
        """A pool of CPU threads that lasts as long as the process, 0 where there is none.

        Without one, every graph that is computed would create its threads and end them.
        """
        new = self._procedure("ggml_threadpool_new")
        if not new:
            return 0
        params = _ThreadpoolParams(n_threads=threads, poll=_POLL)
        return int(ct.CFUNCTYPE(ct.c_void_p, ct.POINTER(_ThreadpoolParams))(new)(ct.byref(params)) or 0)

    def _extra_buffer_types(self) -> tuple[int, ...]:
        """Buffer types that llama.cpp tries before the ordinary one, such as the CPU's repacked layout."""
        address = self._procedure("ggml_backend_dev_get_extra_bufts")
        if not address:
            return ()
        types = ct.CFUNCTYPE(ct.POINTER(ct.c_void_p), ct.c_void_p)(address)(self.handle)
        found: list[int] = []
        while types and types[len(found)]:
            found.append(int(types[len(found)]))
        return tuple(found)

    def repack_type(self, kind: int, shape: tuple[int, ...]) -> int:
        """The buffer type that llama.cpp would repack a weight into, 0 if none.

        `shape` is in ggml order: of two dimensions for a dense weight, of three for stacked experts.
        """
        lib = library()
        for buffer_type in self.extra_buffer_types:
            context = lib.ggml_init(InitParams(8 * lib.ggml_tensor_overhead(), None, True))
            if len(shape) == 3:
                weight = lib.ggml_new_tensor_3d(context, kind, *shape)
                x = lib.ggml_new_tensor_3d(context, TYPE_F32, shape[0], 1, 1)
                ids = lib.ggml_new_tensor_2d(context, TYPE_I32, 1, 1)
                product = lib.ggml_mul_mat_id(context, weight, x, ids)
            else:
                weight = lib.ggml_new_tensor_2d(context, kind, *shape)
                product = lib.ggml_mul_mat(context, weight, lib.ggml_new_tensor_2d(context, TYPE_F32, shape[0], 1))
            # ggml looks at the weight's buffer: one of no size will do, as in llama.cpp's own loader.
            buffer = tensor_at(weight).buffer = lib.ggml_backend_buft_alloc_buffer(buffer_type, 0)
            supported = lib.ggml_backend_dev_supports_op(self.handle, product)
            lib.ggml_backend_buffer_free(buffer)
            lib.ggml_free(context)
            if supported:
                return buffer_type
        return 0
