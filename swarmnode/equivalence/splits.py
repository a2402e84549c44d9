"""One model whose experts two targets compute in turn: a trunk in llama.cpp, and every expert on each target.

The trunk's kernels are llama.cpp's own on either side, as they are in a swarm: what differs is what the experts'
backend makes of its rows, and what the trunk then makes of that.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from backends.add_model import build_manifest
from backends.expert_source import GGUFExpertSource
from backends.experts import ExpertBackend
from backends.gguf_file import GGUFFile
from backends.gguf_types import GGML_TYPES
from backends.learn import LearnedModel, make_trunk
from backends.llama import LlamaModel, LlamaSettings
from backends.manifest import FileHash, Manifest
from backends.moe_hook import Hook, ServingHook
from backends.trace import TracingHook
from capabilities.errors import UnsupportedModel
from scheduler.placement import LayerSpec, WorkerSpec, even_split
from swarmnode.equivalence.recipes import LENGTHS, Sizes
from swarmnode.equivalence.shared import Share, SharedExperts, share_of
from swarmnode.equivalence.targets import STAND_IN, Target, find_target
from swarmnode.local_experts import LocalExperts, load_experts

Progress = Callable[[str, int, int], None]

_WORKER: Final = "one"


@dataclass(frozen=True, eq=False)
class Split:
    """A model taken apart and loaded on both sides. Each side's executor computes every expert.

    shares: what of them a side's peer computes; None where a side is this machine alone.
    """

    whole: Path
    trunk: Path
    learned: LearnedModel
    manifest: Manifest
    executors: tuple[LocalExperts, LocalExperts]
    shares: tuple[Share | None, Share | None] = (None, None)

    def hooks(self) -> tuple[TracingHook, TracingHook]:
        """One for each side: it computes the experts there and keeps what passes."""
        layers = self.learned.layers.values()
        one, other = (TracingHook(layers, ServingHook(layers, executor)) for executor in self.executors)
        return one, other

    def plain_hooks(self) -> tuple[Hook, Hook]:
        """The same, keeping nothing."""
        one, other = (ServingHook(self.learned.layers.values(), executor) for executor in self.executors)
        return one, other

    def open_trunk(self, settings: LlamaSettings, hook: Hook) -> LlamaModel:
        return LlamaModel(self.trunk, settings, hook)

    def watching_hooks(self) -> tuple[TracingHook, TracingHook]:
        """Two that keep what passes through the undivided model."""
        layers = self.learned.layers.values()
        return TracingHook(layers), TracingHook(layers)

    def open_whole(self, settings: LlamaSettings, hook: Hook | None = None) -> LlamaModel:
        """llama.cpp on the undivided model, for its own noise floor."""
        return LlamaModel(self.whole, settings, hook)


@contextmanager
def split_model(file: Path, a: Target, b: Target, progress: Progress) -> Iterator[Split]:
    """Take a model apart for as long as the context lasts.

    Raises:
        BadModelFile, UnsupportedModel: it cannot be served, or a target cannot compute its experts.
    """
    with ExitStack() as stack:
        gguf = stack.enter_context(GGUFFile.open(file))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="swarmnode-equivalence-"))
        trunk = Path(folder) / "trunk.gguf"
        learned = make_trunk(gguf, trunk, lambda done, total: progress("writing the trunk", done, total))
        if not learned.layers:
            raise UnsupportedModel(f"{file.name} dispatches to no routed experts")
        manifest = build_manifest(gguf, learned, gguf.stem, FileHash(bytes(32), trunk.stat().st_size, ()), progress)
        specs = [LayerSpec(layer.layer, layer.n_expert, layer.expert_bytes) for layer in manifest.layers]
        placement = even_split(specs, [WorkerSpec(_WORKER, 1 << 62)], term=1, epoch=1)
        shares = [None if target.afar is None else share_of(target.afar, manifest) for target in (a, b)]
        source, loaded = GGUFExpertSource(gguf, manifest), dict[str, ExpertBackend]()

        def backend_of(target: Target) -> ExpertBackend:
            if target.name not in loaded:
                progress(f"loading the experts on {target.name}", 0, 1)
                backend = target.make()
                stack.callback(backend.close)
                load_experts(backend, manifest, placement.held_by(_WORKER), source)
                loaded[target.name] = backend
            return loaded[target.name]

        def executor_of(target: Target, other: Target, share: Share | None) -> LocalExperts:
            if share is None:
                return LocalExperts(manifest, placement, {_WORKER: backend_of(target)})
            rest = backend_of(other if other.afar is None else find_target(STAND_IN))
            return LocalExperts(manifest, placement, {_WORKER: SharedExperts(share, manifest, rest)})

        executors = executor_of(a, b, shares[0]), executor_of(b, a, shares[1])
        yield Split(file, trunk, learned, manifest, executors, (shares[0], shares[1]))


def sizes_of(file: Path) -> Sizes:
    """What the level op compares for a model: its weight types, and its sums' lengths beside the usual ones."""
    with GGUFFile.open(file) as gguf:
        matrices = [tensor for tensor in gguf.tensors.values() if len(tensor.shape) > 1]
    types = {GGML_TYPES[tensor.type].name for tensor in matrices}
    experts = {tensor.shape[0] for tensor in matrices if "_exps" in tensor.name}
    return Sizes(tuple(sorted(types)), tuple(sorted({*LENGTHS, *experts})))
