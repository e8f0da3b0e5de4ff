"""What an older plan has not sent, where the new one keeps nothing: it goes with the next gradient, and into checkpoints until then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.errors import UsageError
from meshwright.run.codecs.base import RESIDUAL
from meshwright.run.codecs.saved import Group, load_packed
from meshwright.run.traffic.ddp import PlannedTraffic


def traffic(owed: dict[str, torch.Tensor], groups: list[Any] = []) -> Any:
    made: Any = object.__new__(PlannedTraffic)
    made._owed, made.groups, made.step, made.rank, made.world = owed, groups, 5, 0, 1
    return made


def test_a_checkpoint_holds_what_is_owed() -> None:
    owed = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([7.0, 8.0])}
    state = traffic(owed).state_dict()
    group = Group(codec="topk:density=0.5", tensors=(("b", (2,)), ("a", (2, 3))))
    step, found = load_packed(state, {"0": group}, rank=0, world=1)
    assert step == 5 and found["0"][RESIDUAL].tolist() == [7.0, 8.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    with pytest.raises(UsageError):
        load_packed(state, {"0": Group(codec="fp16", tensors=group.tensors)}, rank=0, world=1)
    assert load_packed(traffic({}).state_dict(), {}, rank=0, world=1) == (5, {})


def test_the_next_gradient_takes_it_along_once() -> None:
    made = traffic({"a": torch.tensor([[1.0, 2.0]]), "c": torch.tensor([5.0])})
    gradients = [torch.zeros(2), torch.ones(1)]
    for _ in range(2):
        made._send_owed(["a", "b"], gradients)
        assert gradients[0].tolist() == [1.0, 2.0] and gradients[1].tolist() == [1.0]
    assert list(made._owed) == ["c"]


def test_what_has_a_place_in_the_new_groups_is_not_owed() -> None:
    def group(names: list[str], values: list[float]) -> Any:
        state = {RESIDUAL: torch.tensor(values)} if values else {}
        return SimpleNamespace(names=names, shapes=[(2,), (1, 1)][: len(names)], state=state)

    made = traffic({"z": torch.tensor([9.0])}, [group(["a", "b"], [1.0, 2.0, 3.0]), group(["d"], [])])
    owed = made._without_place([group(["a"], [0.0, 0.0]), group(["b", "d"], [])])
    assert {n: t.tolist() for n, t in owed.items()} == {"z": [9.0], "b": [[3.0]]}
    made.groups[0].state[RESIDUAL].zero_()
    assert owed["b"].item() == 3.0, "a copy"
