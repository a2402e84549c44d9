"""What this node keeps of the DHT for others, bounded: py-libp2p's stores with an end to everything.

The originals keep up to 50,000 values of a megabyte for a day and any number of providers' keys for two, and of a
popular key the first 20 providers, dead or alive. Here the oldest goes when there is no room, and everything after an
hour.
"""

from __future__ import annotations

import time

from libp2p.kad_dht.pb.kademlia_pb2 import Record
from libp2p.kad_dht.provider_store import ProviderRecord, ProviderStore
from libp2p.kad_dht.value_store import ValueStore
from libp2p.peer.peerinfo import PeerInfo

from swarmnode.net import limits

_KEY_BYTES = 32
_ADDRESSES_MAX = 8


class BoundedValues(ValueStore):  # type: ignore[misc]
    """Values of any peer, oldest first; this node's own are the last to go."""

    def put(self, key: bytes, value: bytes, validity: float = 0.0) -> None:
        super().put(key, value, validity or time.time() + limits.DHT_VALUE_SECONDS_MAX)

    def put_record(self, key: bytes, record: Record) -> None:
        self.store.pop(key, None)
        super().put_record(key, record)
        self.store[key] = (record, time.time() + limits.DHT_VALUE_SECONDS_MAX)

    def _evict_if_full(self) -> None:
        while len(self.store) >= limits.DHT_VALUES_MAX:
            oldest = next((key for key in self.store if key not in self.local_keys), next(iter(self.store)))
            del self.store[oldest]


class BoundedProviders(ProviderStore):  # type: ignore[misc]
    """Providers of keys that are hashes. The oldest of a key makes room, then the key that was touched longest ago."""

    def add_provider(self, key: bytes, provider: PeerInfo) -> None:
        name = str(provider.peer_id)
        if len(key) != _KEY_BYTES or self._is_full_of(name, key):
            return
        known = self.providers.pop(key, {})
        known.pop(name, None)
        self.providers[key] = known
        known[name] = ProviderRecord(PeerInfo(provider.peer_id, provider.addrs[:_ADDRESSES_MAX]))
        if len(known) > limits.DHT_PROVIDERS_PER_KEY_MAX:
            del known[next(iter(known))]
        if len(self.providers) > limits.DHT_PROVIDER_KEYS_MAX:
            oldest = next((each for each in self.providers if each not in self.providing_keys), key)
            del self.providers[oldest]

    def _is_full_of(self, name: str, key: bytes) -> bool:
        if name in self.providers.get(key, ()):
            return False
        return sum(name in known for known in self.providers.values()) >= limits.DHT_KEYS_PER_PROVIDER_MAX

    def get_providers(self, key: bytes) -> list[PeerInfo]:
        self.cleanup_expired()
        return [record.provider_info for record in self.providers.get(key, {}).values()]

    def cleanup_expired(self) -> None:
        oldest = time.time() - limits.DHT_PROVIDER_SECONDS_MAX
        for key, known in list(self.providers.items()):
            self.providers[key] = {name: record for name, record in known.items() if record.timestamp > oldest}
            if not self.providers[key]:
                del self.providers[key]
