"""Plans as files: JSON with schema and version, or the same gzipped (`.json.gz`). Equal plans give equal bytes.

    {"schema": "meshwright.plan", "version": 1, "kind": "training", "job": {...}, "target_fabric": {...}, "placement": [...],
     "cycle": [...], "decisions": {...}, "layout": {...}, "bound": {...}, "prediction": {...}, "alternatives": [...], "seed": 0,
     "versions": {...}, "programs": [...]}

Programs are sorted by content hash; each is a document of `io.plan.program`. Reading trusts nothing: sizes are capped before
parsing, every field is typed, every index is in range, hashes match, and every refusal is a FormatError such as
`plan.json: programs[0].steps.kind[7]: must be 0..3, got 9`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from ...bound import Bound, fraction_of
from ...codec.codec import parse_codec
from ...errors import FormatError, MeshwrightError
from ...kernels.stages import stage as in_stage
from ...plan.batch_statistics import batch_sums
from ...plan.context import KINDS as EXCHANGE_KINDS
from ...plan.context import layout_exchanges
from ...plan.copies import COPIED
from ...plan.plan import SCHEMA, VERSION, Alternative, CycleEntry, ParamShard, Plan, Prediction, ShapePlan, TrainingLayout, ValueSplit
from ...plan.shapes import SHAPE
from ...plan.shards import expert_shards
from ...program.calls import refuse_too_many_steps
from ...program.hash import program_hash
from ...program.program import MAX_EXECUTED_STEPS, Program
from ...program.program import SCHEMA as PROGRAM_SCHEMA
from ...program.validate import validate
from ..columns import Budget
from ..strict_json import check_finite, decode, header, read_document, refuse_ambiguous, write_document
from .program import program_bytes, program_from_bytes, program_from_json, program_json

__all__ = [
    "plan_bytes", "plan_from_bytes", "program_bytes", "program_from_bytes", "program_hash", "read_plan", "read_plan_or_program", "read_program",
    "write_plan", "write_program",
]  # fmt: skip

KINDS = ("training", "collective", "pipeline", "experts", "placement", "tables", "halo", "imported")


class _Plan(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    schema: str = SCHEMA
    version: int = VERSION
    kind: Literal["training", "collective", "pipeline", "experts", "placement", "tables", "halo", "imported"]
    job: dict[str, Any]
    target_fabric: dict[str, Any]
    placement: tuple[str, ...]
    cycle: tuple[CycleEntry, ...]
    decisions: dict[str, Any]
    layout: TrainingLayout | None
    bound: Bound | None
    prediction: Prediction | None
    alternatives: tuple[Alternative, ...]
    seed: int
    versions: dict[str, str]
    shapes: tuple[ShapePlan, ...] = ()
    programs: list[msgspec.Raw]


_PLAN = msgspec.json.Decoder(_Plan)


# ---- writing -----------------------------------------------------------------------------------------------------------
def write_plan(path: str | os.PathLike[str], plan: Plan) -> None:
    """Write all or nothing; gzipped when `path` ends in `.gz`. Raises: FormatError for a plan that could not be read back."""
    write_document(path, plan_bytes(plan))


def plan_bytes(plan: Plan) -> bytes:
    """The plan as JSON, a line per field and per table of its programs.

    Raises: FormatError when something in it is not JSON (NaN included), or a program stands under a name that is not its hash.
    """
    if plan.kind not in KINDS:
        raise FormatError(f"must be one of {', '.join(KINDS)}, got {plan.kind[:64]!r}", where="plan.kind")
    programs = []
    for name in sorted(plan.programs):
        hashed = program_hash(plan.programs[name])
        if hashed != name:
            hint = "name programs by program_hash()"
            raise FormatError(f"is named {name[:16]!r}, but its content hash is {hashed[:16]}...", where="plan.programs", hint=hint)
        validate(plan.programs[name])
        programs.append(program_json(plan.programs[name], hashed=hashed))
    fields: dict[str, Any] = {
        "schema": SCHEMA, "version": VERSION, "kind": plan.kind, "job": plan.job, "target_fabric": plan.target_fabric,
        "placement": plan.placement, "cycle": plan.cycle, "decisions": plan.decisions, "layout": plan.layout, "bound": plan.bound,
        "prediction": plan.prediction, "alternatives": plan.alternatives, "seed": plan.seed, "versions": plan.versions,
    }  # fmt: skip
    if plan.shapes:  # left out of documents of one shape
        fields["shapes"] = plan.shapes
    lines = [f'"{name}":'.encode() + _json(value, f"plan.{name}") for name, value in fields.items()]
    lines.append(b'"programs":[\n' + b",\n".join(programs) + b"\n]")
    _check(plan, "plan")
    return b"{" + b",\n".join(lines) + b"}\n"


def _json(value: Any, where: str) -> bytes:
    try:
        check_finite(msgspec.to_builtins(value), where)
        return msgspec.json.encode(value, order="deterministic")
    except (TypeError, OverflowError, RecursionError) as error:
        raise FormatError(f"cannot be written as JSON: {str(error)[:160]}", where=where) from error


def write_program(path: str | os.PathLike[str], program: Program) -> None:
    """Write one program on its own, all or nothing; gzipped when `path` ends in `.gz`."""
    write_document(path, program_bytes(program))


# ---- reading -----------------------------------------------------------------------------------------------------------
@in_stage("reading the plan")
def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read and validate a plan, plain or gzipped; `-` is standard input.

    Raises: UsageError if the file cannot be read, FormatError if it is not exactly a valid plan.
    """
    return plan_from_bytes(read_document(path), where=_name(path))


