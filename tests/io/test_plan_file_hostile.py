# ruff: noqa: E501
"""Plan files from somebody else: whatever the bytes, the answer is a valid plan or one FormatError that says where."""

from __future__ import annotations

import gzip
import json
import re
import resource
import sys
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_plan_file import full_plan, swap

from meshwright.errors import FormatError, MeshwrightError
from meshwright.io import strict_json
from meshwright.io.columns import Budget, decode_column
from meshwright.io.plan.plan import plan_bytes, plan_from_bytes, program_bytes, program_from_bytes, read_plan
from meshwright.plan.plan import CycleEntry
from meshwright.program.builder import ProgramBuilder
from meshwright.program.calls import inline, refuse_too_many_steps
from meshwright.program.fold import expand
from meshwright.program.hash import program_hash
from meshwright.program.program import MAX_EXECUTED_STEPS, MAX_STEPS, Fold, FoldAxis, Program
from meshwright.program.tables import Steps

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import megatron_step

GOOD = plan_bytes(full_plan())
DOCUMENT = json.loads(GOOD)


def changed(path: str, value: Any) -> bytes:
    """The good plan with the field at `path` (dots, numbers for lists) set to `value`; `...` removes it."""
    document = json.loads(GOOD)
    at, *rest = path.split(".")
    here = document
    for key in rest:
        here, at = here[int(at) if isinstance(here, list) else at], key
    if value is ...:
        del here[at]
    else:
        here[int(at) if isinstance(here, list) else at] = value
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("surprise", 1, "plan.json: Object contains unknown field `surprise`"),
        ("job", ..., "plan.json: Object missing required field `job`"),
        ("schema", "meshwright.graph", "plan.json: schema: is a 'meshwright.graph' document, expected 'meshwright.plan'"),
        ("version", 2, "plan.json: version: version 2 was written by a newer meshwright"),
        ("version", 0, "plan.json: version: must be >= 1, got 0"),
        ("version", "1", "plan.json: version: Expected `int`, got `str`"),
        ("seed", 1 << 70, "plan.json: an integer beyond 64 bits: 1180591620717411303424..."),
        ("seed", 1.5, "plan.json: seed: Expected `int`, got `float`"),
        ("kind", "cake", "plan.json: kind: Invalid enum value 'cake'"),
        ("placement", ["cpu0"], "plan.json: placement: has 1 names, the program has 2 actors"),
        ("cycle", [], "plan.json: cycle: a plan needs at least one program"),
        ("cycle.0.program", "f" * 64, "plan.json: cycle[0]: names the program 'ffffffffffffffff', which the plan does not hold"),
        ("cycle.0.table", {"a": "e" * 64}, "plan.json: cycle[0]: names the program 'eeeeeeeeeeeeeeee', which the plan does not hold"),
        ("layout.data", 0, "plan.json: layout.data: must be >= 1, got 0"),
        ("layout.microbatches", -2, "plan.json: layout.microbatches: must be >= 1, got -2"),
        ("layout.tensor", 2, "plan.json: layout: data x tensor x pipeline is 4, the program has 2 ranks"),
        ("layout.stages.0.index", 3, "plan.json: layout.stages[0].index: must be 0, got 3"),
        ("layout.stages.0.segments", ["s9"], "plan.json: layout.stages[0].segments: names the segment 's9', which the layout does not hold"),
        ("layout.segments.0.saved_bytes", -1, "plan.json: layout.segments[0].saved_bytes: must be >= 0, got -1"),
        ("layout.values.0.size_bytes", -1, "plan.json: layout.values[0]: sizes must be >= 0"),
        ("layout.values.0.reduce", "min", "plan.json: layout.values[0].reduce: must be sum or max, got 'min'"),
        ("layout.values.0.split", {"dim": 2}, "plan.json: layout.values[0].split: dimensions, blocks, groups and sizes"),
        ("layout.values.0.split", {"dim": 1, "blocks": 0}, "plan.json: layout.values[0].split: dimensions, blocks, groups and sizes"),
        ("layout.shards", [{"param": "w", "axis": -1}], "plan.json: layout.shards[0]: dimensions, blocks, groups and sizes"),
        ("layout.shards", [{"param": "w", "axis": 0, "mixed": [[0, 0]]}], "plan.json: layout.shards[0]: dimensions, blocks, groups and sizes"),
        ("layout.shards", [{"param": "w", "axis": 0, "shares": [1, 1]}], "plan.json: layout.shards[0].shares: must be one positive share"),
        ("layout.segments.0.shares", [0], "plan.json: layout.segments[0].shares: must be one positive share for each of 1 ranks"),
        ("layout.partial_gradients", [{"param": "w", "groups": [[0, 1]]}], "plan.json: layout.partial_gradients[0].groups: groups must hold"),
        ("layout.losses", [{"node": "n", "smoothing": "x"}], "plan.json: layout.losses[0].smoothing: must be torch or megatron, got 'x'"),
        ("bound.value", "0.5", "plan.json: bound.value: not an exact rational: '0.5'"),
        ("bound.parts.0.value", "1/0", "plan.json: bound.parts[0].value: not an exact rational: '1/0'"),
        ("prediction.memory_peak_bytes", [-5], "plan.json: prediction.memory_peak_bytes: must be >= 0"),
        ("prediction.time_s", None, "plan.json: prediction.time_s: Expected `float`, got `null`"),
        ("programs", [], "plan.json: cycle[0]: names the program"),
        ("programs", [DOCUMENT["programs"][0]] * 2, "plan.json: programs[1]: the same program twice"),
        ("programs.0", 7, "plan.json: programs[0]: Expected `object`, got `int`"),
        ("programs.0.version", 9, "plan.json: programs[0].version: version 9 was written by a newer meshwright"),
        ("programs.0.ranks", 0, "plan.json: programs[0].ranks: must be >= 1, got 0"),
        ("programs.0.ranks", -4, "plan.json: programs[0].ranks: Expected `int` >= 0"),
        ("programs.0.requires", ["warp"], "plan.json: programs[0].requires: needs the feature 'warp': written by a newer meshwright"),
        ("programs.0.requires", ["lag"], "plan.json: programs[0].requires: says ['lag'], the program needs []"),
        ("programs.0.hash", "0" * 64, "plan.json: programs[0].hash: the contents have the hash"),
        ("programs.0.name", "other", "plan.json: programs[0].hash: the contents have the hash"),
        ("programs.0.steps.color", [1], "plan.json: programs[0].steps: unknown field 'color'"),
        ("programs.0.steps.kind", ..., "plan.json: programs[0].steps: lacks the field 'kind'"),
        ("programs.0.steps.rows", 1 << 40, "plan.json: programs[0].steps.rows: Expected `int` <= 10000000"),
        ("programs.0.steps.rows", -1, "plan.json: programs[0].steps.rows: Expected `int` >= 0"),
        ("programs.0.steps.rows", 9, "plan.json: programs[0].steps.kind: has 8 entries, expected 9"),
        ("programs.0.steps.kind", {"count": 8, "runs": [9, 8]}, "plan.json: programs[0].steps.kind[0]: must be 0..3, got 9"),
        ("programs.0.steps.kind", [1, 1, 1, 1, 1, 1, 1], "plan.json: programs[0].steps.kind: has 7 entries, expected 8"),
        ("programs.0.steps.kind", "kinds", "plan.json: programs[0].steps.kind: Expected `object | array`, got `str`"),
        ("programs.0.steps.kind", [1, 1, 1, 1, 1, 1, 1, 1.5], "plan.json: programs[0].steps.kind[7]: Expected `int`, got `float`"),
        ("programs.0.steps.kind", [1 << 40] * 8, "plan.json: programs[0].steps.kind[0]: must be -2147483648..2147483647, got 1099511627776"),
        ("programs.0.steps.count", [1, 1, 1, 1, 1, 1, 1, -1], "plan.json: programs[0].steps.count[7]: must be 0..2147483647, got -1"),
        ("programs.0.steps.src_chunk", [9] * 8, "plan.json: programs[0].steps.src_chunk[0]: chunks 9..10 of a buffer with 4"),
        ("programs.0.steps.kind", {"count": 8, "runs": [1, 9]}, "plan.json: programs[0].steps.kind.runs: a run must be 1..8 long"),
        ("programs.0.steps.kind", {"count": 8, "runs": [1, 4, 1, 5]}, "plan.json: programs[0].steps.kind.runs: runs add up to 9, `count` says 8"),
        ("programs.0.steps.kind", {"count": 8, "runs": [1, 4, 1]}, "plan.json: programs[0].steps.kind.runs: must be pairs"),
        ("programs.0.steps.kind", {"count": 8, "delta": [1]}, "plan.json: programs[0].steps.kind.delta: has 1 entries, `count` says 8"),
        ("programs.0.steps.kind", {"count": 8}, "plan.json: programs[0].steps.kind: a packed column has exactly one of"),
        ("programs.0.steps.kind", {"count": 8, "delta": [1] * 8, "runs": [1, 8]}, "plan.json: programs[0].steps.kind: a packed column has exactly"),
        ("programs.0.steps.kind", {"count": 8, "delta": [1 << 80]}, "plan.json: an integer beyond 64 bits"),
        ("programs.0.steps.after_ptr", [0, 1 << 30, 0, 0, 0, 0, 0, 0, 0], "plan.json: programs[0].steps.after_ptr: row pointers must rise"),
        ("programs.0.steps.after_ptr", [0, 2147483647, -2, 0, 0, 0, 0, 0, 0], "plan.json: programs[0].steps.after_ptr: row pointers must rise"),
        ("programs.0.lanes.end", [4, 400], "plan.json: programs[0].lanes.start: lanes must tile the step table"),
        ("programs.0.buffers.name.index", [0, 5], "plan.json: programs[0].buffers.name.index: must be 0..1"),
        ("programs.0.buffers.name.number", [0], "plan.json: programs[0].buffers.name.number: has 1 entries, expected 0 or 2"),
        ("programs.0.buffers.alias_of", [-1, 2], "plan.json: programs[0].buffers.alias_of[1]: must be -1..1, got 2"),
        ("programs.0.channels.sets", {"ptr": [1], "values": []}, "plan.json: programs[0].channels.sets: row pointers must rise"),
        ("programs.0.channels.sets", {"ptr": [], "values": []}, "plan.json: programs[0].channels.sets.ptr: needs at least one entry"),
        ("programs.0.calls.names", ["x"], "plan.json: programs[0].hash"),
        ("programs.0.contract", {"op": "juggle", "inputs": [], "outputs": [], "root": -1}, "plan.json: programs[0].contract.op: unknown operation 'juggle'"),
        ("programs.0.contract", {"op": "all-reduce", "inputs": [[0, 0, 1]], "outputs": [], "root": -1}, "plan.json: programs[0].contract.inputs: has 1"),
        ("programs.0.contract", {"op": "all-reduce", "inputs": [[0, 0, 9]] * 2, "outputs": [], "root": 0}, "programs[0].contract.inputs[0]: chunks 0..9 of a buffer with 4"),
        ("programs.0.contract", {"op": "all-reduce", "inputs": [], "outputs": [], "root": 2}, "plan.json: programs[0].contract.root: must be -1..1, got 2"),
        ("programs.0.fold", {"axes": [{"name": "a", "size": 3, "stride": 1, "kind": "shift"}], "buffer_shift": [[0, 0]]}, "fold.axes: axes of 3 ranks"),
        ("programs.0.fold", {"axes": [{"name": "a", "size": 2, "stride": 1, "kind": "shift"}], "buffer_shift": []}, "fold.buffer_shift: has 0 rows"),
        ("programs.0.fold", {"axes": [{"name": "a", "size": 3, "stride": 1, "kind": "xor"}], "buffer_shift": [[0, 0]]}, "an xor axis needs a power"),
        ("programs.0.fold", {"axes": [{"name": "a", "size": 0, "stride": 1, "kind": "xor"}], "buffer_shift": [[0, 0]]}, "fold.axes[0].size: Expected"),
        ("programs.0.sizes", {"rows": 1, "name": {"words": ["s"], "index": [0], "number": []}, "lower": [5], "expected": [4], "upper": [9],
                              "producer": [-1]}, "plan.json: programs[0].sizes.expected[0]: must be 5.."),
        ("programs.0.sizes", {"rows": 1, "name": {"words": ["s"], "index": [0], "number": []}, "lower": [5], "expected": [5], "upper": [9],
                              "producer": [8]}, "plan.json: programs[0].sizes.producer[0]: must be -1..7, got 8"),
    ],
)  # fmt: skip
def test_refusals_point(path: str, value: Any, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        plan_from_bytes(changed(path, value))
    assert message in str(caught.value)


def test_a_call_of_a_program_that_is_not_there() -> None:
    from meshwright.io.plan.program import program_json
    from meshwright.program.builder import ProgramBuilder
    from meshwright.program.hash import program_hash

    b = ProgramBuilder(ranks=2)
    comm = b.comm("dp", [0, 1])
    for rank in range(2):
        b.lane(rank).call(b.call(comm, "a" * 64, []))
    program = b.build()
    document = {**DOCUMENT, "programs": [json.loads(program_json(program))], "cycle": [{"program": program_hash(program)}]}
    with pytest.raises(FormatError, match=r"programs\[0\].calls.names: calls the program 'aaaaaaaaaaaaaaaa', which the plan does not hold"):
        plan_from_bytes(json.dumps(document).encode())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"null", "Expected `object`, got `null`"),
        (b"[" * 300_000, "plan.json"),
        (GOOD[:-20], "not JSON"),
        (GOOD + b"{}", "not JSON"),
        (GOOD.replace(b'"seed":7', b'"seed":7,"seed":8'), "the key 'seed' occurs twice in one object"),
        (GOOD.replace(b'"why":"fastest"', b'"why":"a","why":"b"'), "the key 'why' occurs twice in one object"),
        (GOOD.replace(b'"op":[-1', b'"op":[0],"op":[-1'), "the key"),
        (GOOD.replace(b'"seed":7', b'"seed":NaN'), "not JSON"),
        (GOOD.replace(b'"time_s":0.1', b'"time_s":1e999'), "out of range"),
        (GOOD.replace(b'"limit":3', b'"limit":-1e999'), "out of range"),
        (GOOD.replace(b'"limit":3', b'"limit":Infinity'), "not JSON"),
        (GOOD.replace(b'"limit":3', b'"limit":' + b"9" * 5000), "plan.json"),
        (GOOD.replace(b'"limit":3', b'"limit":' + b"[" * 100_000 + b"]" * 100_000), "nested too deeply"),
        (GOOD.replace(b'"limit":3', b'"limit":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "nested too deeply"),
        (GOOD.replace(b'"fastest"', b'"\xff\xfe"'), "plan.json"),
        (GOOD.replace(b'"fastest"', b'"\\ud800"'), "plan.json"),
        (GOOD.replace(b'"fastest"', b'"\x00"'), "plan.json"),
    ],
)
def test_broken_documents(data: bytes, message: str) -> None:
    assert data != GOOD
    with pytest.raises(FormatError, match=re.escape(message)) as refused:
        plan_from_bytes(data)
    assert message != "not JSON" or "cut short" in refused.value.hint


