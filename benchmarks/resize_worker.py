"""A process of `resize_real.py`: burns so many cores and holds so much memory, second by second. Standard library only: it starts in milliseconds."""

import json
import sys
import time

CYCLE_S = 0.01  # of its work: a tenth of a period of the quota
OWN_MIB = 12  # what the interpreter holds


def main(cores: list[float], mebibytes: list[float]) -> None:
    held: list[bytearray] = []
    for busy, wanted in zip(cores, mebibytes, strict=True):
        until = time.monotonic() + 1.0
        while len(held) > wanted - OWN_MIB:
            held.pop()
        while len(held) < wanted - OWN_MIB:
            held.append(bytearray(b"1" * (1 << 20)))
        while (now := time.monotonic()) < until:
            done = time.process_time() + busy * CYCLE_S
            while time.process_time() < done:
                pass
            time.sleep(max(0.0, now + CYCLE_S - time.monotonic()))


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
