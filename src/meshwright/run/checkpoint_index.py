"""What a checkpoint's index says about tensors: whole shapes, and the region of each that every file holds."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..errors import FormatError, Unsupported, UsageError
from ..plan_regions import ITEM_BYTES, Region, TensorSpec, elements, intersection, region_along, whole_region
from .checkpoint import SCHEMA, VERSION, CheckpointIndex

__all__ = ["decode_index", "find_index", "tensors_of"]


def decode_index(data: bytes, where: str) -> CheckpointIndex:
    """Raises: FormatError."""
    try:
        index = msgspec.json.decode(data, type=CheckpointIndex)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(str(error), where=where) from None
    if index.schema != SCHEMA or index.version not in (1, 2, VERSION):
        raise FormatError(f"is {index.schema!r} version {index.version}, expected {SCHEMA!r} version {VERSION}", where=where)
    return index


def find_index(folder: Path) -> tuple[Path, CheckpointIndex]:
    """The newest checkpoint in a folder: of a run, of its checkpoints, or the checkpoint itself. Raises: UsageError, FormatError."""
    for root in (folder, folder / "checkpoint"):
        found = [root] if (root / "index.json").is_file() else sorted(p for p in root.glob("step-*") if (p / "index.json").is_file())
        if found:
            path = found[-1] / "index.json"
            return found[-1], decode_index(path.read_bytes(), str(path))
    raise UsageError("there is no checkpoint", where=str(folder), hint="name the folder that `train run` writes to (--out)")


def tensors_of(index: CheckpointIndex, where: str, *, divided: bool = False) -> tuple[dict[str, TensorSpec], dict[str, dict[str, Region]]]:
    """(tensors, file -> tensor -> region); `divided`: parts of which a file holds some elements only are allowed, their region is the whole part.

    Raises: FormatError where files disagree about a tensor or ranges leave it; Unsupported for divided parts where they are not allowed.
    """
    tensors: dict[str, TensorSpec] = {}
    files: dict[str, dict[str, Region]] = {f: {} for f in index.files}
    for name, parts in index.parts.items():
        for file, part in parts.items():
            if part.dtype not in ITEM_BYTES:
                raise FormatError(f"{name}: unknown type {part.dtype!r}", where=where)
            if part.flat and not divided:
                raise Unsupported(
                    f"{name} in {file}: shards of a sharding level above 0 cannot be reused piece by piece", where=where,
                    hint="resume from a checkpoint on shared storage (no --local-shards), or plan with --zero 0",
                )  # fmt: skip
            spec = TensorSpec(tuple(part.shape), ITEM_BYTES[part.dtype])
            region = region_along(spec.shape, part.axis, part.ranges)
            inside = part.axis < len(spec.shape) and all(elements([c]) == elements([b]) for b in region if (c := _inside(b, spec)) is not None)
            if tensors.setdefault(name, spec) != spec or not inside or any(_inside(b, spec) is None for b in region if elements([b])):
                raise FormatError(f"{name}: what {file} holds contradicts the other files", where=where, hint="the index is damaged")
            files.setdefault(file, {})[name] = region
    return tensors, files


def _inside(box: tuple[tuple[int, int], ...], spec: TensorSpec) -> tuple[tuple[int, int], ...] | None:
    return intersection(box, whole_region(spec.shape)[0])
