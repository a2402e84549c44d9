"""Manifests and the experts that they name: hashes of the right bytes, one form, and no trust in a peer's."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.canonical import CanonicalReader
from backends.expert_source import PIECE_BYTES, GGUFExpertSource, build_layers, hash_file, verify_expert
from backends.gguf_file import GGUFFile
from backends.manifest import (
    MANIFEST_BYTES_MAX,
    CapturedLayer,
    ExpertTensor,
    FileHash,
    LayerExperts,
    Manifest,
)
from capabilities.errors import BadModelFile, PeerMistake
from tests.gguf_samples import F32, FF, N_EXPERT, N_USED, Q4_0, WIDTH, Sample, SampleTensor, moe_sample, write_split

USED = {layer: CapturedLayer(N_USED, WIDTH, WIDTH, layer % 2) for layer in (0, 1)}


def _rich_sample() -> Sample:
    """Biases and scales beside the weights in layer 1."""
    sample, random = moe_sample(quantised=True), np.random.default_rng(3)
    for name, *shape in (
        ("ffn_gate_exps.bias", FF, N_EXPERT),
        ("ffn_down_exps.bias", WIDTH, N_EXPERT),
        ("ffn_down_exps.scale", N_EXPERT),
    ):
        data = random.normal(size=shape[::-1]).astype("<f4").tobytes()
        sample.tensors.append(SampleTensor(f"blk.1.{name}", tuple(shape), F32, data))
    return sample


def _manifest(layers: tuple[LayerExperts, ...]) -> Manifest:
    return Manifest(
        name="sample",
        architecture="olmoe",
        context_length=128,
        n_vocab=40,
        n_layers=2,
        trunk=FileHash(bytes(32), 1234, (bytes(32),)),
        layers=layers,
        programs=(b"program 0", b"program 1"),
        source_files=(("model.gguf", 5678),),
    )


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    return GGUFFile.open(_rich_sample().write(tmp_path_factory.mktemp("model") / "model.gguf"))


@pytest.fixture(scope="module")
def manifest(gguf: GGUFFile) -> Manifest:
    return _manifest(build_layers(gguf, USED))


def _slices(gguf: GGUFFile, layer: int, expert: int) -> bytes:
    """An expert's bytes by another way: NumPy's view of each whole tensor, the expert outermost."""
    names = sorted(name for name in gguf.tensors if name.startswith(f"blk.{layer}.") and "_exps." in name)
    whole = [np.frombuffer(gguf.data(gguf.tensors[name]), np.uint8).reshape(N_EXPERT, -1) for name in names]
    return b"".join(tensor[expert].tobytes() for tensor in whole)


def test_layers_say_what_an_expert_is_made_of(manifest: Manifest) -> None:
    plain, rich = manifest.layers
    assert (plain.layer, plain.n_expert, plain.n_used, plain.n_in, plain.n_out) == (0, N_EXPERT, N_USED, WIDTH, WIDTH)
    weight = WIDTH * FF // 32 * 18
    assert plain.tensors == (
        ExpertTensor("ffn_down_exps.weight", Q4_0, (FF, WIDTH), weight),
        ExpertTensor("ffn_gate_exps.weight", Q4_0, (WIDTH, FF), weight),
        ExpertTensor("ffn_up_exps.weight", Q4_0, (WIDTH, FF), weight),
    )
    assert plain.expert_bytes == 3 * weight
    extra = {tensor.name: (tensor.shape, tensor.nbytes) for tensor in rich.tensors if tensor.type == F32}
    assert extra == {
        "ffn_down_exps.bias": ((WIDTH,), 4 * WIDTH),
        "ffn_down_exps.scale": ((), 4),
        "ffn_gate_exps.bias": ((FF,), 4 * FF),
    }
    assert rich.expert_bytes == 3 * weight + 4 * (WIDTH + FF + 1)
    assert rich.program == 1


def test_hashes_are_of_the_experts_bytes(gguf: GGUFFile, manifest: Manifest) -> None:
    for layer in manifest.layers:
        for expert in range(N_EXPERT):
            data = _slices(gguf, layer.layer, expert)
            assert layer.hashes[expert] == hashlib.sha256(data).digest()
            assert verify_expert(layer, expert, data)
            assert verify_expert(layer, expert, memoryview(bytearray(data)))
            assert not verify_expert(layer, expert, data[:-1])
            assert not verify_expert(layer, (expert + 1) % N_EXPERT, data)
            assert not verify_expert(layer, expert, bytes([data[0] ^ 1]) + data[1:])


def test_the_source_reads_ranges_over_tensors(gguf: GGUFFile, manifest: Manifest) -> None:
    source = GGUFExpertSource(gguf, manifest)
    for layer in manifest.layers:
        whole = _slices(gguf, layer.layer, 2)
        assert source.read(layer.layer, 2, 0, layer.expert_bytes) == whole
        for offset in (0, 1, *(at - 3 for at in layer.offsets[1:]), *layer.offsets):
            for wanted in (0, 1, 5, layer.tensors[0].nbytes + 7):
                length = min(wanted, layer.expert_bytes - offset)
                assert source.read(layer.layer, 2, offset, length) == whole[offset : offset + length]


@pytest.mark.parametrize(
    ("layer", "expert", "offset", "length"),
    [
        (7, 0, 0, 1),
        (0, N_EXPERT, 0, 1),
        (0, -1, 0, 1),
        (0, 0, -1, 1),
        (0, 0, 0, 1 << 40),
        (0, 0, 5, -1),
        (0, 0, 1 << 40, 0),
    ],
)
def test_ranges_that_do_not_exist(
    gguf: GGUFFile, manifest: Manifest, layer: int, expert: int, offset: int, length: int
) -> None:
    with pytest.raises(PeerMistake):
        GGUFExpertSource(gguf, manifest).read(layer, expert, offset, length)


def test_a_source_file_cut_short_is_an_error(tmp_path: Path) -> None:
    with GGUFFile.open(moe_sample().write(tmp_path / "model.gguf")) as gguf:
        manifest = _manifest(build_layers(gguf, USED))
        os.truncate(tmp_path / "model.gguf", 10_000)
        with pytest.raises(BadModelFile, match="cut short"):
            GGUFExpertSource(gguf, manifest).read(1, 3, 0, 100)
        with pytest.raises(BadModelFile, match="cut short"):
            build_layers(gguf, USED)


def test_a_split_model_has_the_same_experts(tmp_path: Path, manifest: Manifest) -> None:
    with GGUFFile.open(write_split(_rich_sample(), tmp_path, 4)[0]) as gguf:
        assert build_layers(gguf, USED) == manifest.layers


def test_only_layers_that_dispatch_are_listed(gguf: GGUFFile) -> None:
    (layer,) = build_layers(gguf, {1: USED[1]})
    assert layer.layer == 1
    with pytest.raises(ValueError, match="layer 9 holds no routed experts"):
        build_layers(gguf, {9: USED[1]})
    with pytest.raises(ValueError, match="captured with widths 63"):
        build_layers(gguf, {1: replace(USED[1], n_in=63)})


def test_progress_counts_every_byte_once(gguf: GGUFFile) -> None:
    seen: list[tuple[int, int]] = []
    layers = build_layers(gguf, USED, lambda done, total: seen.append((done, total)))
    total = sum(layer.n_expert * layer.expert_bytes for layer in layers)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc, which this system lacks")
def test_hashing_takes_little_memory(tmp_path: Path) -> None:
    sample, ff = moe_sample(), 1 << 17  # experts of 96 MiB in one tensor each, holes in the file
    sample.tensors = [tensor for tensor in sample.tensors if not str(tensor.name).startswith("blk.1.ffn_")]
    sample.tensors += [SampleTensor(f"blk.1.ffn_{p}_exps.weight", (WIDTH, ff, N_EXPERT), F32) for p in ("gate", "up")]
    sample.tensors.append(SampleTensor("blk.1.ffn_down_exps.weight", (ff, WIDTH, N_EXPERT), F32))
    each = 4 * WIDTH * ff * N_EXPERT
    sample.tensors[-2:] = [replace(t, offset=_end(sample) + i * each) for i, t in enumerate(sample.tensors[-2:], 1)]
    path = sample.write(tmp_path / "model.gguf")
    os.truncate(path, path.stat().st_size + 3 * each)
    with GGUFFile.open(path) as gguf:
        before, most = _resident(), 0

        def look(done: int, total: int) -> None:
            nonlocal most
            most = max(most, _resident())

        (layer,) = build_layers(gguf, {1: USED[1]}, look)
    assert layer.expert_bytes == 3 * each // N_EXPERT > 90 << 20
    assert most < before + 4 * PIECE_BYTES


def _end(sample: Sample) -> int:
    return sum(-(-len(tensor.data) // 32) * 32 for tensor in sample.tensors)


def _resident() -> int:
    """All resident memory, also mapped pages of files."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))


