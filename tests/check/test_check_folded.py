"""Folded collectives proved class by class: what the expanded form proves is proved, what is broken is found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.check import check_program, whole
from meshwright.check.folded import fabric as folded_fabric
from meshwright.check.folded import orbits
from meshwright.check.folded import program as folded_check
from meshwright.check.folded.claim import Claim
from meshwright.check.folded.fabric import folded_link_time
from meshwright.check.folded.program import check_folded
from meshwright.check.program.links import link_time
from meshwright.check.verdict import Finding
from meshwright.decide.collective import CollectiveProblem, ForestColl, Ring
from meshwright.errors import FormatError, Unsupported
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric.name import load_fabric
from meshwright.program.fold import expand
from meshwright.program.fold_find import fold
from meshwright.program.fold_part import Lifted, part
from meshwright.program.program import Part, Program

OPS = ("all-gather", "reduce-scatter", "all-reduce")


def cluster(rails: bool = False) -> Fabric:
    """Four servers of two devices."""
    devices, switches, links = [], [Switch(name="net0"), Switch(name="net1")], []
    for x in range(4):
        devices += [Device(name=f"b{x}d{i}", group=f"b{x}") for i in range(2)]
        switches += [Switch(name=f"b{x}sw", group=f"b{x}")]
        for i in range(2):
            for a, b, rate in ((f"b{x}d{i}", f"b{x}sw", 9000), (f"b{x}d{i}", f"net{i if rails else 0}", 1000)):
                links += [Link(src=a, dst=b, rate_Bps=rate), Link(src=b, dst=a, rate_Bps=rate)]
    return Fabric(name="cluster", devices=tuple(devices), switches=tuple(switches), links=tuple(links))


def folded(op: str = "all-gather", fabric: Fabric | None = None, **options: object) -> Program:
    problem = CollectiveProblem.on(fabric or cluster(), op, 1 << 12)
    program = ForestColl(fold=True, trees=1, pieces=2, **options).plan(problem, rng=np.random.default_rng(0)).program  # type: ignore[arg-type]
    assert program.fold is not None
    return program


@pytest.mark.parametrize("unroll", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_right_programs_are_proved_like_their_expanded_form(op: str, unroll: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folded(op, unroll=unroll)
    assert check_folded(program) == []
    assert check_program(expand(program)).ok
    monkeypatch.setattr(folded_check, "check_orbits", refuse)
    assert check_folded(program) == []


def test_the_stored_lanes_alone_prove_what_hangs_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In rings all lanes hang together: class by class everything would be written out."""
    monkeypatch.setattr(folded_check, "MAX_COMPONENT_LANES", 1)
    monkeypatch.setattr(whole, "MAX_EXPANDED_STEPS", 10)
    program = rings("all-reduce")
    assert check_program(program).ok
    monkeypatch.setattr(orbits, "MAX_MOVES", 1)
    assert check_program(program).status == "unknown"


