"""Waits until all nodes of a Ray are there: `python ray_ready.py ADDRESS LABEL NAME...`; ends with 1 and the reason where it cannot be reached."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

POLL_S = 0.2


def main(address: str, label: str, names: list[str]) -> int:
    sys.path = [p for p in sys.path if p != str(Path(__file__).parent)]  # where our own `ray` lies
    import ray

    parent = os.getppid()
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    while os.getppid() == parent:  # whoever asked may be killed
        there = {(node.get("Labels") or {}).get(label) for node in ray.nodes() if node.get("Alive")}
        if there >= set(names):
            return 0
        time.sleep(POLL_S)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
