"""ggml through ctypes, from the libraries that llama-cpp-python installs.

One table names every function that we call; struct layouts are checked at load against the library itself (sizes, and
values that the library's own functions write and read back), so that another build gives a `LibraryMismatch` and never
a crash. Buffers are reached only through ggml's backend interface: what works here on a CPU works on a GPU build.
"""

from __future__ import annotations

import ctypes as ct
import os
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from capabilities.errors import LibraryMismatch, UsageError

LLAMA_CPP_VERSIONS: Final = ("0.3.36",)
GGML_VERSIONS: Final = ("0.25.3",)

MAX_SRC: Final = 10
MAX_NAME: Final = 64
N_OP_PARAMS: Final = 16
_OBJECT_SIZE: Final = 32  # sizeof(struct ggml_object) on 64-bit machines: offs, size, next, type, padding

# From eight rows a matrix on, ggml 0.25's CPU kernels for K- and I-quants add in another order, unless this variable
# says 0 when the first product is computed. Without it a row's bits would depend on how many rows share its batch.
_WIDE_KERNELS: Final = "GGML_CPU_TILED_MM"

TYPE_F32: Final = 0
TYPE_F16: Final = 1
TYPE_Q8_0: Final = 8
TYPE_I32: Final = 26
PREC_F32: Final = 10
STATUS_SUCCESS: Final = 0
OP_NONE: Final = 0
DEVICE_CPU: Final = 0


class Tensor(ct.Structure):
    """`struct ggml_tensor` of ggml 0.25."""


Tensor._fields_ = [
    ("type", ct.c_int),
    ("buffer", ct.c_void_p),
    ("ne", ct.c_int64 * 4),
    ("nb", ct.c_size_t * 4),
    ("op", ct.c_int),
    ("op_params", ct.c_int32 * N_OP_PARAMS),
    ("flags", ct.c_int32),
    ("src", ct.c_void_p * MAX_SRC),
    ("view_src", ct.c_void_p),
    ("view_offs", ct.c_size_t),
    ("data", ct.c_void_p),
    ("name", ct.c_char * MAX_NAME),
    ("extra", ct.c_void_p),
    ("padding", ct.c_char * 8),
]


class InitParams(ct.Structure):
    """`struct ggml_init_params`."""

    _fields_ = (("mem_size", ct.c_size_t), ("mem_buffer", ct.c_void_p), ("no_alloc", ct.c_bool))


_P, _I, _I64, _SIZE, _F, _STR = ct.c_void_p, ct.c_int, ct.c_int64, ct.c_size_t, ct.c_float, ct.c_char_p

