"""llama.cpp on one GGUF: a whole model, or a trunk whose experts a hook computes elsewhere.

By default the context is batch-invariant, so that a token's bits do not depend on the batch that it was computed in:
flash attention off, a KV cache of its own for each sequence, and weights repacked only where that keeps the bits
(weight_layout.py); together with a build without llamafile's kernels and the choice of kernels in ggml.py. `fast` gives
up the first three (docs/architecture.md).
"""

from __future__ import annotations

import ctypes as ct
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
from llama_cpp import llama_cpp as lc
from numpy.typing import NDArray

from backends.device import Device, list_devices
from backends.ggml import library
from backends.moe_hook import Hook
from backends.vocabulary import Vocabulary
from backends.weight_layout import WeightLayout, choose_layout
from capabilities.errors import BadModelFile, Internal

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

_FLASH_OFF, _FLASH_AUTO = 0, -1
_EXPERT_PATTERN: Final = rb"_exps\."
_FUNCTION_NAMES: Final = re.compile(r"^(?:\w+: )+")  # "llama_model_load: check_tensor_dims: tensor ..."
_NO_MEMORY_SLOT: Final = 1  # llama_decode: no slot in the KV cache for this batch


@dataclass(frozen=True, slots=True)
class LlamaSettings:
    """How a model is run. Tokens are per sequence for `context_tokens`, per call for `batch_tokens`."""

    context_tokens: int = 4096
    sequences: int = 1
    batch_tokens: int = 512
    threads: int = 1
    fast: bool = False
    repack: bool = True
    gpu_layers: int = -1  # -1: all that a GPU build offers; a CPU build has none


class _BufferTypeOverride(ct.Structure):
    """`struct llama_model_tensor_buft_override`."""

    _fields_ = (("pattern", ct.c_char_p), ("buft", ct.c_void_p))


@lc.llama_log_callback  # type: ignore[untyped-decorator]
def _collect_log(level: int, text: bytes, _user: int) -> None:
    if level >= _LOG_ERROR:
        _last_errors.append(text.decode(errors="replace").strip())
        del _last_errors[:-_ERRORS_KEPT]


_LOG_ERROR: Final = 4
_ERRORS_KEPT: Final = 8
_last_errors: list[str] = []


@cache
def _threadpool(device: str, threads: int) -> int:
    return Device(device, threads=threads).new_threadpool(threads)


def start_library() -> None:
    """Before the first model or kernel: ggml's own words then go where errors are taken from, not to the terminal."""
    library()  # checks the version, and chooses batch-invariant kernels before any runs
    lc.llama_log_set(_collect_log, ct.c_void_p(0))
    lc.llama_backend_init()


