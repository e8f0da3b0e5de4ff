"""Checkpoints across layouts: which part of a tensor a file holds. `restore` reads them.

Ranges come from `plan.shards`, so uneven shares, packed blocks, and key-value heads held by several ranks need no case of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec
import torch

from ...io.shard_file import crc32_of
from ...plan.plan import Plan, TrainingLayout
from ...plan.shards import part_ranges
from ..train.segments import RankModule
from ..train.sharded_state import ParameterShard

__all__ = ["Part", "model_identity", "parts_of"]


class Part(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`ranges`: what a file holds of dimension `axis` of a tensor of shape `shape`, in order; axis -1: all of it.

    `crc32`: of its bytes there; -1: unknown. `flat`: of what `ranges` say, flattened, the elements from its first number up to its second only;
    empty: all (sharding levels divide flattened parameters among data replicas).
    """

    shape: list[int]
    dtype: str
    axis: int = -1
    ranges: list[tuple[int, int]] = []
    crc32: int = -1
    flat: list[int] = []


def model_identity(plan: Plan) -> str:
    """Digest of what a run computes, however it is laid out: the job and the model's graph."""
    parts = [plan.job.get("training"), plan.job.get("graph_fingerprint"), plan.seed]
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()


def parts_of(tensors: Mapping[str, torch.Tensor], module: RankModule, layout: TrainingLayout, rank: int) -> dict[str, Part]:
    """The part of every tensor of a rank's file: optimizer state of a parameter's shape is split as the parameter is."""
    found = {}
    pieces = {("param", p.name): x for p, _, x in module.kept()} | {("optimizer", p.name): x for p, _, x in module.updated()}
    for name, tensor in tensors.items():
        p = _parameter(name, module)
        piece = pieces.get((name.partition(":")[0], p.name)) if p is not None else None
        part = Part(shape=list(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."), crc32=crc32_of(tensor))
        divided = piece is not None and tensor.shape == piece.tensor.shape
        if p is not None and piece is not None and divided:
            part.shape, part.flat = list(p.full_shape), [] if piece.whole else [piece.first, piece.stop]
        if p is not None and p.shard is not None and (divided or tensor.shape == p.tensor.shape):
            extent = p.full_shape[p.shard.axis]
            part.shape, part.axis = list(p.full_shape), p.shard.axis
            part.ranges = list(part_ranges(extent, p.shard, p.part, p.parts))
        found[name] = part
    return found


def _parameter(name: str, module: RankModule) -> ParameterShard | None:
    kind, _, rest = name.partition(":")
    return module.parameters.get(rest if kind == "param" else rest.rpartition(":")[0] if kind == "optimizer" else "")