def test_strings_that_look_like_lists_are_left_alone() -> None:
    """The strict pass skips long lists of integers, but not inside strings: two keys that differ only there are two keys."""
    long = ",".join("0" * 40)
    data = GOOD.replace(b'"limit":3', f'"a[{long}]":1,"a[{long},1]":2'.encode())
    assert plan_from_bytes(data).decisions["layout"]["options"] == {f"a[{long}]": 1, f"a[{long},1]": 2}
    with pytest.raises(FormatError, match="occurs twice"):
        plan_from_bytes(GOOD.replace(b'"limit":3', f'"\\"[{long}]":1,"\\"[{long}]":2'.encode()))


def test_gzip(tmp_path: Path) -> None:
    path = tmp_path / "plan.json.gz"
    packed = gzip.compress(GOOD)
    for data, message in [
        (packed[:-30], "truncated gzip"),
        (packed[:40] + b"\0" * 20 + packed[60:], "damaged gzip"),
        (packed[:-8] + b"\0" * 8, "damaged gzip"),
        (packed + b"more", "data after the end of the gzip stream"),
        (gzip.compress(b" " * (65 << 20), mtime=0), "unpacks to more than 67108864 bytes"),
    ]:
        path.write_bytes(data)
        with pytest.raises(FormatError, match=message):
            read_plan(path)
    path.write_bytes(packed)
    assert plan_bytes(read_plan(path)) == GOOD