def test_a_files_hash(tmp_path: Path) -> None:
    data = os.urandom(PIECE_BYTES + 1000)
    (tmp_path / "file").write_bytes(data)
    seen: list[int] = []
    assert hash_file(tmp_path / "file", lambda done, total: seen.append(done)) == FileHash(
        hashlib.sha256(data).digest(),
        len(data),
        tuple(hashlib.sha256(piece).digest() for piece in (data[:PIECE_BYTES], data[PIECE_BYTES:])),
    )
    assert seen == [PIECE_BYTES, len(data)]
    with pytest.raises(FileNotFoundError):
        hash_file(tmp_path / "absent")


def test_a_manifest_survives_the_wire(manifest: Manifest) -> None:
    data = manifest.to_bytes()
    again = Manifest.from_bytes(data)
    assert again == manifest
    assert again.to_bytes() == data
    assert again.id == manifest.id == hashlib.sha256(data).hexdigest()
    assert replace(manifest, name="other").id != manifest.id
    assert again.experts_of(1) == manifest.layers[1]
    with pytest.raises(PeerMistake, match="layer 5 of sample has no experts"):
        again.experts_of(5)


def test_the_largest_manifest_fits_and_decodes_quickly() -> None:
    tensors = tuple(
        ExpertTensor(f"ffn_{p}_exps.weight", 12, (7168, 7168), 7168 * 28 * 144) for p in ("down", "gate", "up")
    )
    hashes = tuple(index.to_bytes(32, "big") for index in range(896))
    layers = tuple(LayerExperts(layer, 896, 8, 7168, 7168, 0, tensors, hashes) for layer in range(512))
    manifest = replace(_manifest(layers), n_layers=512)
    data = manifest.to_bytes()
    assert len(data) < MANIFEST_BYTES_MAX
    before = time.process_time()
    assert Manifest.from_bytes(data) == manifest
    assert time.process_time() - before < 3


