"""A rate for bytes in bulk (experts, trunks), shared by all transfers of one direction."""

from __future__ import annotations

import trio

from scheduler.rates import TokenBucket

_BURST_S = 1.0  # a chunk that comes after a pause need not wait


class Pace:
    """`spend` returns when so many bytes may have gone by. `bytes_per_s` 0: at once."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self._bytes_per_s = bytes_per_s
        self._bucket: TokenBucket | None = None

    @classmethod
    def of_mbit(cls, mbit_per_s: float) -> Pace:
        return cls(mbit_per_s * 1e6 / 8)

    async def spend(self, nbytes: int) -> None:
        if not self._bytes_per_s:
            return
        now = trio.current_time()
        if self._bucket is None:
            self._bucket = TokenBucket(self._bytes_per_s * _BURST_S, self._bytes_per_s, now)
        await trio.sleep(self._bucket.owe(now, nbytes))
