"""Checkpoints: one safetensors file per rank and a JSON index that is written last.

A checkpoint is the folder `step-<n>` once it holds `index.json`; before that it does not count. The index says which plan, model,
data and seed it belongs to, the losses so far, and the digest of every rank's file. Optimizer state is saved by parameter name.
Data position and random numbers follow from the step number alone, so a resumed run gives the bits of an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from ..errors import FormatError, Unsupported, UsageError
from ..io.atomic import write_bytes
from ..plan import Plan
from .recording import plan_identity
from .segments import RankModule

__all__ = ["CheckpointIndex", "commit_index", "find_checkpoint", "load_rank", "save_rank"]

SCHEMA, VERSION = "meshwright.checkpoint", 1


class CheckpointIndex(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`step`: training steps done; the next one to run. `files`: name -> sha256 of every rank's file."""

    schema: str = SCHEMA
    version: int = VERSION
    plan: str
    step: int
    data: str
    seed: int
    losses: list[float]
    files: dict[str, str]


def save_rank(folder: Path, rank: int, module: RankModule, optimizer: Any) -> str:
    """Write `rank-<r>.safetensors` into `folder`; returns its sha256."""
    from safetensors.torch import save

    names = {id(p.tensor): p.name for p in module.trained()}
    tensors = {f"param:{p.name}": p.tensor.detach() for p in module.parameters.values()}
    tensors |= {f"buffer:{name}": b for name, b in module.buffers.items()}
    scalars: dict[str, Any] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            name = f"optimizer:{names[id(parameter)]}:{key}"
            if isinstance(value, torch.Tensor):
                tensors[name] = value.detach()
            elif value is None or isinstance(value, (bool, int, float, str)):
                scalars[name] = value
            else:
                raise Unsupported(f"the optimizer keeps a {type(value).__name__} in its state, which cannot be saved", where=name)
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    metadata = {"meshwright": json.dumps({"scalars": scalars, "groups": groups}, default=repr)}  # one key: their order in the file varies
    data = save({k: v.contiguous().cpu() for k, v in tensors.items()}, metadata=metadata)
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(folder / _file(rank), data)
    return hashlib.sha256(data).hexdigest()


def load_rank(folder: Path, index: CheckpointIndex, rank: int, module: RankModule, optimizer: Any) -> None:
    """Restore parameters, buffers and optimizer state. Raises: FormatError when the file is not what the index says or does not fit."""
    from safetensors import safe_open

    path = folder / _file(rank)
    digest = index.files.get(_file(rank))
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FormatError(f"cannot be read: {error.strerror}", where=str(path)) from None
    if hashlib.sha256(data).hexdigest() != digest:
        raise FormatError("is not the file that the checkpoint's index names (its digest differs)", where=str(path), hint="the checkpoint is damaged")
    with safe_open(str(path), "pt") as file:
        scalars = json.loads((file.metadata() or {}).get("meshwright", "{}")).get("scalars", {})
        tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    with torch.no_grad():
        for p in module.parameters.values():
            _restore(p.tensor, tensors, f"param:{p.name}", path)
        for name, b in module.buffers.items():
            _restore(b, tensors, f"buffer:{name}", path)
    by_name = {p.name: p.tensor for p in module.trained()}
    for name, value in (*tensors.items(), *scalars.items()):
        kind, _, rest = name.partition(":")
        if kind == "optimizer":
            parameter, _, key = rest.rpartition(":")
            if parameter not in by_name:
                raise FormatError(f"holds optimizer state of an unknown parameter {parameter!r}", where=str(path))
            optimizer.state[by_name[parameter]][key] = value


def _restore(target: torch.Tensor, tensors: dict[str, torch.Tensor], name: str, path: Path) -> None:
    found = tensors.get(name)
    if found is None or found.shape != target.shape or found.dtype != target.dtype:
        what = "is missing" if found is None else f"is {tuple(found.shape)} {found.dtype}, expected {tuple(target.shape)} {target.dtype}"
        raise FormatError(f"{name} {what}", where=str(path))
    target.copy_(found)


def commit_index(folder: Path, index: CheckpointIndex) -> None:
    """Make the folder a checkpoint."""
    write_bytes(folder / "index.json", msgspec.json.format(msgspec.json.encode(index), indent=2))


def keep_latest(folder: Path, keep: int = 1) -> None:
    """Remove all but the newest checkpoints, and folders that never became one."""
    done = sorted((p for p in folder.glob("step-*") if (p / "index.json").is_file()), key=lambda p: p.name)
    for old in (*done[:-keep], *(p for p in folder.glob("step-*") if not (p / "index.json").is_file())):
        shutil.rmtree(old, ignore_errors=True)


def find_checkpoint(folder: Path, plan: Plan, data: str) -> tuple[Path, CheckpointIndex]:
    """The newest checkpoint under `folder`.

    Raises: UsageError when there is none or it belongs to another plan, model or data; FormatError when its index is damaged.
    """
    found = sorted((p for p in folder.glob("step-*") if (p / "index.json").is_file()), key=lambda p: p.name)
    if not found:
        raise UsageError("there is no checkpoint to resume from", where=str(folder), hint="run once without --resume")
    path = found[-1] / "index.json"
    try:
        index = msgspec.json.decode(path.read_bytes(), type=CheckpointIndex)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(str(error), where=str(path)) from None
    if index.schema != SCHEMA or index.version != VERSION:
        raise FormatError(f"is {index.schema!r} version {index.version}, expected {SCHEMA!r} version {VERSION}", where=str(path))
    if index.plan != plan_identity(plan):
        raise UsageError(
            "the checkpoint belongs to another plan or model", where=str(path), hint="resume with the plan that made it, or start a new folder"
        )
    if index.data != data or index.seed != plan.seed:
        raise UsageError(
            f"the checkpoint was trained on {index.data!r} with seed {index.seed}", where=str(path), hint="resume with the same --data and seed"
        )
    return found[-1], index


def checkpoint_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def _file(rank: int) -> str:
    return f"rank-{rank:03d}.safetensors"


def collect_digests(digests: Sequence[str]) -> dict[str, str]:
    return {_file(rank): digest for rank, digest in enumerate(digests)}
