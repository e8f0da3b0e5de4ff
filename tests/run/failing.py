"""Models and data that misbehave on purpose, for the tests of failures. Used by file name: `tests/run/failing.py:<function>`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch


class _Tokens:
    """Random tokens; `at` is called with the sample's index."""

    def __init__(self, at: Any = None) -> None:
        self.at = at

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.at is not None:
            self.at(index)
        window = torch.randint(256, (33,), generator=torch.Generator().manual_seed(index))
        return window[:-1], window[1:]


def raises() -> _Tokens:
    """Sample 20 (step 2 of global batch 8, replica 1 of 2) cannot be read."""

    def at(index: int) -> None:
        if index == 20:
            raise ValueError("sample 20 is damaged")

    return _Tokens(at)


def dies() -> _Tokens:
    """Whoever reads sample 20 is killed."""

    def at(index: int) -> None:
        if index == 20:
            os.kill(os.getpid(), signal.SIGKILL)

    return _Tokens(at)


def stops() -> _Tokens:
    """Whoever reads sample 20 is stopped."""

    def at(index: int) -> None:
        if index == 20:
            os.kill(os.getpid(), signal.SIGSTOP)

    return _Tokens(at)


def slow() -> _Tokens:
    """Every sample after the first step takes a while; says in a file that training is under way."""

    def at(index: int) -> None:
        if index >= 8:
            mark = os.environ.get("MESHWRIGHT_TEST_MARK")
            if mark:
                Path(mark).touch()
            time.sleep(0.2)

    return _Tokens(at)


def wrong_shape() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64))]
