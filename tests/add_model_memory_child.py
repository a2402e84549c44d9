"""A child that adds a model while another thread of it watches its anonymous memory. Writes one JSON object."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from backends.add_model import add_model
from tests.expert_memory_child import rss_anon_mib
from tests.expert_models import quiet


def main(file: str, folder: str) -> None:
    start = rss_anon_mib()
    samples, done = [start], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            samples.append(rss_anon_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    shown = add_model(Path(file), Path(folder), "large", quiet)
    done.set()
    watcher.join()
    report = {"start_mib": start, "peak_mib": max(samples), "samples": len(samples)}
    print(json.dumps(report | {"expert_bytes": shown["expert_bytes"]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