def read_program(path: str | os.PathLike[str]) -> Program:
    """Read and validate a program that stands in a file of its own. Raises like `read_plan`."""
    return program_from_bytes(read_document(path), where=_name(path))


def read_plan_or_program(path: str | os.PathLike[str]) -> Plan | Program:
    """Whichever of the two the file's `schema` says. Raises like `read_plan`."""
    data, where = read_document(path), _name(path)
    if f'"schema":"{PROGRAM_SCHEMA}"'.encode() in data[:256].replace(b" ", b"").replace(b"\n", b""):
        return program_from_bytes(data, where=where)
    return plan_from_bytes(data, where=where)


def _name(path: str | os.PathLike[str]) -> str:
    return "standard input" if str(path) == "-" else Path(path).name


def plan_from_bytes(data: bytes, *, where: str = "plan.json") -> Plan:
    """The plan that `data` holds. Raises: FormatError, with file and field, for anything that is not exactly a valid plan."""
    header(data, schema=SCHEMA, version=VERSION, where=where)
    raw = decode(data, _PLAN, where)
    refuse_ambiguous(data, where)
    budget = Budget(len(data))
    programs: dict[str, Program] = {}
    for i, document in enumerate(raw.programs):
        at = f"{where}: programs[{i}]"
        name, program = program_from_json(document, where=at, budget=budget)
        if name in programs:
            raise FormatError("the same program twice", where=at)
        programs[name] = program
    plan = Plan(
        kind=raw.kind, job=raw.job, target_fabric=raw.target_fabric, placement=raw.placement, programs=programs, cycle=raw.cycle,
        decisions=raw.decisions, layout=raw.layout, bound=raw.bound, prediction=raw.prediction, alternatives=raw.alternatives,
        seed=raw.seed, versions=raw.versions, shapes=raw.shapes,
    )  # fmt: skip
    _check(plan, where)
    return plan


def _check(plan: Plan, where: str) -> None:
    """What the parts of a plan must say about each other. Raises FormatError."""
    dot = "." if where == "plan" else ": "
    if not plan.cycle:
        raise FormatError("a plan needs at least one program", where=f"{where}{dot}cycle")
    for i, entry in enumerate(plan.cycle):
        for name in (entry.program, *entry.table.values()):
            if name not in plan.programs:
                raise FormatError(f"names the program {name[:16]!r}, which the plan does not hold", where=f"{where}{dot}cycle[{i}]")
    for i, program in enumerate(plan.programs.values()):
        for callee in program.calls.names:
            if callee not in plan.programs:
                raise FormatError(f"calls the program {callee[:16]!r}, which the plan does not hold", where=f"{where}{dot}programs[{i}].calls.names")
        refuse_too_many_steps(program, plan.programs, where=f"{where}{dot}programs[{i}].")
    actors = plan.main.ranks + plan.main.switches
    if len(plan.placement) != actors:
        raise FormatError(f"has {len(plan.placement)} names, the program has {actors} actors", where=f"{where}{dot}placement")
    if plan.layout is not None:
        _check_layout(plan.layout, plan.main.ranks, f"{where}{dot}layout")
    _check_claims(plan.bound, plan.prediction, f"{where}{dot}")
    _check_shapes(plan, f"{where}{dot}")


def _check_claims(bound: Bound | None, prediction: Prediction | None, where: str) -> None:
    if bound is not None:
        _check_bound(bound, f"{where}bound")
    if prediction is not None:
        for field in ("memory_peak_bytes", "memory_worst_bytes", "cpu_s"):
            if any(value < 0 for value in getattr(prediction, field)):
                raise FormatError("must be >= 0", where=f"{where}prediction.{field}")