class LlamaModel:
    """A loaded model and its context. Not thread-safe: one thread at a time may call it.

    A model opened with a hook may be given another one between two decodes.

    Raises:
        BadModelFile: llama.cpp refuses the file; the message carries its reason.
    """

    def __init__(self, path: Path, settings: LlamaSettings, hook: Hook | None = None) -> None:
        start_library()
        _last_errors.clear()
        self.settings = settings
        self.hook = hook
        self._context: Any = None
        self._model = self._load(path)
        try:
            self._context = self._open_context()
            if not self._context:
                raise BadModelFile(f"llama.cpp makes no context for {path.name}{_reason()}", path=str(path))
        except BaseException:
            lc.llama_model_free(self._model)
            raise
        self._attach_threadpool()
        self.vocabulary = Vocabulary(self._model)
        self._memory = lc.llama_get_memory(self._context)
        self._batch = lc.llama_batch_init(settings.batch_tokens, 0, 1)
        self._views = self._batch_views()

    def _load(self, path: Path) -> Any:
        params = lc.llama_model_default_params()
        params.n_gpu_layers = self.settings.gpu_layers
        layout = WeightLayout(may_repack=False)
        if self.settings.repack:
            layout = choose_layout(path, _cpu(), batch_invariant=not self.settings.fast)
        overrides = list(layout.overrides)
        if self.hook is not None and any(not d.is_cpu for d in list_devices()):
            # Experts of width 1 miss every fast GPU kernel; on the CPU their inputs arrive in memory that we can read.
            overrides.append((_EXPERT_PATTERN, _cpu().buffer_type))
        params.use_extra_bufts = layout.may_repack
        if overrides:
            slots = [_BufferTypeOverride(*override) for override in overrides]
            array = (_BufferTypeOverride * (len(slots) + 1))(*slots)  # an empty one ends it
            params.tensor_buft_overrides = ct.addressof(array)
        model = lc.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise BadModelFile(f"llama.cpp refuses {path.name}{_reason()}", path=str(path))
        return model

    def _open_context(self) -> Any:
        s = self.settings
        params = lc.llama_context_default_params()
        params.n_ctx = s.context_tokens * s.sequences
        params.n_batch = params.n_ubatch = s.batch_tokens
        params.n_seq_max = s.sequences
        params.n_threads = params.n_threads_batch = s.threads
        params.flash_attn_type = _FLASH_AUTO if s.fast else _FLASH_OFF
        params.kv_unified = s.fast
        params.op_offload = False
        params.no_perf = True
        if self.hook is not None:
            self._callback = lc.ggml_backend_sched_eval_callback(self._on_node)
            params.cb_eval = self._callback
        return lc.llama_init_from_model(self._model, params)

    def _attach_threadpool(self) -> None:
        """Threads that stay: each part of a graph between two stops of the hook would start its own otherwise."""
        cpu = next((d.name for d in list_devices() if d.is_cpu), None)
        if self.settings.threads > 1 and cpu is not None and (pool := _threadpool(cpu, self.settings.threads)):
            attach = ct.CFUNCTYPE(None, ct.c_void_p, ct.c_void_p, ct.c_void_p)(("llama_attach_threadpool", lc._lib))
            attach(self._context, pool, pool)

    def _on_node(self, node: int, ask: bool, user_data: int) -> bool:
        return self.hook is not None and self.hook.callback(node, ask)

    def _batch_views(self) -> tuple[NDArray[Any], ...]:
        n, b = self.settings.batch_tokens, self._batch
        as_array = np.ctypeslib.as_array
        self._sequence_ids = np.zeros(n, np.int32)
        for i in range(n):
            b.n_seq_id[i] = 1
        return as_array(b.token, (n,)), as_array(b.pos, (n,)), as_array(b.logits, (n,))

    @property
    def context_tokens(self) -> int:
        """Tokens that one sequence may hold."""
        return int(lc.llama_n_ctx_seq(self._context))

    @property
    def trained_context_tokens(self) -> int:
        return int(lc.llama_model_n_ctx_train(self._model))

    @property
    def n_layers(self) -> int:
        return int(lc.llama_model_n_layer(self._model))

    @property
    def is_recurrent(self) -> bool:
        """Whether sequences carry a state that cannot be cut back to an earlier position."""
        return bool(lc.llama_model_is_recurrent(self._model) or lc.llama_model_is_hybrid(self._model))

    @property
    def has_encoder(self) -> bool:
        return bool(lc.llama_model_has_encoder(self._model))

    @property
    def has_decoder(self) -> bool:
        return bool(lc.llama_model_has_decoder(self._model))

    def decode(self, tokens: I32, positions: I32, sequences: I32, wants_logits: NDArray[np.bool_]) -> F32:
        """Run one batch of at most `batch_tokens` rows; logits [number of True, n_vocab] F32, in row order.

        After any exception the sequences of this batch hold undefined state: clear them.

        Raises:
            SwarmError: whatever the executor raised at a MoE layer.
            Internal: llama.cpp failed.
        """
        n = len(tokens)
        if not 0 < n <= self.settings.batch_tokens:
            raise ValueError(f"a batch of {n} rows; at most {self.settings.batch_tokens}")
        token, position, logits = self._views
        token[:n], position[:n], logits[:n] = tokens, positions, wants_logits
        for i in range(n):
            self._batch.seq_id[i][0] = int(sequences[i])
        self._batch.n_tokens = n
        if self.hook is not None:
            self.hook.begin()
        status = lc.llama_decode(self._context, self._batch)
        if self.hook is not None and self.hook.error is not None:
            raise self.hook.error
        if status != 0:
            detail = "no room in the context" if status == _NO_MEMORY_SLOT else f"status {status}"
            raise Internal(f"llama.cpp could not decode a batch of {n} tokens: {detail}{_reason()}")
        wanted = np.flatnonzero(wants_logits)
        out = np.empty((len(wanted), self.vocabulary.n_vocab), np.float32)
        for row, index in zip(out, wanted, strict=True):
            source = lc.llama_get_logits_ith(self._context, int(index))
            if not source:
                raise Internal("llama.cpp returned no logits")
            ct.memmove(row.ctypes.data, source, row.nbytes)
        return out

    def clear(self, sequence: int) -> None:
        """Forget one sequence."""
        lc.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def cut(self, sequence: int, position: int) -> None:
        """Forget a sequence from `position` on.

        Raises:
            Internal: this model's sequences cannot be cut (`is_recurrent`).
        """
        if not lc.llama_memory_seq_rm(self._memory, sequence, position, -1):
            raise Internal(f"sequence {sequence} cannot be cut at position {position}")

    def clear_all(self) -> None:
        lc.llama_memory_clear(self._memory, True)

    def close(self) -> None:
        if self._model:
            lc.llama_batch_free(self._batch)
            lc.llama_free(self._context)
            lc.llama_model_free(self._model)
            self._model = None

    def __enter__(self) -> LlamaModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@cache
def _cpu() -> Device:
    return Device(next(d.name for d in list_devices() if d.is_cpu))


def _reason() -> str:
    """llama.cpp's own last words, which say what is wrong far better than a status."""
    words = next((w for w in _last_errors if "error" in w.lower() or ":" in w), "")
    words = _FUNCTION_NAMES.sub("", words.rpartition("error loading model: ")[2])
    return f": {' '.join(words.split())}" if words else ""
