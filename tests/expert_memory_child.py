"""A child that loads and unloads experts and writes its anonymous memory above the start, in MiB, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from tests.expert_models import DOWN_ONLY, made_up_layer
from tests.test_expert_conformance import BACKENDS


def rss_anon_mib() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def main(name: str) -> None:
    n, n_expert = 1024, 40  # Q8_0: 1.06 MiB an expert
    layer, read = made_up_layer({"ffn_down_exps.weight": np.ones((1, n, n), np.float32)}, n, n, "q8_0")
    object.__setattr__(layer, "n_expert", n_expert)
    one = bytes(read(0, 0))
    backend = BACKENDS[name]()
    report: dict[str, list[float]] = {"loaded_mib": [], "unloaded_mib": []}
    x, ids = np.ones((2, n), np.float32), np.arange(n_expert, dtype=np.int32)
    start = rss_anon_mib()
    for _ in range(3):
        backend.load_layer(layer, DOWN_ONLY, range(n_expert), lambda expert, tensor: one)
        backend.compute(0, x, ids % 2, ids)
        report["loaded_mib"].append(rss_anon_mib() - start)
        backend.unload_layer(0)
        report["unloaded_mib"].append(rss_anon_mib() - start)
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
