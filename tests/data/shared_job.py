"""A job that shares batches, for the tests: prints a line of JSON per batch that it got, before it asks for the next."""

from __future__ import annotations

import json
import os
import random
import sys
import time

import numpy as np

from meshwright.data.shared import SharedLoader


class Items:
    """Item i is i, a random number, and who prepared it."""

    def __init__(self, count: int, slow_s: float = 0.0) -> None:
        self.count, self.slow_s = count, slow_s

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        time.sleep(random.Random(index).random() * self.slow_s)
        return index, random.random(), float(np.random.random()), os.getpid()


def say(document: dict) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def main() -> None:
    name, jobs, epochs, count, slow_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
    with SharedLoader(Items(count, slow_s), 3, name=name, jobs=jobs, workers=2, collate_fn=list, timeout_s=60) as loader:
        say({"workers": [w.pid for w in loader._workers]})
        for epoch in range(epochs):
            for batch in loader:
                say({"epoch": epoch, "items": batch})
        say({"ended": True})


if __name__ == "__main__":
    main()
