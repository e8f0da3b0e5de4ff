"""A rank that works on what others wait for says so, in the store: planning may take longer than a deadline on a busy machine.

Who waits looks at its deadline whether there were more beats since the last look. A rank that died is known at once, by its control connection; one
that is frozen beats no more.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from itertools import count
from typing import Any

__all__ = ["beating", "beats_of"]

BEATS_PER_TIMEOUT = 8  # so that some come within a deadline, however busy the machine is
MIN_PERIOD_S, MAX_PERIOD_S = 0.02, 1.0


@contextlib.contextmanager
def beating(store: Any, key: str, timeout_s: float) -> Iterator[None]:
    """While this lasts, a thread counts `key`'s beats up. A store that is gone ends it: the others hear of that themselves."""
    done = threading.Event()
    period_s = min(MAX_PERIOD_S, max(MIN_PERIOD_S, timeout_s / BEATS_PER_TIMEOUT))

    def beat() -> None:
        with contextlib.suppress(RuntimeError):
            for beats in count(1):
                store.set(f"beats/{key}", str(beats))
                if done.wait(period_s):
                    return

    thread = threading.Thread(target=beat, name="meshwright-plan", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def beats_of(store: Any, key: str) -> int:
    return int(store.get(f"beats/{key}")) if store.check([f"beats/{key}"]) else 0