@pytest.mark.parametrize("rails", [True, False])
@pytest.mark.parametrize("unroll", [True, False])
def test_links_carry_what_those_of_the_expanded_form_carry(rails: bool, unroll: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = cluster(rails)
    program, places = folded("all-gather", fabric, unroll=unroll), tuple(d.name for d in fabric.devices)
    whole, found = link_time(expand(program), fabric, places)
    assert whole and not found
    assert folded_link_time(program, {}, fabric, places) == (whole, [])
    monkeypatch.setattr(folded_fabric, "_by_symmetry", lambda *_: {})
    assert folded_link_time(program, {}, fabric, places) == (whole, [])
    monkeypatch.setattr(folded_fabric, "MAX_LISTED_ROUTES", 1)
    _, found = folded_link_time(program, {}, fabric, places)
    assert [f.check for f in found] == ["links"] and "too many to look at" in found[0].message


@pytest.mark.parametrize("broken", ["aliases", "repeats", "route", "in place", "circle"])
def test_what_orbits_do_not_prove_is_left_to_classes(broken: str) -> None:
    program = rings("all-gather") if broken == "circle" else folded("all-gather")
    claim = Claim(program, Lifted(program), program.contracts[0])
    s, c = program.steps, program.contracts[0]
    if broken == "repeats":
        repeat = program.lanes.repeat.copy()
        repeat[0] += 1
        program = replace(program, lanes=replace(program.lanes, repeat=repeat))
    elif broken == "route":
        program = replace(program, channels=replace(program.channels, route=np.zeros_like(program.channels.route), routes=(("a", "b"),)))
    elif broken == "aliases":
        program = replace(program, buffers=replace(program.buffers, alias_of=np.full_like(program.buffers.alias_of, 0)))
    elif broken == "in place":
        own = c.inputs[0][2]
        later = tuple((b, (first + own) % (own * program.ranks), n) for b, first, n in c.inputs)
        claim = Claim(program, Lifted(program), replace(c, inputs=later))
    else:  # the first step of a lane waits for its last: a circle in any form
        lane = int(np.argmax(program.lanes.end - program.lanes.start))
        first, last = int(program.lanes.start[lane]), int(program.lanes.end[lane]) - 1
        rows = [[*s.after_step[s.after_ptr[i] : s.after_ptr[i + 1]].tolist(), *([last] if i == first else [])] for i in range(len(s))]
        flat = np.array([x for row in rows for x in row], np.int32)
        ptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
        program = replace(program, steps=replace(s, after_ptr=ptr, after_step=flat, after_lag=np.zeros(len(flat), np.int32)))
    with pytest.raises(Unsupported):
        orbits.check_orbits(program, claim)


@pytest.mark.parametrize("op", OPS)
def test_parts_of_all_members_are_the_whole(op: str) -> None:
    program = folded(op)
    lifted = Lifted(program)
    everything = part(lifted, [(lane, m) for m in range(4) for lane in range(len(program.lanes))])
    whole_form = expand(program)
    for name in ("kind", "parts", "count", "src_buffer", "src_chunk", "dst_buffer", "dst_chunk", "after_ptr", "after_step"):
        assert np.array_equal(getattr(everything.steps, name), getattr(whole_form.steps, name)), name
    ends = []
    for p in (everything, whole_form):
        sends = p.steps.chan_out[(p.steps.parts & Part.SEND) != 0]
        ends.append([(int(p.channels.src[c]), int(p.channels.dst[c])) for c in sends])
    assert ends[0] == ends[1]
    assert check_program(everything).ok
    seen: dict[int, int] = {}
    for lane in range(len(program.lanes)):
        component = lifted.component(lane, 10**6)
        assert component is not None
        seen[lane] = len(component)
        assert check_program(replace(part(lifted, component), contracts=())).ok
    assert lifted.component(0, 1) is None and max(seen.values()) > 1


def test_a_big_fold_is_proved_by_the_program_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "MAX_EXPANDED_STEPS", 10)
    verdict = check_program(folded())
    assert verdict.ok and any("class" in note or "every class" in note for note in verdict.notes)
    broken = check_program(_steps(folded(), "src_chunk", lambda p: _first(p, Part.READ), 1))
    assert broken.status == "wrong"
    other = replace(folded(), contracts=())
    left_open = check_program(other)
    assert left_open.status == "unknown" and "not proved" in left_open.findings[0].message


def _first(p: Program, flag: Part) -> int:
    return int(np.flatnonzero((p.steps.parts & flag) != 0)[0])


def _steps(p: Program, column: str, at: object, by: int) -> Program:
    values = getattr(p.steps, column).copy()
    values[at(p)] += by  # type: ignore[operator]
    return replace(p, steps=replace(p.steps, **{column: values}))


def rings(op: str) -> Program:
    problem = CollectiveProblem.on(load_fabric("star:4"), op, 1 << 12)
    program = fold(Ring().plan(problem, rng=np.random.default_rng(0)).program)
    assert program is not None and program.fold is not None
    return program


def refuse(*_: object) -> list[Finding]:
    raise Unsupported("not this way")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("way", ["classes", "classes on rails", "orbits", "orbits of rings"])
