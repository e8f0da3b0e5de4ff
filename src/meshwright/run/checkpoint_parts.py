"""Checkpoints across layouts: which part of a tensor a file holds, and tensors put together from parts.

Ranges come from `plan_shards`, so uneven shares, packed blocks, and key-value heads held by several ranks need no case of their own.
A parameter is put together whole, one at a time, and the rank's part is taken from it: memory is that of the largest parameter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from ..errors import FormatError
from ..plan import Plan, TrainingLayout
from ..plan_shards import part_ranges
from .segments import ParameterShard, RankModule
from .sharding import take_part

__all__ = ["Part", "Parts", "model_identity", "parts_of"]


class Part(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`ranges`: what a file holds of dimension `axis` of a tensor of shape `shape`, in order; axis -1: all of it."""

    shape: list[int]
    dtype: str
    axis: int = -1
    ranges: list[tuple[int, int]] = []


def model_identity(plan: Plan) -> str:
    """Digest of what a run computes, however it is laid out: the job and the model's graph."""
    parts = [plan.job.get("training"), plan.job.get("graph_fingerprint"), plan.seed]
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()


def parts_of(tensors: Mapping[str, torch.Tensor], module: RankModule, layout: TrainingLayout, rank: int) -> dict[str, Part]:
    """The part of every tensor of a rank's file: optimizer state of a parameter's shape is split as the parameter is."""
    index = layout.coordinates(rank)[2]
    found = {}
    for name, tensor in tensors.items():
        p = _parameter(name, module)
        part = Part(shape=list(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        if p is not None and p.shard is not None and tensor.shape == p.tensor.shape:
            extent = p.full_shape[p.shard.axis]
            part.shape, part.axis = list(p.full_shape), p.shard.axis
            part.ranges = list(part_ranges(extent, p.shard, index, layout.tensor))
        found[name] = part
    return found


def _parameter(name: str, module: RankModule) -> ParameterShard | None:
    kind, _, rest = name.partition(":")
    return module.parameters.get(rest if kind == "param" else rest.rpartition(":")[0] if kind == "optimizer" else "")


class Parts:
    """Reads tensors whole from the files of a checkpoint."""

    def __init__(self, folder: Path, files: Mapping[str, str], parts: Mapping[str, Mapping[str, Part]]) -> None:
        self.folder, self.files, self.parts = folder, files, parts
        self.checked: set[str] = set()

    def load(self, module: RankModule, optimizer: Any, layout: TrainingLayout, rank: int) -> None:
        """Restore a rank's parameters, buffers and optimizer state. Raises: FormatError where files do not make up a tensor that fits."""
        index = layout.coordinates(rank)[2]
        with torch.no_grad():
            for p in module.parameters.values():
                p.tensor.copy_(self.own(f"param:{p.name}", p, index, layout.tensor))
            for name, b in module.buffers.items():
                b.copy_(self.fitting(f"buffer:{name}", tuple(b.shape), b.dtype))
        for p in module.trained():
            for name in self.parts:
                if name.startswith(f"optimizer:{p.name}:"):
                    optimizer.state[p.tensor][name.rpartition(":")[2]] = self.own(name, p, index, layout.tensor)
            optimizer.state[p.tensor].update(self.scalars(p.name))

    def own(self, name: str, p: ParameterShard, index: int, parts: int) -> torch.Tensor:
        """What this rank holds of a parameter, or of a state of its shape; other states are whole on every rank."""
        whole = self.whole(name)
        if name.startswith("param:") and (tuple(whole.shape) != p.full_shape or whole.dtype != p.tensor.dtype):
            self.fitting(name, p.full_shape, p.tensor.dtype)
        if tuple(whole.shape) != p.full_shape or p.shard is None:
            return whole.to(p.tensor.device) if tuple(whole.shape) == p.full_shape else whole
        return take_part(whole, p.shard.axis, p.shard, index, parts).to(p.tensor.device)

    def fitting(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        found = self.whole(name)
        if tuple(found.shape) != shape or found.dtype != dtype:
            raise FormatError(f"{name} is {tuple(found.shape)} {found.dtype}, expected {shape} {dtype}", where=str(self.folder))
        return found

    def whole(self, name: str) -> torch.Tensor:
        """A tensor put together from the files that hold parts of it; files that hold what others do are not read."""
        parts = self.parts.get(name)
        if not parts:
            raise FormatError(f"{name} is missing", where=str(self.folder), hint="the checkpoint is of another model")
        whole: torch.Tensor | None = None
        have: set[tuple[int, int]] = set()
        for file, part in parts.items():
            if part.axis < 0:
                return self.read(file, name)
            if have.issuperset(part.ranges):
                continue
            piece = self.read(file, name)
            if whole is None:
                whole = torch.empty(part.shape, dtype=piece.dtype)
            if piece.shape[part.axis] != sum(b - a for a, b in part.ranges) or list(whole.shape) != part.shape or whole.dtype != piece.dtype:
                raise FormatError(f"{name} is not what the index says", where=str(self.folder / file), hint="the checkpoint is damaged")
            at = 0
            for low, high in part.ranges:
                whole.narrow(part.axis, low, high - low).copy_(piece.narrow(part.axis, at, high - low))
                at += high - low
            have.update(part.ranges)
        assert whole is not None
        extent = whole.shape[next(iter(parts.values())).axis]
        covered = torch.zeros(extent, dtype=torch.bool)
        for low, high in have:
            covered[low:high] = True
        if not bool(covered.all()):
            raise FormatError(f"{name} lacks {extent - int(covered.sum())} of {extent} rows or columns", where=str(self.folder))
        return whole

    def read(self, file: str, name: str) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        path = self.check(file)
        try:
            with safe_open(str(path), "pt") as opened:
                tensor: torch.Tensor = opened.get_tensor(name)
        except SafetensorError as error:
            raise FormatError(f"{name} cannot be read: {error}", where=str(path)) from None
        return tensor

    def check(self, file: str) -> Path:
        """The path of a file whose digest is the index's."""
        path = self.folder / file
        if file not in self.checked:
            try:
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
            except OSError as error:
                raise FormatError(f"cannot be read: {error.strerror}", where=str(path)) from None
            if digest != self.files.get(file):
                raise FormatError(
                    "is not the file that the checkpoint's index names (its digest differs)", where=str(path), hint="the checkpoint is damaged"
                )
            self.checked.add(file)
        return path

    def scalars(self, parameter: str) -> dict[str, Any]:
        """Optimizer state of a parameter that is no tensor."""
        import json

        from safetensors import safe_open

        file = next(iter(self.parts[f"param:{parameter}"]))
        with safe_open(str(self.check(file)), "pt") as opened:
            scalars = json.loads((opened.metadata() or {}).get("meshwright", "{}")).get("scalars", {})
        prefix = f"optimizer:{parameter}:"
        return {name.removeprefix(prefix): value for name, value in scalars.items() if name.startswith(prefix)}