def _change(manifest: Manifest, path: tuple[str | int, ...], value: Any) -> bytes:
    """The manifest's bytes with one place of its structure changed; nothing is checked."""
    fields: Any = msgpack.unpackb(manifest.to_bytes())
    place = fields
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value(place[path[-1]]) if callable(value) else value
    packed: bytes = msgpack.packb(fields)
    return packed


MISTAKES: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "format": (("format_version",), 1, "format 1; this node reads format 2"),
    "name type": (("name",), 5, "name has the wrong type"),
    "name bytes": (("name",), b"sample", "name has the wrong type"),
    "name empty": (("name",), "", "name is empty"),
    "name long": (("name",), "x" * 256, "limit is 255"),
    "name control": (("name",), "a\nb", "control characters"),
    "context 0": (("context_length",), 0, "no context"),
    "context negative": (("context_length",), -5, "wrong type"),
    "context float": (("context_length",), 128.0, "wrong type"),
    "context huge": (("context_length",), 1 << 40, "the limit is"),
    "context true": (("context_length",), True, "wrong type"),
    "context nil": (("context_length",), None, "wrong type"),
    "trunk hash short": (("trunk", 0), bytes(31), "no trunk"),
    "trunk hash long": (("trunk", 0), bytes(33), "limit is 32"),
    "trunk shape": (("trunk",), [bytes(32)], "not a hash, a size"),
    "trunk without pieces": (("trunk", 2), b"", "not one hash of 32 bytes for each 4,194,304 bytes of the trunk"),
    "trunk with too many pieces": (("trunk", 2), bytes(64), "not one hash of 32 bytes for each"),
    "trunk with half a piece": (("trunk", 2), bytes(31), "not one hash of 32 bytes for each"),
    "trunk too large for its pieces": (("trunk", 1), 5 << 20, "not one hash of 32 bytes for each"),
    "no layers": (("layers",), [], "no layer with experts"),
    "layers map": (("layers",), {}, "layers has the wrong type"),
    "layer twice": (("layers",), lambda layers: [layers[0], layers[0]], "not ascending"),
    "layers reversed": (("layers",), lambda layers: layers[::-1], "not ascending"),
    "layer beyond": (("n_layers",), 1, "below 1"),
    "experts 0": (("layers", 0, "n_expert"), 0, "bytes of hashes for 0 experts"),
    "experts 5": (("layers", 0, "n_expert"), 5, "bytes of hashes for 5 experts"),
    "experts many": (("layers", 0, "n_expert"), 5000, "limit is 1,024"),
    "used 0": (("layers", 0, "n_used"), 0, "cannot be used"),
    "used 5": (("layers", 0, "n_used"), 5, "5 experts of 4 cannot be used"),
    "width in": (("layers", 0, "n_in"), 32, "are not its tensors'"),
    "width out": (("layers", 0, "n_out"), 128, "are not its tensors'"),
    "program": (("layers", 0, "program"), 2, "program 2 does not exist"),
    "hash short": (("layers", 0, "hashes"), bytes(127), "127 bytes of hashes"),
    "hash text": (("layers", 0, "hashes"), "x" * 128, "wrong type"),
    "no tensors": (("layers", 0, "tensors"), [], "no ffn_down_exps.weight"),
    "tensor twice": (("layers", 0, "tensors"), lambda t: [t[0], *t], "order of their names"),
    "tensor order": (("layers", 0, "tensors"), lambda t: t[::-1], "order of their names"),
    "many tensors": (("layers", 0, "tensors"), lambda t: t * 6, "limit is 16"),
    "tensor name": (("layers", 0, "tensors", 0, 0), "ffn_dawn_exps.weight", "no ffn_down_exps.weight"),
    "tensor extra": (("layers", 0, "tensors"), lambda t: [*t, ["x", 0, [1]]], "unknown expert tensor x"),
    "tensor type": (("layers", 0, "tensors", 0, 1), 99, "type 99"),
    "integer weights": (("layers", 0, "tensors", 0, 1), 26, "type 26, which ggml's kernels do not take"),
    "half-precision bias": (("layers", 1, "tensors", 0, 1), 1, "bias has type 1"),
    "cut blocks": (("layers", 0, "tensors", 0, 2), [33, WIDTH], "not whole q4_0 blocks"),
    "zero": (("layers", 0, "tensors", 0, 2), [0, WIDTH], "dimension of zero"),
    "other width": (("layers", 0, "tensors", 1, 2), [WIDTH, 64], "has shape [64, 64] an expert"),
    "three dimensions": (("layers", 0, "tensors", 0, 2), [32, 64, 1], "limit is 2"),
    "one dimension": (("layers", 0, "tensors", 0, 2), [2048], "1 dimensions an expert instead of 2"),
    "huge extent": (("layers", 0, "tensors", 0, 2), [1 << 40, 1], "the limit is"),
    "program text": (("programs", 0), "text", "program has the wrong type"),
    "program large": (("programs", 0), bytes(70_000), "limit is 65,536"),
    "file path": (("source_files", 0, 0), "../model.gguf", "no name of a file"),
    "file empty": (("source_files", 0, 1), 0, "no name of a file, or no bytes"),
    "file shape": (("source_files", 0), ["x"], "not a name and a size"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_of_a_peer_is_named(manifest: Manifest, name: str) -> None:
    path, value, expected = MISTAKES[name]
    with pytest.raises(PeerMistake) as caught:
        Manifest.from_bytes(_change(manifest, path, value))
    assert expected in caught.value.message
    assert caught.value.message.startswith("bad manifest: ")


def test_other_forms_of_the_same_manifest_are_refused(manifest: Manifest) -> None:
    data = manifest.to_bytes()
    fields: dict[str, Any] = msgpack.unpackb(data)
    with pytest.raises(PeerMistake, match="bytes follow"):
        Manifest.from_bytes(data + b"\xc0")
    with pytest.raises(PeerMistake, match="ends inside"):
        Manifest.from_bytes(data[:-1])
    with pytest.raises(PeerMistake, match="key format_version is missing"):
        Manifest.from_bytes(msgpack.packb({key: fields[key] for key in reversed(fields)}))
    with pytest.raises(PeerMistake, match="does not have 10 fields"):
        Manifest.from_bytes(msgpack.packb({key: fields[key] for key in list(fields)[:-1]}))
    with pytest.raises(PeerMistake, match="the limit is 10"):
        Manifest.from_bytes(msgpack.packb(fields | {"more": 1}))
    longer = data.replace(b"\xae" + b"format_version\x02", b"\xae" + b"format_version\xcc\x02", 1)
    assert len(longer) == len(data) + 1
    with pytest.raises(PeerMistake, match="not in canonical form"):
        Manifest.from_bytes(longer)
    with pytest.raises(PeerMistake, match="the limit is 16,777,216"):
        Manifest.from_bytes(bytes(MANIFEST_BYTES_MAX + 1))


@pytest.mark.parametrize(
    "bomb", [b"\x9a" * 1_000_000, b"\xdd\xff\xff\xff\xff" + bytes(100), b"\x8a" + b"\xdb\xff\xff\xff\xff"]
)
def test_bombs_cost_nothing(bomb: bytes) -> None:
    before = time.process_time()
    with pytest.raises(PeerMistake):
        Manifest.from_bytes(bomb)
    assert time.process_time() - before < 0.5


def test_a_manifest_of_our_own_must_be_sound(manifest: Manifest) -> None:
    with pytest.raises(ValueError, match="no context"):
        replace(manifest, n_vocab=0).to_bytes()
    with pytest.raises(ValueError, match="the limit is"):
        replace(manifest, n_vocab=1 << 40).to_bytes()
    (first, second) = manifest.layers
    wrong = replace(first, tensors=(replace(first.tensors[0], nbytes=5), *first.tensors[1:]))
    with pytest.raises(ValueError, match="does not take 5 bytes"):
        replace(manifest, layers=(wrong, second)).to_bytes()
    short = replace(first, hashes=(bytes(31), *first.hashes[1:]))
    with pytest.raises(ValueError, match="not one hash of 32 bytes"):
        replace(manifest, layers=(short, second)).to_bytes()


@settings(max_examples=300)
@given(data=st.data())
def test_damaged_manifests_are_refused_or_sound(manifest: Manifest, data: st.DataObject) -> None:
    raw = bytearray(manifest.to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(raw[: data.draw(st.just(len(raw)) | st.integers(0, len(raw)))])
    try:
        decoded = Manifest.from_bytes(damaged)
    except PeerMistake:
        return
    assert decoded.to_bytes() == damaged  # bytes of a hash or a name: another manifest, but a sound one


@given(
    number=st.integers(0, 2**64 - 1),
    text=st.text(max_size=300),
    blob=st.binary(max_size=70_000),
    count=st.integers(0, 70_000),
)
def test_the_reader_reads_what_msgpack_writes(number: int, text: str, blob: bytes, count: int) -> None:
    packed = msgpack.packb({"n": number, "t": text, "b": blob}) + msgpack.packb([0] * count)
    reader = CanonicalReader(packed)
    reader.fields(3, "map")
    reader.key("n")
    assert reader.number(2**64, "n") == number
    reader.key("t")
    assert reader.text(1_200, "t") == text
    reader.key("b")
    assert reader.blob(70_000, "b") == blob
    assert reader.items(70_000, "items") == count
    assert [reader.number(0, "item") for _ in range(count)] == [0] * count
    reader.finish()
