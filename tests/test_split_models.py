"""Models in several files: parts are found, belong together, and a wrong one is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from backends.gguf_file import GGUFFile
from tests.gguf_samples import F32, Sample, SampleTensor, fault_of, moe_sample, number, text, u32, write_split

Change = Callable[[Sample], object]


def test_one_part_that_says_so_is_a_model(tmp_path: Path) -> None:
    sample = moe_sample().set("split.no", number(2, 0)).set("split.count", number(2, 1))
    GGUFFile.open(sample.write(tmp_path / "model.gguf")).close()


def test_a_split_model_whose_first_part_has_only_metadata(tmp_path: Path) -> None:
    sample = moe_sample()
    paths = write_split(sample, tmp_path, 4)
    with GGUFFile.open(paths[0]) as gguf:
        assert gguf.paths == tuple(paths)
        assert gguf.sizes == tuple(path.stat().st_size for path in paths)
        assert gguf.stem == "model"
        assert {info.part for info in gguf.tensors.values()} == {1, 2, 3}
        for tensor in sample.tensors:
            assert bytes(gguf.data(gguf.tensors[str(tensor.name)])) == tensor.data


def _on_part(wanted: int, change: Change) -> Callable[[int, Sample], object]:
    return lambda index, part: change(part) if index == wanted else None


SPLIT_FAULTS: dict[str, tuple[Callable[[int, Sample], object], str]] = {
    "other count": (
        _on_part(2, lambda p: p.set("split.count", number(2, 4))),
        "00003-of-00003.gguf: belongs to another",
    ),
    "other number": (_on_part(1, lambda p: p.set("split.no", number(2, 2))), "says it is part 3; part 2 belongs here"),
    "no number": (_on_part(1, lambda p: p.drop("split.no")), "does not say which part it is"),
    "number type": (_on_part(1, lambda p: p.set("split.no", u32(1))), "split.no must have type UINT16"),
    "other tensors": (_on_part(1, lambda p: p.set("split.tensors.count", number(5, 9))), "belongs to another model"),
    "other architecture": (_on_part(1, lambda p: p.set("general.architecture", text("llama"))), "another model"),
    "tensor lost": (_on_part(2, lambda p: p.tensors.pop()), "split.tensors.count is 27; its 3 parts hold 26"),
    "tensor twice": (
        _on_part(2, lambda p: p.tensors.append(SampleTensor("token_embd.weight", (8,), F32, bytes(32)))),
        "two tensors named token_embd.weight",
    ),
    "count lost": (_on_part(0, lambda p: p.drop("split.tensors.count")), "split.tensors.count is"),
    "too many parts": (_on_part(0, lambda p: p.set("split.count", number(2, 9999))), "9,999 parts; the limit is 256"),
    "count type": (_on_part(0, lambda p: p.set("split.count", u32(3))), "split.count must have type UINT16"),
    "broken part": (_on_part(1, lambda p: setattr(p, "magic", b"XXXX")), "00002-of-00003.gguf: is not a GGUF"),
}


@pytest.mark.parametrize("name", SPLIT_FAULTS)
def test_each_fault_of_a_split_model_is_one_clear_line(tmp_path: Path, name: str) -> None:
    change, expected = SPLIT_FAULTS[name]
    assert expected in fault_of(write_split(moe_sample(), tmp_path, 3, change=change)[0])


def test_a_missing_or_wrong_part_is_named(tmp_path: Path) -> None:
    paths = write_split(moe_sample(), tmp_path, 3)
    assert "is not the first part of its model; open model-00001-of-00003.gguf" in fault_of(paths[1])
    paths[2].rename(tmp_path / "elsewhere.gguf")
    assert fault_of(paths[0]).startswith("model-00003-of-00003.gguf: is missing: part 3 of this model")
    paths[0].rename(tmp_path / "first.gguf")
    assert "must be named NAME-00001-of-00003.gguf" in fault_of(tmp_path / "first.gguf")


def test_nothing_stays_open_after_afault_of(tmp_path: Path) -> None:
    paths = write_split(moe_sample(), tmp_path, 3, change=SPLIT_FAULTS["tensor lost"][0])
    before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    for _ in range(5):
        fault_of(paths[0])
    if before:
        assert len(list(Path("/proc/self/fd").iterdir())) == before
