"""Which small collectives get a plan: both it and the built-in backend are measured, unless a setting or a plan file says what runs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import meshwright.run.group.engine
from meshwright.io.fabric.name import load_fabric
from meshwright.run.group.audit import Audit, Told
from meshwright.run.group.engine import Engine
from meshwright.run.group.plans import MAX_TRIED_RANKS, GroupPlans
from meshwright.run.group.record_file import pack_call
from meshwright.run.group.recorder import Recorder
from meshwright.run.group.settings import Settings, settings_from
from meshwright.run.group.verdict import View, first_cause


class Store(dict[str, bytes]):
    def set(self, key: str, value: bytes) -> None:
        self[key] = value


def plans(ranks: int = 4, **settings: Any) -> GroupPlans:
    fabric = load_fabric(f"laptop:{ranks}")
    names = tuple(d.name for d in fabric.devices)
    return GroupPlans(Settings(cache="0", **settings), Store(), 0, ranks, devices=names, fabric=fabric, timeout_s=1.0)


def test_small_ones_are_tried_where_that_is_asked_for() -> None:
    asked = Settings(small=True)
    assert asked.tries(asked.min_bytes - 1) and not asked.tries(asked.min_bytes) and not Settings().tries(8)
    assert not replace(asked, builtin=False).tries(8), "then every plan is used, and the sizes below have none"
    assert settings_from({"MESHWRIGHT_SMALL": "1"}).small and not settings_from({}).small
    assert plans(small=True).tries("all-reduce", 0, 8) and not plans(MAX_TRIED_RANKS + 1, small=True).tries("all-reduce", 0, 8)
    assert plans(small=True).fingerprint() != plans().fingerprint()


@pytest.mark.parametrize("op", ["all-reduce", "all-gather", "broadcast"])
def test_one_plan_of_few_rounds_serves_all_small_sizes(op: str) -> None:
    made = plans(small=True)
    eight, many = made.candidates(op, 0, 8), made.candidates(op, 0, 20_000)
    assert isinstance(eight, list) and isinstance(many, list) and eight[0].name == many[0].name
    assert eight[0].strategy in ("recursive-doubling", "halving-doubling", "direct", "bruck", "rooted-tree")
    assert sum(key.startswith("plan/") for key in made.store) == 1


def test_a_threshold_keeps_small_ones_with_the_built_in_backend() -> None:
    assert plans(min_bytes=4096).candidates("all-reduce", 0, 8) == "below 4096 bytes"
    assert plans(builtin=False, small=True).candidates("all-reduce", 0, 8) == f"below {1 << 15} bytes"


def test_what_is_agreed_on_before_a_trial_has_a_number_of_its_own() -> None:
    """A neighbour that hears late what was agreed on compares it with the call of that number: with the barrier of the trial it would differ."""
    engine = Engine.__new__(Engine)
    engine.settings, engine.size, engine.plans, engine.recorder = Settings(small=True), 2, plans(2, small=True), Recorder(None, (0, 1), 0)
    told: list[Told | None] = []
    audit = Audit(engine._last, engine._digest, engine._call_at, lambda: engine._asking, lambda: engine._agreements)
    neighbour = Audit(engine._last, engine._digest, engine._call_at, lambda: None)

    engine._asking, engine._planning, engine.inside, engine.timeout_s, engine._agreements = None, False, [0], 1.0, 0
    engine.health = SimpleNamespace(agree=lambda what, limit_s: told.append(audit.due(1e9)))  # type: ignore[assignment]
    call = pack_call("all-reduce", -1, "SUM", "float32")
    assert isinstance(engine.candidates("all-reduce", -1, 8, call), list)
    engine.recorder.asked(pack_call("barrier", -1, "", ""), 0, 0)
    assert told[0] is not None
    neighbour.hear(1, told[0])
    assert neighbour.differs() is None


def test_a_call_that_is_asked_about_is_seen_beside_one_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks are told apart by the call that they ask about, also while the thread still walks the small broadcast before it."""
    broadcast, reduction, gather = (pack_call(op, root, "", "int64") for op, root in (("broadcast", 2), ("all-reduce", -1), ("all-gather", -1)))

    def walking(recorder: Recorder, rank: int, *more: Any) -> View:
        peer = {0: 2, 1: 2, 2: 0}[rank]
        history = [(1, broadcast, 24, 5)]
        return View(rank=rank, state="walking", number=1, asked=1, history=history, step=3, peer=peer, waiting=True, receives=rank < 2)

    monkeypatch.setattr(meshwright.run.group.engine, "view_of", walking)
    views = {}
    for rank in range(3):
        engine = Engine.__new__(Engine)
        engine.rank, engine.recorder, engine.inside, engine._planning, engine._worker = rank, Recorder(None, (0, 1, 2), rank), [2], False, None
        engine._asking = 2, gather if rank == 1 else reduction, 24, 0
        views[rank] = engine._look()
    found = first_cause(views, 3)
    assert (found.code, found.rank) == ("rank-diverged", 1) and "all-gather" in found.message
