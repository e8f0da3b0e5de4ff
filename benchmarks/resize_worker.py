"""A process of `resize_real.py`: burns so many cores and holds so much memory, second by second. Standard library only: it starts in milliseconds.

Memory is written by the processor time that the demand has, block by block: a window whose memory grows by 64 MiB would else use
up its quota for half of its periods by that alone, under any limit of cores, and the cores that were demanded would not be those that are used.
"""

import json
import sys
import time

CYCLE_S = 0.01  # of its work: a tenth of a period of the quota
BLOCK = 1 << 16  # bytes
OWN_BLOCKS = (12 << 20) // BLOCK  # what the interpreter holds


def main(cores: list[float], mebibytes: list[float]) -> None:
    held: list[bytearray] = []
    spent = time.process_time()
    for busy, wanted in zip(cores, mebibytes, strict=True):
        until = time.monotonic() + 1.0
        blocks = int(wanted * (1 << 20)) // BLOCK - OWN_BLOCKS
        del held[max(0, blocks) :]
        while (now := time.monotonic()) < until:
            spent += busy * CYCLE_S  # what a cycle takes too much is missing in the next
            while time.process_time() < spent:
                if len(held) < blocks:
                    held.append(bytearray(b"1" * BLOCK))
            time.sleep(max(0.0, now + CYCLE_S - time.monotonic()))


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
