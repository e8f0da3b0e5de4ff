"""Which small collectives get a plan: both it and the built-in backend are measured, unless a setting or a plan file says what runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.io.fabric.name import load_fabric
from meshwright.run.group.plans import MAX_TRIED_RANKS, GroupPlans
from meshwright.run.group.settings import SMALL_BYTES, Settings, settings_from


class Store(dict[str, bytes]):
    def set(self, key: str, value: bytes) -> None:
        self[key] = value


def plans(ranks: int = 4, **settings: Any) -> GroupPlans:
    fabric = load_fabric(f"laptop:{ranks}")
    names = tuple(d.name for d in fabric.devices)
    return GroupPlans(Settings(cache="0", **settings), Store(), 0, ranks, devices=names, fabric=fabric, timeout_s=1.0)


def test_by_default_small_ones_are_tried() -> None:
    assert Settings().planned_bytes == SMALL_BYTES and Settings().tries(SMALL_BYTES - 1) and not Settings().tries(SMALL_BYTES)
    assert not replace(Settings(), builtin=False).tries(8), "then every plan is used, and the sizes below have none"
    assert not replace(Settings(), min_bytes=4096).tries(8) and settings_from({"MESHWRIGHT_MIN_BYTES": "0"}).min_bytes == 0
    assert settings_from({}).min_bytes is None and plans().tries("all-reduce", 0, 8)
    assert not plans(MAX_TRIED_RANKS + 1).tries("all-reduce", 0, 8) and not plans(min_bytes=0).tries("all-reduce", 0, 8)


@pytest.mark.parametrize("op", ["all-reduce", "all-gather", "broadcast"])
def test_one_plan_of_few_rounds_serves_all_small_sizes(op: str) -> None:
    made = plans()
    eight, many = made.candidates(op, 0, 8), made.candidates(op, 0, 20_000)
    assert isinstance(eight, list) and isinstance(many, list) and eight[0].name == many[0].name
    assert eight[0].strategy in ("recursive-doubling", "halving-doubling", "direct", "bruck", "rooted-tree")
    assert sum(key.startswith("plan/") for key in made.store) == 1


def test_a_threshold_keeps_small_ones_with_the_built_in_backend() -> None:
    assert plans(min_bytes=4096).candidates("all-reduce", 0, 8) == "below 4096 bytes"
    assert plans(builtin=False).candidates("all-reduce", 0, 8) == f"below {SMALL_BYTES} bytes"
