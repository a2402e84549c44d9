"""Looks at a trunk that came from other peers, before the daemon loads it: is it well-formed, and the manifest's?

Run as a child process (`python -m backends.check_trunk FOLDER`, see child.py), since llama.cpp meets the file here for
the first time. That its bytes are those that the manifest names has been checked when they arrived; this is about a
manifest that names a bad file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends.add_model import MANIFEST, TRUNK, summary
from backends.child import Report, run_child
from backends.gguf_file import GGUFFile
from backends.learn import learn
from backends.manifest import Manifest
from backends.moe_hook import LearnedLayer
from backends.trunk_file import expert_layers
from capabilities.errors import BadModelFile


def check_trunk(folder: Path, report: Report) -> dict[str, Any]:
    """Check the trunk in `folder` against the manifest there; returns a summary of the model.

    Raises:
        BadModelFile, UnsupportedModel: with one line that says what is wrong.
    """
    manifest = Manifest.from_bytes((folder / MANIFEST).read_bytes())
    report("checking the trunk", 0, 1)
    with GGUFFile.open(folder / TRUNK) as gguf:
        holding, architecture = expert_layers(gguf), gguf.architecture
    learned = learn(folder / TRUNK, holding)
    described = (manifest.architecture, manifest.n_vocab, manifest.n_layers)
    if described != (architecture, learned.n_vocab, learned.n_layers):
        raise BadModelFile(f"the trunk of {manifest.name} is another model's than its manifest says")
    check_layers(manifest, learned.layers)
    report("checking the trunk", 1, 1)
    return summary(manifest)


def check_layers(manifest: Manifest, learned: Mapping[int, LearnedLayer]) -> None:
    """The trunk must dispatch exactly what the manifest says: the programs are what workers run.

    Raises:
        BadModelFile: it does not.
    """
    for layer in manifest.layers:
        found = learned.get(layer.layer)
        if found is None or found.program.to_bytes() != manifest.programs[layer.program]:
            raise BadModelFile(
                f"layer {layer.layer} of the trunk does not match the manifest of {manifest.name}",
                hint="Remove the model and add it again: it was added by another version.",
            )


if __name__ == "__main__":
    _folder = Path(sys.argv[1])
    sys.exit(run_child(lambda report: check_trunk(_folder, report)))
