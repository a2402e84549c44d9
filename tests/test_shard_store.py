"""The cache of experts on disk: what it promises about bytes, budget and damage."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from capabilities.errors import ExpertsUnavailable, PeerMistake
from swarmnode.shards.store import CachedExperts, CacheError, PartialShard, ShardCache, layer_reader
from tests.shard_models import shard_model

DATA = [bytes([index]) * 1_000 for index in range(8)]
DIGESTS = [hashlib.sha256(data).digest() for data in DATA]


def begin(cache: ShardCache, index: int) -> PartialShard:
    part = cache.begin(DIGESTS[index], len(DATA[index]))
    assert part is not None
    return part


def put(cache: ShardCache, *indices: int) -> None:
    for index in indices:
        part = begin(cache, index)
        part.write(DATA[index][part.offset :])
        assert part.finish()


def here(cache: ShardCache) -> set[int]:
    """Which experts are complete; looked at without touching their last use."""
    return {index for index, digest in enumerate(DIGESTS) if cache._path(digest).exists()}


def test_what_was_put_is_what_opens(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "new" / "folder", 10_000)
    assert cache.open(DIGESTS[0], 1_000) is None
    put(cache, 0)
    view = cache.open(DIGESTS[0], 1_000)
    assert view == DATA[0]
    assert view.readonly
    assert cache.statistics().used_bytes == 1_000


def test_an_interrupted_write_resumes_in_another_process(tmp_path: Path) -> None:
    part = begin(ShardCache(tmp_path, 10_000), 1)
    part.write(DATA[1][:400])
    part.close()
    cache = ShardCache(tmp_path, 10_000)
    assert cache.open(DIGESTS[1], 1_000) is None
    assert cache.statistics().partial == 1
    part = begin(cache, 1)
    assert (part.offset, part.resumed_bytes) == (400, 400)
    part.write(DATA[1][400:])
    assert part.finish()
    assert cache.open(DIGESTS[1], 1_000) == DATA[1]
    assert list(tmp_path.rglob("*.part")) == []


def test_wrong_bytes_never_get_their_final_name(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 10_000)
    part = begin(cache, 1)
    part.write(DATA[2])
    assert not part.finish()
    part.close()
    assert cache.statistics().used_bytes == 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    with pytest.raises(ValueError, match="more bytes"):
        begin(cache, 1).write(bytes(1_001))


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 10_000)
    part = begin(cache, 0)
    assert cache.begin(DIGESTS[0], 1_000) is None
    part.close()
    begin(cache, 0).close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"\xff" + path.read_bytes()[1:]),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
    ],
)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_damaged_file_is_found_and_forgotten(
    tmp_path: Path, damage: Callable[[Path], object], restarted: bool
) -> None:
    cache = ShardCache(tmp_path, 10_000)
    put(cache, 0, 1)
    assert cache.open(DIGESTS[0], 1_000) is not None
    damage(cache._path(DIGESTS[0]))
    if restarted:
        cache = ShardCache(tmp_path, 10_000)
    assert cache.open(DIGESTS[0], 1_000) is None
    assert not cache._path(DIGESTS[0]).exists()
    put(cache, 0)
    assert cache.open(DIGESTS[0], 1_000) == DATA[0]
    assert cache.statistics().used_bytes == 2_000


def test_the_least_recently_used_goes_first_also_after_a_restart(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 3_000)
    put(cache, 0, 1, 2)
    assert cache.open(DIGESTS[0], 1_000) is not None
    put(cache, 3)
    assert here(cache) == {0, 2, 3}
    cache = ShardCache(tmp_path, 3_000)
    put(cache, 4)
    assert here(cache) == {0, 3, 4}
    smaller = ShardCache(tmp_path, 1_000)
    put(smaller, 5)
    assert here(smaller) == {5}


def test_what_is_kept_or_being_written_is_never_evicted(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 3_000)
    put(cache, 0, 1)
    with cache.keep([DIGESTS[0]]), cache.keep([DIGESTS[0], DIGESTS[1], DIGESTS[3]]):
        part = begin(cache, 2)
        part.write(b"\2")
        with pytest.raises(CacheError, match="budget of 3000"):
            cache.begin(DIGESTS[3], 1_000)
        assert cache.statistics().kept_bytes == 2_000
        cache.discard(DIGESTS)
        assert here(cache) == {0, 1}
    part.close()
    with cache.keep([DIGESTS[0]]):
        put(cache, 3, 4)
        assert here(cache) == {0, 3, 4}
    cache.discard(DIGESTS)
    assert here(cache) == set()
    assert cache.statistics().used_bytes == 0


def test_several_experts_in_flight_share_the_budget(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 2_500)
    first, second = begin(cache, 0), begin(cache, 1)
    with pytest.raises(CacheError):
        cache.begin(DIGESTS[2], 1_000)
    first.close()
    second.close()
    put(cache, 2)


def test_a_mapping_outlives_its_eviction(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 1_000)
    put(cache, 0)
    view = cache.open(DIGESTS[0], 1_000)
    put(cache, 1)
    assert here(cache) == {1}
    assert view == DATA[0]


def full_disk(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_a_clear_error_and_keeps_what_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ShardCache(tmp_path, 10_000)
    part = begin(cache, 0)
    part.write(DATA[0][:300])
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full_disk)
        with pytest.raises(CacheError, match="disk is full") as caught:
            part.write(DATA[0][300:])
    assert caught.value.details["path"] == str(tmp_path)
    part.close()
    part = begin(cache, 0)
    assert part.offset == 300
    part.write(DATA[0][300:])
    assert part.finish()


def test_a_full_disk_first_costs_what_nobody_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ShardCache(tmp_path, 10_000)
    put(cache, 0, 1)
    pwrite = os.pwrite

    def write(fd: int, data: memoryview, offset: int) -> int:
        return full_disk() if 1 in here(cache) else pwrite(fd, data[:100], offset)

    monkeypatch.setattr(os, "pwrite", write)
    put(cache, 2)
    assert here(cache) == {2}
    assert cache.open(DIGESTS[2], 1_000) == DATA[2]


def test_an_unusable_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="Not a directory"):
        ShardCache(tmp_path / "file" / "cache", 1_000)
    cache = ShardCache(tmp_path / "cache", 1_000)
    (tmp_path / "cache" / DIGESTS[0].hex()[:2]).write_text("in the way")
    with pytest.raises(CacheError):
        cache.begin(DIGESTS[0], 1_000)
    assert cache.statistics().used_bytes == 0


def test_too_few_file_descriptors_cost_no_file(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 10_000)
    put(cache, 0)
    part = begin(cache, 1)
    part.write(DATA[1][:300])
    part.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        with pytest.raises(CacheError, match="Too many open files"):
            cache.open(DIGESTS[0], 1_000)
        with pytest.raises(CacheError, match="Too many open files"):
            cache.begin(DIGESTS[1], 1_000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert cache.open(DIGESTS[0], 1_000) == DATA[0]
    assert begin(cache, 1).offset == 300


def test_strange_files_are_left_alone(tmp_path: Path) -> None:
    put(ShardCache(tmp_path, 10_000), 0)
    name = DIGESTS[0].hex()
    folder = tmp_path / name[:2]
    strange = [tmp_path / "notes.txt", folder / "short", folder / ("X" * 64), tmp_path / "ab"]
    for path in strange:
        path.write_text("mine")
    (folder / ("0" * 64)).symlink_to(strange[0])
    leaving = folder / (name + ".part")
    leaving.write_text("left over")
    cache = ShardCache(tmp_path, 1_000)
    assert cache.statistics().used_bytes == 1_000
    assert not leaving.exists()
    put(cache, 1)
    assert all(path.exists() for path in strange)


def test_many_threads_leave_the_books_right(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 3_000)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for step in range(60):
                index = (seed * 5 + step * (seed + 1)) % 8
                view = cache.open(DIGESTS[index], 1_000)
                assert view is None or view == DATA[index]
                part = cache.begin(DIGESTS[index], 1_000) if view is None else None
                if part is not None:
                    part.write(DATA[index][part.offset :][: 1_000 if step % 3 else 500])
                    assert part.offset < 1_000 or part.finish()
                    part.close()
        except CacheError:
            pass  # three writers at once may fill the budget
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    on_disk = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert cache.statistics().used_bytes == on_disk <= 3_000


def test_readers_for_loading_and_for_serving(tmp_path: Path) -> None:
    model = shard_model()
    layer = model.manifest.layers[0]
    cache = ShardCache(tmp_path, 10**6)
    data = model.experts[1, 2]
    part = cache.begin(layer.hashes[2], layer.expert_bytes)
    assert part is not None
    part.write(data)
    assert part.finish()
    read = layer_reader(cache, layer)
    size = layer.tensors[0].nbytes
    assert [read(2, index) for index in range(3)] == [data[:size], data[size : 2 * size], data[2 * size :]]
    with pytest.raises(ExpertsUnavailable) as caught:
        read(3, 0)
    assert caught.value.details == {"layer": 1, "experts": [3], "cause": "refused"}

    serve = CachedExperts(cache, model.manifest)
    assert serve.read(1, 2, 10, 20) == data[10:30]
    with pytest.raises(ExpertsUnavailable):
        serve.read(3, 0, 0, 1)
    for bad in ((2, 0, 0, 1), (1, 4, 0, 1), (1, 2, 0, len(data) + 1), (1, -1, 0, 1)):
        with pytest.raises(PeerMistake):
            serve.read(*bad)