# Pointers are plain addresses (c_void_p): ctypes pointer objects cost more than the calls themselves.
_PROTOTYPES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "ggml_version": (_STR, ()),
    "ggml_tensor_overhead": (_SIZE, ()),
    "ggml_graph_overhead_custom": (_SIZE, (_SIZE, ct.c_bool)),
    "ggml_init": (_P, (InitParams,)),
    "ggml_free": (None, (_P,)),
    "ggml_type_size": (_SIZE, (_I,)),
    "ggml_blck_size": (_I64, (_I,)),
    "ggml_row_size": (_SIZE, (_I, _I64)),
    "ggml_quantize_chunk": (_SIZE, (_I, _P, _P, _I64, _I64, _I64, _P)),
    "dequantize_row_q8_0": (None, (_P, _P, _I64)),
    "ggml_type_name": (_STR, (_I,)),
    "ggml_nbytes": (_SIZE, (_P,)),
    "ggml_set_name": (_P, (_P, _STR)),
    "ggml_op_name": (_STR, (_I,)),
    "ggml_op_desc": (_STR, (_P,)),
    "ggml_unary_op_name": (_STR, (_I,)),
    "ggml_glu_op_name": (_STR, (_I,)),
    "ggml_new_tensor_1d": (_P, (_P, _I, _I64)),
    "ggml_new_tensor_2d": (_P, (_P, _I, _I64, _I64)),
    "ggml_new_tensor_3d": (_P, (_P, _I, _I64, _I64, _I64)),
    "ggml_view_3d": (_P, (_P, _P, _I64, _I64, _I64, _SIZE, _SIZE, _SIZE)),
    "ggml_reshape_2d": (_P, (_P, _P, _I64, _I64)),
    "ggml_reshape_3d": (_P, (_P, _P, _I64, _I64, _I64)),
    "ggml_repeat_4d": (_P, (_P, _P, _I64, _I64, _I64, _I64)),
    "ggml_get_rows": (_P, (_P, _P, _P)),
    "ggml_mul_mat": (_P, (_P, _P, _P)),
    "ggml_mul_mat_id": (_P, (_P, _P, _P, _P)),
    "ggml_prec_set_acc": (ct.c_bool, (_P, _I)),
    "ggml_prec_set_src": (ct.c_bool, (_P, _I, _I)),
    "ggml_add": (_P, (_P, _P, _P)),
    "ggml_add_id": (_P, (_P, _P, _P, _P)),
    "ggml_mul": (_P, (_P, _P, _P)),
    "ggml_sqr": (_P, (_P, _P)),
    "ggml_clamp": (_P, (_P, _P, _F, _F)),
    "ggml_soft_max": (_P, (_P, _P)),
    "ggml_rms_norm": (_P, (_P, _P, _F)),
    "ggml_scale_bias": (_P, (_P, _P, _F, _F)),
    "ggml_unary": (_P, (_P, _P, _I)),
    "ggml_glu": (_P, (_P, _P, _I, ct.c_bool)),
    "ggml_glu_split": (_P, (_P, _P, _P, _I)),
    "ggml_new_graph_custom": (_P, (_P, _SIZE, ct.c_bool)),
    "ggml_build_forward_expand": (None, (_P, _P)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, (_P, _P)),
    "ggml_log_set": (None, (_P, _P)),
    "ggml_time_us": (ct.c_int64, ()),
    "ggml_backend_buffer_free": (None, (_P,)),
    "ggml_backend_buffer_is_host": (ct.c_bool, (_P,)),
    "ggml_backend_buffer_get_size": (_SIZE, (_P,)),
    "ggml_backend_buffer_set_usage": (None, (_P, _I)),
    "ggml_backend_buft_is_host": (ct.c_bool, (_P,)),
    "ggml_backend_buft_name": (_STR, (_P,)),
    "ggml_backend_buft_alloc_buffer": (_P, (_P, _SIZE)),
    "ggml_backend_tensor_set": (None, (_P, _P, _SIZE, _SIZE)),
    "ggml_backend_tensor_get": (None, (_P, _P, _SIZE, _SIZE)),
    "ggml_backend_graph_compute": (_I, (_P, _P)),
    "ggml_backend_free": (None, (_P,)),
    "ggml_backend_dev_supports_op": (ct.c_bool, (_P, _P)),
    "ggml_backend_dev_buffer_type": (_P, (_P,)),
    "ggml_backend_dev_init": (_P, (_P, _STR)),
    "ggml_backend_dev_name": (_STR, (_P,)),
    "ggml_backend_dev_description": (_STR, (_P,)),
    "ggml_backend_dev_memory": (None, (_P, ct.POINTER(_SIZE), ct.POINTER(_SIZE))),
    "ggml_backend_dev_type": (_I, (_P,)),
    "ggml_backend_dev_backend_reg": (_P, (_P,)),
    "ggml_backend_reg_get_proc_address": (_P, (_P, _STR)),
    "ggml_backend_reg_name": (_STR, (_P,)),
    "ggml_backend_dev_count": (_SIZE, ()),
    "ggml_backend_dev_get": (_P, (_SIZE,)),
    "ggml_backend_load_all_from_path": (None, (_STR,)),
    "ggml_backend_load": (_P, (_STR,)),
}

_chosen: Path | None = None


def allow_wide_kernels() -> None:
    """Give up that part of batch invariance for speed. It is too late once the library is loaded: nothing happens."""
    if not library.cache_info().currsize:
        os.environ[_WIDE_KERNELS] = "1"


def choose_kernels(file: Path) -> None:
    """Let this process run the kernels of one backend library, with the ggml that was built with it and lies beside it.

    It is for processes that run nothing else: they never load the ggml of llama-cpp-python.
    """
    global _chosen  # noqa: PLW0603 (one process, one ggml)
    assert not library.cache_info().currsize
    _chosen = file


