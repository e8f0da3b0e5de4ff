"""Float32 masters of trained parameters in bfloat16: the optimizer updates these, from gradients in float32, and the weights are what they round to.

Moments and averages are of masters too. To checkpoints a master is one more tensor of its weight's optimizer state (`master`), so they keep it, and
lay it out anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["MASTER", "Masters", "StateOfWeights"]

MASTER = "master"
NARROW = (torch.bfloat16,)


@dataclass
class Masters:
    """`of`: weight's id -> (weight, master)."""

    of: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = field(default_factory=dict)

    def given(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> list[tuple[str, torch.nn.Parameter]]:
        """What the optimizer is given: masters in place of narrow weights."""
        found = []
        for name, weight in named:
            if weight.dtype in NARROW:
                self.of[id(weight)] = weight, torch.nn.Parameter(weight.detach().float())
            found.append((name, self.updated(weight)))
        return found

    def updated(self, weight: torch.nn.Parameter) -> torch.nn.Parameter:
        return self.of[id(weight)][1] if id(weight) in self.of else weight

    def take_gradients(self) -> None:
        """Before a step. A weight that the loss does not use has none, outside of a plan's buffers."""
        for weight, master in self.of.values():
            master.grad = None if weight.grad is None else weight.grad.float()

    def give_weights(self) -> None:
        """After a step."""
        with torch.no_grad():
            for weight, master in self.of.values():
                weight.copy_(master)
                master.grad = None

    def follow_weights(self) -> None:
        """After weights were set: masters that do not round to them become them."""
        with torch.no_grad():
            for weight, master in self.of.values():
                master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight.to(master.dtype)))


class StateOfWeights:
    """An optimizer's state by the weights that ranks hold, masters among it: what checkpoints read and write."""

    def __init__(self, optimizer: Any, masters: Masters) -> None:
        self.optimizer, self.masters = optimizer, masters

    def __getitem__(self, weight: torch.nn.Parameter) -> MutableMapping[str, Any]:
        state: MutableMapping[str, Any] = self.optimizer.state[self.masters.updated(weight)]
        return _WithMaster(state, self.masters.of[id(weight)][1]) if id(weight) in self.masters.of else state

    def items(self) -> Iterator[tuple[torch.nn.Parameter, dict[str, Any]]]:
        weight_of = {id(master): weight for weight, master in self.masters.of.values()}
        states = {id(weight_of.get(id(p), p)): (weight_of.get(id(p), p), dict(s)) for p, s in self.optimizer.state.items()}
        for weight, master in self.masters.of.values():
            states.setdefault(id(weight), (weight, {}))[1][MASTER] = master
        yield from states.values()

    def values(self) -> Iterator[dict[str, Any]]:
        return (state for _, state in self.items())


class _WithMaster(MutableMapping[str, Any]):
    def __init__(self, state: MutableMapping[str, Any], master: torch.nn.Parameter) -> None:
        self.state, self.master = state, master

    def __getitem__(self, key: str) -> Any:
        return self.master if key == MASTER else self.state[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == MASTER:
            self.master.data.copy_(value)
        else:
            self.state[key] = value

    def __delitem__(self, key: str) -> None:
        del self.state[key]

    def __iter__(self) -> Iterator[str]:
        yield from (*self.state, MASTER)

    def __len__(self) -> int:
        return len(self.state) + 1
