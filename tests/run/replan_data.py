"""Data for the tests of restarts, used by file name: sample i is what it is by i alone; `slow` ends after the first steps, in a wait."""

from __future__ import annotations

import time

import torch


class _Windows:
    def __init__(self, wait_from: int) -> None:
        self.wait_from = wait_from

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if 0 <= self.wait_from <= index:
            time.sleep(1000)  # until it is killed
        window = torch.randint(32, (7,), generator=torch.Generator().manual_seed(index))
        return window[:-1], window[1:]


def windows() -> _Windows:
    """As `slow`, without waiting; the same samples."""
    return _Windows(-1)


def slow() -> _Windows:
    return _Windows(48)
