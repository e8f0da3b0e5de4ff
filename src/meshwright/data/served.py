"""Batches from a service (`meshwright data serve`): this job gets each of an epoch once, whatever is killed and started again meanwhile."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import RunError, RunTimeout, UsageError
from .batch_bytes import unpacked
from .wire import HEAD, NEXT, WELCOME, Hello, exactly, hello_bytes, parse_address

__all__ = ["ServedLoader"]

MAX_WAIT_S = 300.0
MAX_RETRY_S = 0.2  # between two tries to reach the service


class ServedLoader:
    """Iterates over an epoch's batches, in the order in which they are ready. It is told how many there are by the service at `at`.

    at: HOST:PORT, or the path of a socket's file. job: its name; two that live have different ones (default: host and process).
    timeout_s: longest wait for a batch, or for the other jobs. patience_s: so long a service that went away is looked for; it may have been killed
        and started again, and knows nothing: this job then says which batches came.

    Raises: UsageError for an address that is none, or a job that the service refuses; RunTimeout; RunError where it does not come back, or where
        preparing failed, with the item.
    """

    def __init__(self, at: str, *, job: str = "", timeout_s: float = MAX_WAIT_S, patience_s: float = 60.0) -> None:
        self.at, self.job = at, job or f"{socket.gethostname()}-{os.getpid()}"
        self.timeout_s, self.patience_s = timeout_s, patience_s
        self._family, self._address = parse_address(at)
        self._channel: socket.socket | None = None
        self._epoch, self.batches, self.returns = -1, 0, 0
        self._seen: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._reach()

    def __len__(self) -> int:
        return self.batches

    def __enter__(self) -> ServedLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leaves: the other jobs no longer wait for it."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def __iter__(self) -> Iterator[Any]:
        """The next epoch's batches. One that is left early counts as taken."""
        begun = len(self._seen) > 0
        epoch = self._epoch = self._epoch + begun
        self._seen = np.zeros(self.batches, np.bool_)
        for _ in range(self.batches):
            batch, data = self._next(epoch)
            self._seen[batch] = True
            yield unpacked(data, f"{self.at}: epoch {epoch}, batch {batch}")

    def _next(self, epoch: int) -> tuple[int, bytearray]:
        while True:
            try:
                if self._channel is None:
                    self._reach()
                assert self._channel is not None
                self._channel.sendall(NEXT.pack(epoch))
                of, batch, size = HEAD.unpack(exactly(self._channel, HEAD.size))
                if of != epoch or not 0 <= batch < self.batches or self._seen[batch]:
                    raise RunError(f"sends batch {batch} of epoch {of}: unasked", where=self.at, hint="another program listens there")
                return batch, exactly(self._channel, size)
            except TimeoutError:
                self.close()
                here = f"{int(self._seen.sum())} of {self.batches} batches of epoch {epoch} came"
                raise RunTimeout(f"waited {self.timeout_s:.0f} s: {here}", where=self.at, hint="start the other jobs of --jobs") from None
            except (OSError, EOFError):
                self.close()

    def _reach(self) -> None:
        """Connects, and says where this job is. Raises: RunError after `patience_s`, UsageError."""
        begin, why = time.monotonic(), ""
        back = len(self._seen) > 0
        hello = Hello(self.job, self._epoch, np.packbits(self._seen).tobytes()) if back else Hello(self.job)
        while True:
            channel = socket.socket(self._family, socket.SOCK_STREAM)
            try:
                channel.settimeout(self.timeout_s)
                channel.connect(self._address)
                channel.sendall(hello_bytes(hello))
                self._channel = channel
                batches, epoch, size = WELCOME.unpack(exactly(self._channel, WELCOME.size))
                if size:
                    text = exactly(self._channel, size).decode(errors="replace")
                    raise UsageError(f"the service refuses this job: {text}", where=self.at, hint="a name for each job, a service for each dataset")
                if back and batches != self.batches:
                    raise UsageError(f"the service has {batches} batches now, it had {self.batches}", where=self.at, hint="serve the same dataset")
                self.batches, self.returns = batches, self.returns + back
                self._epoch = self._epoch if back else epoch
                return
            except TimeoutError:
                why = f"no answer within {self.timeout_s:.0f} s"
            except (OSError, EOFError) as error:
                why = getattr(error, "strerror", None) or "it ended"
            except BaseException:
                self._channel = None
                channel.close()
                raise
            self._channel = None
            channel.close()
            if time.monotonic() - begin > self.patience_s:
                raise RunError(f"no service: {why}", where=self.at, hint="meshwright data serve LOADER --at ADDRESS")
            time.sleep(MAX_RETRY_S)