def test_mutants_are_found_wherever_the_expanded_form_is_wrong(op: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random damage to one stored step; neither folded proof may call right what the whole form shows wrong."""
    if way.startswith("classes"):
        monkeypatch.setattr(folded_check, "check_orbits", refuse)
    program = rings(op) if "rings" in way else folded(op, cluster(rails="rails" in way))
    seed = len(way)
    rng = np.random.default_rng(seed)
    for _ in range(8):
        step = int(rng.integers(len(program.steps)))
        s = program.steps
        kind = int(rng.integers(4))
        if kind == 0:
            mutant = _steps(program, "dst_chunk" if s.dst_buffer[step] >= 0 else "src_chunk", lambda _, step=step: step, 1)
        elif kind == 1:
            parts = s.parts.copy()
            parts[step] ^= int(Part.STORE)
            mutant = replace(program, steps=replace(s, parts=parts))
        elif kind == 2:
            mutant = replace(program, steps=replace(s, after_ptr=np.zeros_like(s.after_ptr), after_step=s.after_step[:0], after_lag=s.after_lag[:0]))
        else:
            dst = program.channels.dst.copy()
            dst[int(rng.integers(len(dst)))] += 1
            mutant = replace(program, channels=replace(program.channels, dst=dst % program.ranks))
        try:
            plain = check_program(expand(mutant))
        except (FormatError, Unsupported):  # what cannot be expanded is no program
            continue
        by_class = check_folded(mutant)
        assert bool(by_class) == (plain.status == "wrong"), (kind, step, by_class, plain.findings)


def test_cells_shared_by_two_components_are_a_race() -> None:
    """Every shard's second copy is written over the first one's place: each component alone is fine."""
    program = folded("all-gather")
    s = program.steps
    lane = program.lane_of_step()
    own = np.flatnonzero(((s.parts & Part.RECV) != 0) & (lane == lane[_first(program, Part.RECV)]))
    chunk = s.dst_chunk.copy()
    chunk[own] = (chunk[own] + 1) % int(program.buffers.chunks[0])
    found = check_folded(replace(program, steps=replace(s, dst_chunk=chunk)))
    assert found and {f.check for f in found} <= {"races", "values"}


def test_an_output_that_nobody_writes_is_found() -> None:
    program = folded("all-gather")
    lifted = Lifted(program)
    gone = {lane for lane, _ in lifted.component(0, 10**6) or []}
    keep = np.array([lane for lane in range(len(program.lanes)) if lane not in gone])
    steps = np.concatenate([np.arange(program.lanes.start[x], program.lanes.end[x]) for x in keep])
    width = (program.lanes.end - program.lanes.start)[keep]
    end = np.cumsum(width).astype(np.int32)
    kept = {name: getattr(program.lanes, name)[keep] for name in ("actor", "unit", "repeat", "role")}
    lanes = replace(program.lanes, start=(end - width).astype(np.int32), end=end, **kept)
    columns = {name: getattr(program.steps, name)[steps] for name in (
        "kind", "parts", "op", "chan_in", "chan_out", "src_buffer", "src_chunk", "dst_buffer", "dst_chunk", "count", "size",
    )}  # fmt: skip
    number = {int(old): new for new, old in enumerate(steps)}
    after = [[number[int(x)] for x in program.steps.after_step[program.steps.after_ptr[i] : program.steps.after_ptr[i + 1]]] for i in steps]
    ptr = np.concatenate([[0], np.cumsum([len(x) for x in after])]).astype(np.int32)
    flat = np.array([x for row in after for x in row], np.int32)
    cut = replace(program.steps, after_ptr=ptr, after_step=flat, after_lag=np.zeros(len(flat), np.int32), **columns)
    found = check_folded(replace(program, lanes=lanes, steps=cut))
    assert found and all(f.check == "values" and "never written" in f.message for f in found)


def test_a_contract_that_is_not_its_own_image_is_left_open() -> None:
    program = folded("all-gather")
    c = program.contracts[0]
    swapped = (c.inputs[0], c.inputs[2], c.inputs[1], *c.inputs[3:])
    with pytest.raises(Unsupported, match="images"):
        check_folded(replace(program, contracts=(replace(c, inputs=swapped),)))
    with pytest.raises(Unsupported, match="only all-gather"):
        check_folded(replace(program, contracts=(replace(c, op="gather", root=0),)))
    with pytest.raises(Unsupported, match="equal shares"):
        check_folded(replace(program, contracts=(replace(c, outputs=((c.outputs[0][0], 0, 1), *c.outputs[1:])),)))


def test_rings_hang_together_and_are_taken_whole() -> None:
    """One component is its own image under every member."""
    program = rings("all-gather")
    assert check_folded(program) == []
    s = program.steps
    chunk = s.dst_chunk.copy()
    chunk[_first(program, Part.STORE)] = (chunk[_first(program, Part.STORE)] + 1) % int(program.buffers.chunks[0])
    assert check_folded(replace(program, steps=replace(s, dst_chunk=chunk)))


def test_what_the_proof_does_not_cover_is_refused() -> None:
    program = folded()
    windowed = replace(program, buffers=replace(program.buffers, window=np.ones_like(program.buffers.window)))
    with pytest.raises(Unsupported, match="used again"):
        check_folded(windowed)
    aliased = replace(program, buffers=replace(program.buffers, alias_of=np.zeros_like(program.buffers.alias_of)))
    with pytest.raises(Unsupported, match="plain transfers"):
        check_folded(aliased)
