"""A rank's part of a checkpoint where data replicas divide training state, before or after: sharding levels 1 to 3.

Files hold elements `Part.flat` of a flattened part of a tensor. The parts are joined, the parts make up the tensor, and of that the rank takes what
its own layout says. One tensor at a time is whole in memory. Every file is verified against the index's digest by every rank before it reads it.
Deviation from `restore`, which reads only the bytes that a rank needs: here files that hold a part of a needed tensor are read for all of that part.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import torch

from ..errors import FormatError
from ..plan import TrainingLayout
from .checkpoint import CheckpointIndex
from .checkpoint_parts import Part
from .recording import RestartBytes
from .segments import ParameterShard, RankModule
from .shard_file import ShardFile, digest_of
from .sharding import take_part

__all__ = ["restore_pieces"]


def restore_pieces(module: RankModule, optimizer: Any, layout: TrainingLayout, rank: int, index: CheckpointIndex, folder: Path) -> RestartBytes:
    """Restore parameters, buffers and optimizer state from shared storage.

    Raises: FormatError where files are not what the index says, or do not make up a tensor that fits.
    """
    return _Pieces(index, folder).load(module, optimizer, layout.coordinates(rank)[2], layout.tensor)


class _Pieces:
    def __init__(self, index: CheckpointIndex, folder: Path) -> None:
        self.index, self.folder, self.count = index, folder, RestartBytes()
        self.checked: set[str] = set()

    def load(self, module: RankModule, optimizer: Any, part: int, parts: int) -> RestartBytes:
        with torch.no_grad():
            for p, tensor, piece in module.kept():
                own = self.own(f"param:{p.name}", p, part, parts)
                tensor.copy_(own if piece is None else own.reshape(-1)[piece.first : piece.stop])
                self.count.needed_bytes += tensor.numel() * tensor.element_size()
            for name, b in module.buffers.items():
                b.copy_(self.fitting(f"buffer:{name}", tuple(b.shape), b.dtype))
                self.count.needed_bytes += b.numel() * b.element_size()
        for p, tensor, piece in module.updated():
            for name in (n for n in self.index.parts if n.startswith("optimizer:") and n[10:].rpartition(":")[0] == p.name):
                own = self.own(name, p, part, parts)
                if piece is not None and tuple(next(iter(self.index.parts[name].values())).shape) == p.full_shape:
                    own = own.reshape(-1)[piece.first : piece.stop].clone()
                optimizer.state[tensor][name.rpartition(":")[2]] = own
                self.count.needed_bytes += own.numel() * own.element_size()
            for name, value in self.index.scalars.items():
                if name.startswith("optimizer:") and name[10:].rpartition(":")[0] == p.name:
                    optimizer.state[tensor][name.rpartition(":")[2]] = value
        return self.count

    def own(self, name: str, p: ParameterShard, part: int, parts: int) -> torch.Tensor:
        """What this tensor-parallel rank holds of a parameter, or of a state of its shape; other states are whole on every rank."""
        whole = self.fitting(name, p.full_shape, p.tensor.dtype) if name.startswith("param:") else self.whole(name)
        if tuple(whole.shape) != p.full_shape:
            return whole
        return (whole if p.shard is None else take_part(whole, p.shard.axis, p.shard, part, parts)).to(p.tensor.device)

    def fitting(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        found = self.whole(name)
        if tuple(found.shape) != shape or found.dtype != dtype:
            raise FormatError(f"{name} is {tuple(found.shape)} {found.dtype}, expected {shape} {dtype}", where=str(self.folder))
        return found

    def whole(self, name: str) -> torch.Tensor:
        """A tensor put together from the files that hold parts of it; files that hold what others do are not read."""
        parts = self.index.parts.get(name)
        if not parts:
            raise FormatError(f"{name} is missing", where=str(self.folder), hint="the checkpoint is of another model")
        first = next(iter(parts.values()))
        whole = torch.empty(first.shape, dtype=getattr(torch, first.dtype))
        covered = torch.zeros(first.shape[first.axis] if first.axis >= 0 else 1, dtype=torch.bool)
        for file, part in parts.items():
            if (part.shape, part.dtype, part.axis) != (first.shape, first.dtype, first.axis):
                raise self.damaged(name, file)
            if part.axis < 0:
                return self.joined(name, part)
            if any(not 0 <= low <= high <= covered.numel() for low, high in part.ranges):
                raise self.damaged(name, file)
            if all(bool(covered[low:high].all()) for low, high in part.ranges):
                continue
            piece, at = self.joined(name, part), 0
            for low, high in part.ranges:
                whole.narrow(part.axis, low, high - low).copy_(piece.narrow(part.axis, at, high - low))
                covered[low:high] = True
                at += high - low
        if not bool(covered.all()):
            lacks = int((~covered).sum())
            raise FormatError(f"{name} lacks {lacks} of {covered.numel()} rows or columns", where=str(self.folder), hint="the checkpoint is damaged")
        return whole

    def joined(self, name: str, like: Part) -> torch.Tensor:
        """The part that `like` says, from the file that has all of it, or from all that hold elements of it."""
        shape = [sum(b - a for a, b in like.ranges) if i == like.axis else d for i, d in enumerate(like.shape)]
        same = {file: x for file, x in self.index.parts[name].items() if x.ranges == like.ranges}
        entire = next((file for file, x in same.items() if not x.flat), None)
        if entire is not None:
            return self.read(entire, name, shape, like.dtype)
        flat = torch.empty(prod(shape), dtype=getattr(torch, like.dtype))
        covered = torch.zeros(flat.numel(), dtype=torch.bool)
        for file, part in same.items():
            if len(part.flat) != 2 or not 0 <= part.flat[0] <= part.flat[1] <= flat.numel():
                raise self.damaged(name, file)
            low, high = part.flat
            if not bool(covered[low:high].all()):
                flat[low:high] = self.read(file, name, [high - low], part.dtype)
                covered[low:high] = True
        if not bool(covered.all()):
            lacks = int((~covered).sum())
            raise FormatError(f"{name} lacks {lacks} of {covered.numel()} elements", where=str(self.folder), hint="the checkpoint is damaged")
        return flat.view(shape)

    def damaged(self, name: str, file: str) -> FormatError:
        return FormatError(f"{name}: what {file} holds contradicts the other files", where=str(self.folder), hint="the index is damaged")

    def read(self, file: str, name: str, shape: list[int], dtype: str) -> torch.Tensor:
        path = self.folder / file
        if file not in self.checked:
            if digest_of(path) != self.index.files.get(file):
                raise FormatError(
                    "is not the file that the checkpoint's index names (its digest differs)", where=str(path), hint="the checkpoint is damaged"
                )
            self.checked.add(file)
            self.count.verified_bytes += path.stat().st_size
        found = torch.empty(shape, dtype=getattr(torch, dtype))
        with ShardFile(path) as opened:
            opened.read(name, shape, found.dtype, tuple((0, d) for d in shape), found.reshape(-1).view(torch.uint8).numpy())
            self.count.stored_bytes += opened.read_bytes
        return found
