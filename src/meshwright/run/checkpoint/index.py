"""A checkpoint's index: what it says of the job, and of tensors their whole shapes and the region of each that every file holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ...errors import FormatError, UsageError
from ...plan.regions import ITEM_BYTES, Region, TensorSpec, elements, flat_region, intersection, region_along, whole_region
from .parts import Part

__all__ = ["SCHEMA", "VERSION", "CheckpointIndex", "SavedRank", "checkpoint_folder", "decode_index", "find_index", "tensors_of"]

SCHEMA, VERSION = "meshwright.checkpoint", 3


class SavedRank(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a rank tells the one that writes the index. `parts`: by name of a tensor in its file; `scalars`: optimizer state that is no tensor."""

    digest: str
    losses: list[float | None]
    parts: dict[str, Part]
    scalars: dict[str, Any] = {}
    residual: dict[str, str] = {}  # its file of what its codecs have not sent, if it has one -> sha256


class CheckpointIndex(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`step`: training steps done; the next one to run. `files`: name -> sha256 of every rank's file.

    `model`: what any plan that may load it has in common (`checkpoint_parts.model_identity`). `parts`: tensor name -> file -> what of it is there.
    """

    schema: str = SCHEMA
    version: int = VERSION
    plan: str
    step: int
    data: str
    seed: int
    losses: list[float | None]
    files: dict[str, str]
    model: str = ""
    parts: dict[str, dict[str, Part]] = {}
    scalars: dict[str, Any] = {}
    residuals: dict[str, str] = {}  # file of what a rank's codecs have not sent -> sha256
    writers: dict[str, str] = {}  # file -> rank and device that wrote it, in words


def checkpoint_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


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


def tensors_of(index: CheckpointIndex, where: str) -> tuple[dict[str, TensorSpec], dict[str, dict[str, Region]]]:
    """(tensors, file -> tensor -> region). Raises: FormatError where files disagree about a tensor, or ranges leave it."""
    tensors: dict[str, TensorSpec] = {}
    files: dict[str, dict[str, Region]] = {f: {} for f in index.files}
    for name, parts in index.parts.items():
        for file, part in parts.items():
            if part.dtype not in ITEM_BYTES:
                raise FormatError(f"{name}: unknown type {part.dtype!r}", where=where)
            spec = TensorSpec(tuple(part.shape), ITEM_BYTES[part.dtype])
            region = region_along(spec.shape, part.axis, part.ranges)
            inside = part.axis < len(spec.shape) and all(elements([c]) == elements([b]) for b in region if (c := _inside(b, spec)) is not None)
            if tensors.setdefault(name, spec) != spec or not inside or any(_inside(b, spec) is None for b in region if elements([b])):
                raise FormatError(f"{name}: what {file} holds contradicts the other files", where=where, hint="the index is damaged")
            if part.flat:
                if len(part.flat) != 2 or not 0 <= part.flat[0] <= part.flat[1] <= elements(region):
                    told = f"{name}: {file} cannot hold elements {part.flat} of {elements(region)}"
                    raise FormatError(told, where=where, hint="the index is damaged")
                region = flat_region(region, *part.flat)
            files.setdefault(file, {})[name] = region
    return tensors, files


def _inside(box: tuple[tuple[int, int], ...], spec: TensorSpec) -> tuple[tuple[int, int], ...] | None:
    return intersection(box, whole_region(spec.shape)[0])
