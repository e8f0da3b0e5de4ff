"""What LSTMs keep for backward and need beside it, against real runs watched by hooks and by the allocator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshwright.capture.graph import capture
from meshwright.graph.liveness import segment_workspace

BATCH, LENGTH, WIDTH = 4, 40, 128


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0].flatten(1)


def one() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Net(), (torch.randn(BATCH, LENGTH, WIDTH), torch.zeros(BATCH, dtype=torch.int64))


def two_ways() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Net(num_layers=2, bidirectional=True), (torch.randn(BATCH, LENGTH, WIDTH), torch.zeros(BATCH, dtype=torch.int64))


def really_saved(net: nn.Module, x: torch.Tensor) -> int:
    """Bytes of the distinct storages that autograd keeps, parameters aside."""
    parameters = {p.untyped_storage().data_ptr() for p in net.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in parameters:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes(), t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = net.lstm(x)
    assert result[0].requires_grad
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("name", ["one", "two_ways"])
def test_what_is_kept(name: str) -> None:
    net, (x, _) = globals()[name]()
    graph = capture(f"{__file__}:{name}", loss="cross-entropy")
    saved = sum(graph.storages[s].size_bytes for n in graph.nodes if n.target == "aten.lstm.input" for s in n.saved)
    assert saved == pytest.approx(really_saved(net, x), rel=0.01)


def test_workspaces_of_forward_and_backward() -> None:
    """Peaks of what the allocator gave beyond what was there before and stays."""
    graph = capture(f"{__file__}:one", loss="cross-entropy")
    (name,) = (n.name for n in graph.nodes if n.target == "aten.lstm.input")
    net, (x, _) = one()
    net.lstm(x)[0].sum().backward()  # whatever is made once
    net.zero_grad(set_to_none=True)
    with torch.profiler.profile(profile_memory=True) as watched:
        loss = net.lstm(x)[0].sum()
    forward = peaks(watched)
    with torch.profiler.profile(profile_memory=True) as watched:
        loss.backward()
    for found, (peak, stays) in zip(segment_workspace(graph, [name]), (forward, (peaks(watched)[0], 0)), strict=True):
        assert found == pytest.approx(peak - stays, rel=0.1)


def peaks(watched: Any) -> tuple[int, int]:
    """(most bytes, bytes at the end) of the allocator's events."""
    most = now = 0
    for event in watched.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most, now
