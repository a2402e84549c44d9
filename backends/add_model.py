"""Takes a model into a swarm: trunk, captured programs, and a manifest with every expert's hash.

Run as a child process (`python -m backends.add_model FILE FOLDER NAME`, see child.py), since llama.cpp loads the file's
trunk here for the first time. The source stays where it is; FOLDER gets `trunk.gguf`, `manifest.msgpack` and
`source.json`, written whole: under another name first, then renamed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from backends.atomic_file import process_lives, sync_folder
from backends.child import Report, run_child
from backends.expert_source import build_layers, hash_file
from backends.gguf_file import GGUFFile
from backends.learn import LearnedModel, make_trunk
from backends.manifest import CapturedLayer, FileHash, Manifest
from backends.moe_hook import LearnedLayer
from capabilities.errors import BadModelFile, UnsupportedModel

TRUNK: Final = "trunk.gguf"
MANIFEST: Final = "manifest.msgpack"
SOURCE: Final = "source.json"
_PART: Final = ".part-"


def add_model(file: Path, folder: Path, name: str, report: Report) -> dict[str, Any]:
    """Write `folder` for the model in `file`; returns what `swarmctl model add` shows.

    Raises:
        BadModelFile, UnsupportedModel: with one line that says what is wrong.
    """
    part = hidden(folder)
    sweep(folder.parent, folder.name)
    part.mkdir(parents=True)
    try:
        with GGUFFile.open(file) as gguf:
            source = describe_source(gguf)
            learned = make_trunk(gguf, part / TRUNK, lambda done, total: report("writing the trunk", done, total))
            _check_dispatches(gguf, learned)
            trunk = hash_file(part / TRUNK, lambda done, total: report("hashing the trunk", done, total))
            manifest = build_manifest(gguf, learned, name, trunk, report)
            if describe_source(gguf) != source:
                raise BadModelFile(f"{file.name} was changed while it was added", hint="Add it again.", path=str(file))
            (part / MANIFEST).write_bytes(manifest.to_bytes())
            (part / SOURCE).write_text(json.dumps(source))
        _sync_folder(part)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return summary(manifest)


def hidden(folder: Path) -> Path:
    """Where a model is while this process makes it, or takes it apart."""
    return folder.with_name(f".{folder.name}{_PART}{os.getpid()}")


def sweep(models: Path, name: str = "*") -> None:
    """Remove from the folder of models what killed processes left, and this process's own."""
    for leftover in models.glob(f".{name}{_PART}*"):
        writer = leftover.name.rpartition("-")[2]
        if writer.isdigit() and (int(writer) == os.getpid() or not process_lives(int(writer))):
            shutil.rmtree(leftover, ignore_errors=True)


def _check_dispatches(gguf: GGUFFile, learned: LearnedModel) -> None:
    if not learned.layers:
        raise UnsupportedModel(
            f"{gguf.paths[0].name} carries routed experts that its architecture, {gguf.architecture}, never runs",
            hint="Choose a model whose experts are used; there is nothing here to share among peers.",
        )


def build_manifest(gguf: GGUFFile, learned: LearnedModel, name: str, trunk: FileHash, report: Report) -> Manifest:
    """The manifest of a learned model. Reads every expert once, to hash it."""
    programs: dict[bytes, int] = {}
    layers = build_layers(
        gguf, captured_layers(learned.layers, programs), lambda done, total: report("hashing the experts", done, total)
    )
    return Manifest(
        name=name,
        architecture=gguf.architecture,
        context_length=max(1, learned.context_length),
        n_vocab=learned.n_vocab,
        n_layers=learned.n_layers,
        trunk=trunk,
        layers=layers,
        programs=tuple(programs),
        source_files=tuple((path.name, path.stat().st_size) for path in gguf.paths),
    )


def captured_layers(layers: Mapping[int, LearnedLayer], programs: dict[bytes, int]) -> dict[int, CapturedLayer]:
    """Layers as the manifest wants them; `programs` collects the different programs, numbered in order."""
    captured = {}
    for number, layer in sorted(layers.items()):
        index = programs.setdefault(layer.program.to_bytes(), len(programs))
        captured[number] = CapturedLayer(layer.n_used, layer.n_in, layer.n_out, index)
    return captured


def describe_source(gguf: GGUFFile) -> dict[str, Any]:
    """Where the model's own files are and how to tell that they changed: path, size, modification time."""
    stats = [(path.resolve(), path.stat()) for path in gguf.paths]
    return {"files": [{"path": str(p), "size": s.st_size, "mtime_ns": s.st_mtime_ns} for p, s in stats]}


def summary(manifest: Manifest) -> dict[str, Any]:
    """What `swarmctl model add|list|show` say of a model."""
    layers = manifest.layers
    return {
        "name": manifest.name,
        "id": manifest.id,
        "architecture": manifest.architecture,
        "layers": manifest.n_layers,
        "moe_layers": len(layers),
        "experts": max(layer.n_expert for layer in layers),
        "experts_used": max(layer.n_used for layer in layers),
        "context_length": manifest.context_length,
        "trunk_bytes": manifest.trunk.size,
        "expert_bytes": sum(layer.expert_bytes * layer.n_expert for layer in layers),
    }


def _sync_folder(folder: Path) -> None:
    for name in (MANIFEST, SOURCE, "."):
        descriptor = os.open(folder / name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


if __name__ == "__main__":
    _file, _folder, _name = sys.argv[1:4]
    sys.exit(run_child(lambda report: add_model(Path(_file), Path(_folder), _name, report)))