def _check_shapes(plan: Plan, where: str) -> None:
    """Every further shape runs the cycle's next program, on the ranks of the plan."""
    if not plan.shapes:
        return
    if plan.layout is None or [e.when for e in plan.cycle] != [SHAPE] * (1 + len(plan.shapes)):
        raise FormatError(f"a plan of {1 + len(plan.shapes)} shapes has a layout, and a program for each", where=f"{where}cycle")
    for i, (shape, entry) in enumerate(zip(plan.shapes, plan.cycle[1:], strict=True)):
        if shape.program != entry.program:
            raise FormatError("is another program than the cycle's", where=f"{where}shapes[{i}].program")
        if plan.programs[shape.program].ranks != plan.main.ranks:
            raise FormatError("is for other ranks than the plan's", where=f"{where}shapes[{i}].program")
        if any(n < 1 for size, _ in shape.inputs for n in size):
            raise FormatError("dimensions must be >= 1", where=f"{where}shapes[{i}].inputs")
        _check_layout(shape.layout, plan.main.ranks, f"{where}shapes[{i}].layout")
        _check_claims(shape.bound, shape.prediction, f"{where}shapes[{i}].")


def _check_layout(layout: TrainingLayout, ranks: int, where: str) -> None:
    for field in ("data", "tensor", "pipeline", "microbatch_size", "microbatches", "global_batch", "context", "expert"):
        if getattr(layout, field) < 1:
            raise FormatError(f"must be >= 1, got {getattr(layout, field)}", where=f"{where}.{field}")
    if layout.data % layout.expert:
        raise FormatError(f"must divide the {layout.data} replicas, got {layout.expert}", where=f"{where}.expert")
    for i, shard in enumerate(expert_shards(layout)):
        if shard.axis or shard.blocks != 1 or shard.shares or shard.groups or shard.mixed:
            raise FormatError("experts are divided in equal parts along the first dimension", where=f"{where}.expert_shards[{i}]")
    if layout.data % layout.context:
        raise FormatError(f"must divide the {layout.data} replicas, got {layout.context}", where=f"{where}.context")
    listed = {value.name for value in layout.values}
    for i, x in enumerate(layout_exchanges(layout)):
        if x.kind not in EXCHANGE_KINDS.values():
            raise FormatError(f"must be one of {', '.join(EXCHANGE_KINDS.values())}, got {x.kind[:64]!r}", where=f"{where}.exchanges[{i}].kind")
        of = x.copies or None
        if (x.kind == COPIED) != (of is not None) or (of is not None and (not 1 <= of.members <= of.experts or of.experts % of.members)):
            raise FormatError("copies of experts belong to an exchange of that kind, of members that divide them", where=f"{where}.exchanges[{i}]")
        if unknown := [v for v in (x.source, x.target) if v not in listed]:
            raise FormatError(f"names the value {unknown[0][:64]!r}, which the layout does not list", where=f"{where}.exchanges[{i}]")
    if unknown := [v for v in batch_sums(layout) if v not in listed]:
        raise FormatError(f"names the value {unknown[0][:64]!r}, which the layout does not list", where=f"{where}.batch_sums")
    if layout.zero_level not in (0, 1, 2, 3):
        raise FormatError(f"must be 0 to 3, got {layout.zero_level}", where=f"{where}.zero_level")
    if layout.bucket_bytes < 0:
        raise FormatError(f"must be >= 0, got {layout.bucket_bytes}", where=f"{where}.bucket_bytes")
    for i, bucket in enumerate(layout.buckets):
        if not 0 <= bucket.stage < len(layout.stages):
            raise FormatError(f"must be 0 to {len(layout.stages) - 1}, got {bucket.stage}", where=f"{where}.buckets[{i}].stage")
        if bucket.codec:
            try:
                parse_codec(bucket.codec)
            except MeshwrightError as error:
                raise FormatError(error.message, where=f"{where}.buckets[{i}].codec", hint=error.hint) from None
    each = layout.replica_microbatches
    if each and (len(each) != layout.data or min(each) < 1 or max(each) != layout.microbatches):
        message = f"must give each of the {layout.data} replicas at least one micro-batch, at most {layout.microbatches} (and that to one of them)"
        raise FormatError(message, where=f"{where}.replica_microbatches")
    if layout.microbatches > MAX_EXECUTED_STEPS:
        raise FormatError(f"must be <= {MAX_EXECUTED_STEPS}, got {layout.microbatches}", where=f"{where}.microbatches")
    if layout.ranks != ranks:
        raise FormatError(f"data x tensor x pipeline is {layout.ranks}, the program has {ranks} ranks", where=where)
    keys = {segment.key for segment in layout.segments}
    _check_placement(layout, where)
    for i, stage in enumerate(layout.stages):
        if stage.index != i:
            raise FormatError(f"must be {i}, got {stage.index}", where=f"{where}.stages[{i}].index")
        missing = [key for key in stage.segments if key not in keys]
        if missing:
            raise FormatError(f"names the segment {missing[0][:64]!r}, which the layout does not hold", where=f"{where}.stages[{i}].segments")
    for i, segment in enumerate(layout.segments):
        for field in ("saved_bytes", "left_bytes", "forward_workspace_bytes", "backward_workspace_bytes"):
            if getattr(segment, field) < 0:
                raise FormatError(f"must be >= 0, got {getattr(segment, field)}", where=f"{where}.segments[{i}].{field}")
        for j, r in enumerate(segment.recompute):
            if len(r.starts) * (len(r.again) + len(r.needed) + len(r.kept)) > 16 * len(segment.nodes):  # regions share no calls
                raise FormatError(f"more positions than its {len(segment.nodes)} nodes allow", where=f"{where}.segments[{i}].recompute[{j}]")
            outside = [s + k for s in r.starts for k in (*r.again, *r.needed, *r.kept) if not 0 <= s + k < len(segment.nodes)]
            if outside:
                message = f"position {outside[0]} is none of the segment's {len(segment.nodes)} nodes"
                raise FormatError(message, where=f"{where}.segments[{i}].recompute[{j}]")
    for i, value in enumerate(layout.values):
        if value.size_bytes < 0 or any(dim < 0 for dim in value.shape):
            raise FormatError("sizes must be >= 0", where=f"{where}.values[{i}]")
        if value.reduce not in ("sum", "max"):
            raise FormatError(f"must be sum or max, got {value.reduce[:64]!r}", where=f"{where}.values[{i}].reduce")
    _check_splits(layout, where)