class Library:
    """The loaded functions as attributes (`lib.ggml_mul_mat_id(...)`), plus names of operators. Use `library()`."""

    def __init__(self) -> None:
        os.environ.setdefault(_WIDE_KERNELS, "0")
        self.folder = _chosen.parent if _chosen else _installed_folder()
        self._handles = _open_libraries(self.folder)
        for name, (result, arguments) in _PROTOTYPES.items():
            setattr(self, name, self._function(name, result, arguments))
        version = self.ggml_version().decode()
        if version not in GGML_VERSIONS:
            raise LibraryMismatch(f"ggml {version} is installed; this program knows {', '.join(GGML_VERSIONS)} only")
        _check_layout(self)
        self.unary_ops = _names(self.ggml_unary_op_name, self._count_unary())
        self.glu_ops = _names(self.ggml_glu_op_name, self._count_glu())
        self._load_dynamic_backends()
        self.op_names: dict[int, str] = {i: self.ggml_op_name(i).decode() for i in range(self._count_ops())}

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is not in the table of ggml functions (backends/ggml.py)")

    def _function(self, name: str, result: Any, arguments: tuple[Any, ...]) -> Any:
        for handle in self._handles:
            if hasattr(handle, name):
                # A function object of our own: llama_cpp sets its own prototypes on the shared ones.
                return ct.CFUNCTYPE(result, *arguments)((name, handle))
        raise LibraryMismatch(f"the installed ggml has no function {name}")

    # ggml's name functions index static arrays without a bound, so the ends are found from names that must come last.
    def _count_unary(self) -> int:
        return _index_of(self.ggml_unary_op_name, "TRUNC", 64) + 1

    def _count_glu(self) -> int:
        return _index_of(self.ggml_glu_op_name, "SWIGLU_CLAMP", 32) + 1

    def _count_ops(self) -> int:
        return _index_of(self.ggml_op_name, "GLU", 160) + 1

    def _load_dynamic_backends(self) -> None:
        """Builds with GGML_BACKEND_DL keep their kernels in separate files: load them where none is built in."""
        if _chosen:
            if not self.ggml_backend_load(os.fsencode(_chosen)):
                raise UsageError(f"the kernels of {_chosen.name} do not run on this processor, or lack a library")
            if self.ggml_backend_dev_count() == 0:
                raise UsageError(f"{_chosen.name} finds no device here that it could compute on")
            return
        if self.ggml_backend_dev_count() == 0:
            for folder in (self.folder, self.folder.parent.parent / "bin"):
                if folder.is_dir():
                    self.ggml_backend_load_all_from_path(os.fsencode(folder))
        if self.ggml_backend_dev_count() == 0:
            raise LibraryMismatch("the installed ggml has no backend, not even a CPU one")


def _installed_folder() -> Path:
    """Where llama-cpp-python has its libraries. LibraryMismatch if its version is not known."""
    import llama_cpp

    if llama_cpp.__version__ not in LLAMA_CPP_VERSIONS:
        raise LibraryMismatch(
            f"llama-cpp-python {llama_cpp.__version__} is installed; this program knows the memory layout of "
            f"{', '.join(LLAMA_CPP_VERSIONS)} only"
        )
    return Path(llama_cpp.__file__).parent / "lib"


def _open_libraries(folder: Path) -> list[ct.CDLL]:
    handles = []
    for stem in ("libggml-base", "libggml"):
        found = [p for s in (".so.0", ".so", ".dylib", ".dll") if (p := folder / f"{stem}{s}").exists()]
        if not found:
            raise LibraryMismatch(f"{folder} has no {stem}: llama-cpp-python is not completely installed")
        handles.append(ct.CDLL(str(found[0])))
    return handles


def _index_of(name_of: Any, last: str, limit: int) -> int:
    for i in range(limit):
        value = name_of(i)
        if value is not None and value.decode() == last:
            return i
    raise LibraryMismatch(f"the installed ggml has no operator {last}")


def _names(name_of: Any, count: int) -> dict[str, int]:
    return {name_of(i).decode(): i for i in range(count)}


