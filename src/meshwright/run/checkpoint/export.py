"""A checkpoint's weights for others: one safetensors file, or a folder for torch.distributed.checkpoint, in the model's own names.

Whatever the layout, the whole of each tensor is put together from the parts that the ranks' files hold; of a safetensors file one tensor is in memory
at a time. Names are those of the module's `state_dict()`, where the model can still be built; tied weights stand under each of theirs then.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from ...errors import FormatError, MeshwrightError, UsageError
from ...io.atomic import write_chunks
from ...io.shard_file import DTYPES, ShardFile, require_digest
from ...plan.regions import Region, TensorSpec, intersection, local_shape, lying, minus, whole_region
from ..train.update import AVERAGE
from .index import CheckpointIndex, find_index, tensors_of

__all__ = ["Exported", "export_checkpoint", "whole_tensors"]

NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Exported:
    """`names`: of the tensors written; `notes`: what differs from the module's own state."""

    step: int
    names: tuple[str, ...]
    size_bytes: int
    notes: tuple[str, ...] = ()


@dataclass
class _Whole:
    """Reads whole tensors of a checkpoint, whose files are verified first."""

    folder: Path
    index: CheckpointIndex

    def __post_init__(self) -> None:
        self.tensors, self.files = tensors_of(self.index, str(self.folder))
        for file, digest in self.index.files.items():
            require_digest(self.folder / file, digest)

    def dtype(self, name: str) -> torch.dtype:
        found: torch.dtype = getattr(torch, next(iter(self.index.parts[name].values())).dtype)
        return found

    def read(self, name: str) -> torch.Tensor:
        """Raises: FormatError where no file holds some part of it."""
        spec, dtype = self.tensors[name], self.dtype(name)
        whole = torch.empty(spec.shape, dtype=dtype)
        left = [*whole_region(spec.shape)] if prod(spec.shape) else []
        for file, held in sorted(self.files.items()):
            if left and name in held:
                left = self._fill(whole, left, self.folder / file, name, held[name], spec, dtype)
        if left:
            raise FormatError(f"no file of the checkpoint holds all of {name}", where=str(self.folder), hint="the checkpoint is damaged")
        return whole

    def _fill(
        self, whole: torch.Tensor, left: Sequence[tuple[tuple[int, int], ...]], path: Path, name: str, region: Region, spec: TensorSpec,
        dtype: torch.dtype,
    ) -> list[tuple[tuple[int, int], ...]]:  # fmt: skip
        """What is still missing after a file's part of it is read."""
        missing = list(left)
        with ShardFile(path) as file:
            for box in region:
                for common in [c for piece in missing if (c := intersection(piece, box)) is not None]:
                    part = torch.empty([b - a for a, b in common], dtype=dtype)
                    file.read(name, local_shape(region), dtype, lying(region, common), part.reshape(-1).view(torch.uint8).numpy())
                    target = whole
                    for dim, (low, high) in enumerate(common):
                        target = target.narrow(dim, low, high - low)
                    target.copy_(part)
                    missing = minus(missing, common)
        return missing


def whole_tensors(folder: Path, *, model: str = "", average: bool = False) -> tuple[CheckpointIndex, dict[str, str], _Whole, tuple[str, ...]]:
    """(index, own name -> name in the checkpoint, reader, notes) of the newest checkpoint below a run's folder.

    `average`: moving averages in place of the weights that have them. Raises: UsageError where there is no checkpoint, or no average; FormatError.
    """
    path, index = find_index(folder)
    reader = _Whole(path, index)
    source = {n.partition(":")[2]: n for n in reader.tensors if n.startswith(("param:", "buffer:"))}
    if average:
        averaged = {p: name for p in source if (name := f"optimizer:{p}:{AVERAGE}") in reader.tensors}
        if not averaged:
            raise UsageError("the checkpoint holds no average of the weights", where=str(path), hint="train a plan made with --ema")
        source |= averaged
    own, notes = _own_names(model) if model else ({}, ("the plan beside the checkpoint names no model: names are the checkpoint's",))
    if own:
        missing = sorted(n for n, first in own.items() if first not in source)
        notes = (*notes, *((f"the module has {missing[0]!r}, the checkpoint does not",) if missing else ()))
        source = {n: source[first] for n, first in own.items() if first in source}
    return index, source, reader, notes


def _own_names(model: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Names of the module's state, each with that of the tensor among the first names of parameters and buffers."""
    from ...capture.resolve import build_model

    try:
        module = build_model(model, device="meta").module
    except MeshwrightError as error:
        return {}, (f"the model cannot be built here ({error.message}): names are the checkpoint's, buffers that are not saved are among them",)
    first = {id(t): n for n, t in (*reversed([*module.named_buffers()]), *reversed([*module.named_parameters()]))}
    state = module.state_dict(keep_vars=True)
    return {n: first[id(t)] for n, t in state.items() if isinstance(t, torch.Tensor) and id(t) in first}, ()


def export_checkpoint(folder: Path, out: Path, *, to: str = "safetensors", model: str = "", average: bool = False) -> Exported:
    """Write a checkpoint's weights and buffers. `to`: "safetensors", a file; "dcp", a folder that must not exist yet, for `dcp.load`.

    Raises: as `whole_tensors`; UsageError where `out` cannot be written.
    """
    index, source, reader, notes = whole_tensors(folder, model=model, average=average)
    size = sum(prod(reader.tensors[n].shape) * reader.tensors[n].item_bytes for n in source.values())
    if to == "dcp":
        _write_dcp(out, source, reader)
    else:
        write_chunks(out, _safetensors(source, reader, index.step))
    return Exported(index.step, tuple(source), size, notes)


def _safetensors(source: dict[str, str], reader: _Whole, step: int) -> Iterator[bytes]:
    """The file's bytes: its header, then tensor by tensor."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", "step": str(step)}}
    at = 0
    for name, stored in source.items():
        spec = reader.tensors[stored]
        end = at + prod(spec.shape) * spec.item_bytes
        header[name] = {"dtype": NAME_OF[reader.dtype(stored)], "shape": list(spec.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for stored in source.values():
        yield reader.read(stored).reshape(-1).view(torch.uint8).numpy().tobytes()


def _write_dcp(out: Path, source: dict[str, str], reader: _Whole) -> None:
    import torch.distributed.checkpoint as dcp

    if out.exists():
        raise UsageError("exists already", where=str(out), hint="name a new folder")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that one process saves, which is meant
        dcp.save({name: reader.read(stored) for name, stored in source.items()}, checkpoint_id=str(out), no_dist=True)