def _check_placement(layout: TrainingLayout, where: str) -> None:
    """Indices that exist; whether the placement is a possible one is the checker's to say."""
    count = len(layout.stages)
    if not layout.placement and count < layout.pipeline:
        raise FormatError(f"must be at least {layout.pipeline}, one per pipeline index, got {count}", where=f"{where}.stages")
    for i, row in enumerate(layout.placement):
        if len(row) != count or any(not 0 <= p < layout.pipeline for p in row):
            message = f"must give a pipeline index of 0 to {layout.pipeline - 1} for each of the {count} stages"
            raise FormatError(message, where=f"{where}.placement[{i}]")
    copies = max(1, len(layout.placement))
    if layout.copy_of and (len(layout.copy_of) != layout.microbatches or any(not 0 <= c < copies for c in layout.copy_of)):
        message = f"must give one of {copies} copies for each of the {layout.microbatches} micro-batches"
        raise FormatError(message, where=f"{where}.copy_of")


def _check_splits(layout: TrainingLayout, where: str) -> None:
    """Splits whose ranges can be worked out; whether they fit their tensors is known once the model is."""
    cuts: list[tuple[str, ParamShard | ValueSplit, int, int]] = [(f"shards[{i}]", s, s.axis, layout.tensor) for i, s in enumerate(layout.shards)]
    cuts += [(f"values[{i}].split", v.split, v.split.dim, len(v.shape)) for i, v in enumerate(layout.values) if v.split is not None]
    for name, cut, axis, limit in cuts:
        low = min(axis, cut.groups, cut.blocks - 1, *(min(size - 1, groups) for size, groups in cut.mixed), 0)
        if low < 0 or (name.startswith("values") and axis >= limit):
            raise FormatError("dimensions, blocks, groups and sizes are positive and exist", where=f"{where}.{name}")
    named = [(name, cut.shares) for name, cut, _, _ in cuts] + [(f"segments[{i}]", s.shares) for i, s in enumerate(layout.segments)]
    for name, shares in named:
        if shares and (len(shares) != layout.tensor or min(shares) < 1):
            raise FormatError(f"must be one positive share for each of {layout.tensor} ranks", where=f"{where}.{name}.shares")
    for i, partial in enumerate(layout.partial_gradients):
        if sorted(x for g in partial.groups for x in g) != list(range(layout.tensor)):
            raise FormatError("groups must hold every tensor-parallel rank once", where=f"{where}.partial_gradients[{i}].groups")
    for i, loss in enumerate(layout.losses):
        if loss.smoothing not in ("torch", "megatron"):
            raise FormatError(f"must be torch or megatron, got {loss.smoothing[:64]!r}", where=f"{where}.losses[{i}].smoothing")


def _check_bound(bound: Bound, where: str) -> None:
    try:
        fraction_of(bound.value)
    except ValueError as error:
        raise FormatError(str(error)[:160], where=f"{where}.value") from error
    for i, part in enumerate(bound.parts):
        _check_bound(part, f"{where}.parts[{i}]")