def test_a_file_that_never_ends() -> None:
    with pytest.raises(FormatError, match="larger than 1000000 bytes"):
        strict_json.read_document("/dev/zero", limit=1_000_000)


def test_runs_are_counted_before_arrays_are_made() -> None:
    """A few bytes that ask for gigabytes: refused from the header, without the memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = MAX_STEPS
    columns = {name: {"count": rows, "runs": [0, rows]} for name in DOCUMENT["programs"][0]["steps"] if name != "rows"}
    for value, message in [
        ({"rows": rows, **columns}, "expands to more numbers than its size allows"),
        ({"rows": rows, **columns, "kind": {"count": 10**12, "runs": [0, 10**12]}}, "has 1000000000000 entries, expected 10000000"),
        ({"rows": 8, **columns, "kind": {"count": 8, "runs": [0, 2**62, 0, 2**62, 0, 2**62, 0, 2**62, 0, 8]}}, "a run must be 1..8 long"),
    ]:
        with pytest.raises(FormatError, match=message):
            plan_from_bytes(changed("programs.0.steps", value))
    with pytest.raises(FormatError, match="the limit is 10000000"):
        decode_column(b'{"count": 10000001, "runs": [0, 10000001]}', int, where="x", budget=Budget(0))  # type: ignore[arg-type]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 300 * 1024, f"{grown} KiB"


def test_repeats_are_counted_before_anything_is_unrolled() -> None:
    """A repeat count is one number in a file; what it stands for is bounded, and the error points at the lane."""
    message = (
        r"plan.json: programs\[0\].lanes.repeat\[1\]: lanes execute 8589934592 steps with their repeats, the limit is 16777216; "
        r"this one 4 steps 2147483647 times"
    )
    with pytest.raises(FormatError, match=message):
        plan_from_bytes(changed("programs.0.lanes.repeat", [1, 2**31 - 1]))
    with pytest.raises(FormatError, match=r"program.lanes.repeat\[0\]: lanes execute"):
        program_bytes(replace(swap(), lanes=replace(swap().lanes, repeat=np.array([2**31 - 1] * 2, np.int32))))
    fits = replace(swap(), lanes=replace(swap().lanes, repeat=np.array([MAX_EXECUTED_STEPS // 8] * 2, np.int32)))
    assert program_from_bytes(program_bytes(fits)).executed_steps == MAX_EXECUTED_STEPS
    with pytest.raises(FormatError, match=r"programs\[0\].ranks: 1073741824 ranks and switches, the limit is 1048576"):
        plan_from_bytes(changed("programs.0.ranks", 1 << 30))
    with pytest.raises(FormatError, match=r"plan.json: layout.microbatches: must be <= 16777216, got 4611686018427387904"):
        plan_from_bytes(changed("layout.microbatches", 1 << 62))


def test_what_is_large_for_good_reasons_passes() -> None:
    """A million stored steps; one step of 1,024 devices, folded, with the rings that it calls."""
    n = 1_000_000
    b = ProgramBuilder(ranks=1)
    b.lane(0).nop()
    one = b.build()
    columns = {c.name: np.repeat(getattr(one.steps, c.name)[:1], n) for c in fields(one.steps) if not c.name.startswith("after")}
    none = np.zeros(0, np.int32)
    steps = Steps(**columns, after_ptr=np.zeros(n + 1, np.int32), after_step=none, after_lag=none)
    million = replace(one, steps=steps, lanes=replace(one.lanes, end=np.array([n], np.int32)))
    assert program_from_bytes(program_bytes(million)).executed_steps == n
    shape = megatron_step.Shape(pipeline=16, tensor=8, data=8, microbatches=64, layers=96)
    program, rings = megatron_step.build(shape, folded=True)
    refuse_too_many_steps(program, rings)
    assert program.ranks == 1024 and program_from_bytes(program_bytes(program)).executed_steps > 3_000_000


def test_calls_are_counted_before_anything_is_inlined() -> None:
    """200 calls of a callee of 4 x 2,000,000 steps: each in bounds, together not."""
    callee = replace(swap(), lanes=replace(swap().lanes, repeat=np.array([2_000_000] * 2, np.int32)))
    b = ProgramBuilder(ranks=2)
    comm = b.comm("dp", [0, 1])
    name = program_hash(callee)
    for rank in range(2):
        lane = b.lane(rank)
        for _ in range(100):
            lane.call(b.call(comm, name, []))
    caller = b.build()
    plan = replace(full_plan(), programs={name: callee, program_hash(caller): caller}, cycle=(CycleEntry(program=program_hash(caller)),))
    with pytest.raises(FormatError) as caught:
        plan_bytes(plan)
    assert caught.value.where.startswith("plan.programs[") and "].calls.callee[" in caught.value.where
    assert re.search(r"calls stand for \d+ steps and edges, the limit is 16777216; 100 calls of program", caught.value.message)
    with pytest.raises(FormatError, match="calls stand for"):
        inline(caller, plan.programs)


def test_scratch_of_calls_is_counted() -> None:
    c = ProgramBuilder(ranks=1, name="wide")
    c.buffer(0, chunks=2**31 - 1, chunk_bytes=1)
    c.lane(0, repeat=2).nop()
    b = ProgramBuilder(ranks=1)
    comm = b.comm("dp", [0])
    b.lane(0).call(b.call(comm, "wide", []))
    with pytest.raises(FormatError, match=r"program 'wide'.buffers.chunks\[0\]: needs 4294967294 chunks of scratch, the limit is 2147483647"):
        inline(b.build(), {"wide": c.build()})


def test_a_fold_is_counted_before_it_is_expanded() -> None:
    b = ProgramBuilder(ranks=1 << 20, name="wide")
    lane = b.lane(0)
    for _ in range(17):
        lane.nop()
    shift = np.zeros((1, 0), np.int32)
    wide = replace(b.build(), fold=Fold((FoldAxis("data", 1 << 20, 1, "shift"),), shift))
    assert program_from_bytes(program_bytes(wide)).executed_steps == 17 << 20
    with pytest.raises(FormatError, match=r"wide\.fold: 17 steps of 1048576 symmetric ranks are 17825792, the limit is 16777216"):
        expand(wide)


def test_names_made_of_a_long_word_and_numbers_are_counted() -> None:
    rows, word = 60_000, "x" * 200_000
    document = json.loads(PROGRAM)
    document["buffers"]["name"] = {"words": [word], "index": {"count": rows, "runs": [0, rows]}, "number": {"count": rows, "delta_runs": [1, rows]}}
    document["buffers"]["rows"] = rows
    for column, value in document["buffers"].items():
        if column not in ("rows", "name", "last"):
            first = 0 if isinstance(value, dict) else value[0]
            document["buffers"][column] = {"count": rows, "runs": [first, rows]}
    with pytest.raises(FormatError, match=r"buffers\.name: 12000000000 characters, more than the document's size allows"):
        program_from_bytes(json.dumps(document).encode())


PROGRAM = program_bytes(swap())


def answer(data: bytes) -> None:
    """A value or a FormatError that names the file; whatever is read is written and read again."""
    try:
        plan = plan_from_bytes(data)
    except FormatError as error:
        assert error.where.startswith("plan.json")
        assert len(str(error)) < 600
        return
    assert plan_bytes(plan_from_bytes(plan_bytes(plan))) == plan_bytes(plan)


@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    answer(data)


@settings(max_examples=300)
@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255), st.integers(0, 3))
def test_flipped_truncated_doubled(at: int, byte: int, how: int) -> None:
    answer([GOOD[:at] + bytes([byte]) + GOOD[at + 1 :], GOOD[:at], GOOD[:at] + GOOD[at + byte :], GOOD[:at] + GOOD[at : at + byte] + GOOD[at:]][how])


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [path, *(leaf for key, item in value.items() for leaf in leaves(item, (*path, key)))]
    if isinstance(value, list):
        return [path, *(leaf for i, item in enumerate(value) for leaf in leaves(item, (*path, i)))]
    return [path]


PATHS = [path for path in leaves(DOCUMENT) if path]
ODD = st.sampled_from([
    None, True, -1, 0, 1, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**63, -(2**63), 10**30, 0.5, 1e308, "", "x", [], [[]], {}, [0], [-1] * 8,
    {"count": 8, "runs": [0, 8]}, {"count": 0, "delta": []}, {"ptr": [0], "values": []}, {"words": [], "index": [], "number": []},
])  # fmt: skip


@settings(max_examples=600, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(PATHS), ODD), min_size=1, max_size=3))
def test_structure_aware_edits(edits: list[tuple[tuple[Any, ...], Any]]) -> None:
    document = json.loads(GOOD)
    for path, value in edits:
        here = document
        try:
            for key in path[:-1]:
                here = here[key]
            here[path[-1]] = deepcopy(value)  # a later edit may change it
        except (KeyError, IndexError, TypeError):
            continue  # an earlier edit took this place away
    answer(json.dumps(document).encode())


@settings(max_examples=300)
@given(st.data())
def test_edited_programs_keep_every_index_in_range(data: st.DataObject) -> None:
    """With the hash mended, only validation stands between a file and code that indexes without looking."""
    document = json.loads(PROGRAM)
    table = data.draw(st.sampled_from(["lanes", "steps", "channels", "buffers"]))
    column = data.draw(st.sampled_from([c for c, v in document[table].items() if isinstance(v, list) and v]))
    where = data.draw(st.integers(0, len(document[table][column]) - 1))
    document[table][column][where] = data.draw(st.sampled_from([-(2**31), -2, -1, 0, 1, 2, 3, 5, 100, 2**31 - 1]))
    try:
        program_from_bytes(json.dumps(document).encode())
    except FormatError as error:
        if "actual" in error.data:  # only the hash is wrong: a careful forger would mend it
            document["hash"] = error.data["actual"]
            walk(program_from_bytes(json.dumps(document).encode()))


def walk(program: Program) -> None:
    """Touch everything a message, a report or an engine would."""
    for step in program.iter_steps():
        program.describe(step.index)
    program.message_bytes()
    assert program.executed_steps >= 0
    assert program.requires is not None


def test_nothing_is_opened_or_run_while_parsing() -> None:
    events: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event in ("open", "exec", "compile", "socket.connect", "subprocess.Popen", "os.system", "import"):
            events.append(f"{event} {arguments[:1]}")

    watching = False
    plan_from_bytes(GOOD)  # imports that happen once
    sys.addaudithook(hook)
    watching = True
    plan_from_bytes(GOOD)
    for data in (changed("seed", "x"), changed("programs.0.steps.kind", [9] * 8), GOOD[:100]):
        with pytest.raises(MeshwrightError):
            plan_from_bytes(data)
    watching = False
    assert events == []