def _check_layout(lib: Library) -> None:
    """Compare `Tensor` with what the library's own functions write. Any difference is a LibraryMismatch."""
    size = lib.ggml_tensor_overhead() - _OBJECT_SIZE
    if size != ct.sizeof(Tensor):
        raise LibraryMismatch(f"ggml's tensor has {size} bytes here, {ct.sizeof(Tensor)} were expected")
    ctx = lib.ggml_init(InitParams(1 << 20, None, True))
    if not ctx:
        raise LibraryMismatch("ggml_init failed")
    try:
        a = lib.ggml_set_name(lib.ggml_new_tensor_3d(ctx, TYPE_F32, 6, 4, 3), b"layout")
        ids = lib.ggml_new_tensor_2d(ctx, TYPE_I32, 2, 3)
        weights = lib.ggml_new_tensor_3d(ctx, TYPE_F16, 6, 5, 7)
        x = lib.ggml_new_tensor_3d(ctx, TYPE_F32, 6, 1, 3)
        product = lib.ggml_mul_mat_id(ctx, weights, x, ids)
        lib.ggml_prec_set_acc(product, PREC_F32)
        view = lib.ggml_view_3d(ctx, a, 3, 4, 3, 24, 96, 12)
        clamped = lib.ggml_clamp(ctx, a, -1.5, 2.5)
        t, v, p, c = tensor_at(a), tensor_at(view), tensor_at(product), tensor_at(clamped)
        floats = np.array(list(c.op_params[:2]), np.int32).view(np.float32)
        facts = {
            "name": t.name == b"layout",
            "ne": list(t.ne) == [6, 4, 3, 1] and list(p.ne) == [5, 2, 3, 1],
            "nb": list(t.nb) == [4, 24, 96, 288],
            "type": t.type == TYPE_F32 and tensor_at(ids).type == TYPE_I32 and tensor_at(weights).type == TYPE_F16,
            "op": lib.ggml_op_name(p.op) == b"MUL_MAT_ID" and t.op == OP_NONE and lib.ggml_op_name(OP_NONE) == b"NONE",
            "src": list(p.src[:4]) == [weights, x, ids, None],
            "view": v.view_src == a and v.view_offs == 12,
            "op_params": p.op_params[0] == PREC_F32 and floats.tolist() == [-1.5, 2.5],
            "data": t.data is None and t.buffer is None,
        }
    finally:
        lib.ggml_free(ctx)
    if wrong := [name for name, fine in facts.items() if not fine]:
        raise LibraryMismatch(f"ggml's tensor has another layout here: {', '.join(wrong)}")


@cache
def library() -> Library:
    """The one Library of this process.

    Raises:
        LibraryMismatch: the installed llama-cpp-python is not one whose memory layout is known.
    """
    return Library()


def be_silent() -> None:
    """Let ggml write no log, in a process that nobody listens to.

    It has a line for each weight that it lays out for its kernels, which llama-cpp-python takes to Python and prints. A
    function of ggml's own that looks at none of its arguments costs nothing.
    """
    lib = library()
    lib.ggml_log_set(ct.cast(lib.ggml_time_us, ct.c_void_p).value, None)


@cache
def cpu_library() -> ct.CDLL | None:
    """The CPU backend's own library where it is linked in, else None (a build with dynamic backends)."""
    found = [p for s in (".so.0", ".so", ".dylib") if (p := library().folder / f"libggml-cpu{s}").exists()]
    return ct.CDLL(str(found[0])) if found else None


def tensor_at(address: int) -> Tensor:
    """The tensor at an address, as a structure that aliases ggml's memory."""
    return Tensor.from_address(address)


def read_tensor(lib: Library, address: int, dtype: type[np.generic]) -> NDArray[Any]:
    """A copy of a tensor of 4-byte elements as [ne3, ne2, ne1, ne0], wherever its memory is."""
    t = tensor_at(address)
    ne, nb = list(t.ne), list(t.nb)
    if any(n == 0 for n in ne):
        return np.empty(ne[::-1], dtype)
    nbytes = sum(b * (n - 1) for n, b in zip(ne, nb, strict=True)) + nb[0]
    if nbytes == 4 * ne[0] * ne[1] * ne[2] * ne[3] and lib.ggml_backend_buffer_is_host(t.buffer):
        out = np.empty(ne[::-1], dtype)
        ct.memmove(out.ctypes.data, t.data, nbytes)
        return out
    if lib.ggml_backend_buffer_is_host(t.buffer):
        raw: Any = (ct.c_char * nbytes).from_address(t.data)
    else:
        raw = ct.create_string_buffer(nbytes)
        lib.ggml_backend_tensor_get(address, raw, 0, nbytes)
    return np.ndarray(ne[::-1], dtype, raw, strides=nb[::-1]).copy()


def write_tensor(lib: Library, address: int, values: NDArray[Any]) -> None:
    """Overwrite a whole contiguous tensor. `values` must be C-contiguous and have its bytes exactly."""
    expected = lib.ggml_nbytes(address)
    if values.nbytes != expected or not values.flags.c_contiguous:
        raise ValueError(f"{values.nbytes} bytes for a tensor of {expected}")
    lib.ggml_backend_tensor_set(address, values.ctypes.data, 0, expected)
