"""Checkpoints: one safetensors file per rank and a JSON index that is written last.

A checkpoint is the folder `step-<n>` once it holds `index.json`; before that it does not count. The index says which plan, model,
data and seed it belongs to, the losses so far, the digest of every rank's file, and which part of which tensor each file holds.
Optimizer state is saved by parameter name. Data position and random numbers follow from the step number alone, so a resumed run gives the
bits of an uninterrupted one. Another plan of the same job (other tensor, pipeline or data degrees, other shares) loads the same checkpoint:
every rank reads the bytes that it needs (`restore`); sums then round differently, nothing else changes.
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

from ...errors import FormatError, Unsupported, UsageError
from ...io.atomic import write_bytes
from ...io.shard_file import require_digest
from ...plan.plan import Plan, TrainingLayout
from ..recording.recording import RestartBytes, plan_identity
from ..train.segments import RankModule
from ..train.update import Update
from .index import SCHEMA, VERSION, CheckpointIndex, SavedRank
from .parts import Part, model_identity, parts_of

__all__ = ["commit_index", "find_checkpoint", "load_rank", "make_index", "save_rank"]


def save_rank(folder: Path, rank: int, module: RankModule, optimizer: Any, layout: TrainingLayout, losses: Sequence[float | None]) -> SavedRank:
    """Write `rank-<r>.safetensors` into `folder`."""
    from safetensors.torch import save

    names = {id(tensor): p.name for p, tensor, _ in module.updated()}
    tensors = {f"param:{p.name}": tensor.detach() for p, tensor, _ in module.kept()}
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
    scalars |= optimizer.saved() if isinstance(optimizer, Update) else {}
    return SavedRank(digest=hashlib.sha256(data).hexdigest(), losses=list(losses), parts=parts_of(tensors, module, layout, rank), scalars=scalars)


def load_rank(folder: Path, index: CheckpointIndex, rank: int, module: RankModule, optimizer: Any, plan: Plan) -> RestartBytes | None:
    """Restore parameters, buffers and optimizer state; from a checkpoint of another layout, by reading the parts that it needs (and counting).

    Raises: FormatError when a file is not what the index says or does not fit.
    """
    from safetensors import safe_open

    if index.plan != plan_identity(plan):
        from .restore import restore

        return restore(module, optimizer, plan, rank, index, folder)
    path = folder / _file(rank)
    require_digest(path, index.files.get(_file(rank)))
    with safe_open(str(path), "pt") as file:
        scalars = json.loads((file.metadata() or {}).get("meshwright", "{}")).get("scalars", {})
        tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    with torch.no_grad():
        for p, tensor, _ in module.kept():
            _restore(tensor, tensors, f"param:{p.name}", path)
        for name, b in module.buffers.items():
            _restore(b, tensors, f"buffer:{name}", path)
    by_name = {p.name: tensor for p, tensor, _ in module.updated()}
    for name, value in (*tensors.items(), *scalars.items()):
        kind, _, rest = name.partition(":")
        if kind == "optimizer":
            parameter, _, key = rest.rpartition(":")
            if parameter not in by_name:
                raise FormatError(f"holds optimizer state of an unknown parameter {parameter!r}", where=str(path))
            optimizer.state[by_name[parameter]][key] = value
    return None


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
    """Remove all but the newest checkpoints, and older folders that never became one (a newer one may be another rank's, under way)."""
    # The index is written last, so a folder without one is no checkpoint; names sort by step.
    done = sorted((p for p in folder.glob("step-*") if (p / "index.json").is_file()), key=lambda p: p.name)
    newest = done[-1].name if done else ""
    for old in (*done[:-keep], *(p for p in folder.glob("step-*") if not (p / "index.json").is_file() and p.name < newest)):
        shutil.rmtree(old, ignore_errors=True)


def find_checkpoint(folder: Path, plan: Plan, data: str) -> tuple[Path, CheckpointIndex]:
    """The newest checkpoint under `folder`.

    Raises: UsageError when there is none or it belongs to another model, job or data; FormatError when its index is damaged.
    """
    found = sorted((p for p in folder.glob("step-*") if (p / "index.json").is_file()), key=lambda p: p.name)
    if not found:
        raise UsageError("there is no checkpoint to resume from", where=str(folder), hint="run once without --resume")
    path = found[-1] / "index.json"
    try:
        index = msgspec.json.decode(path.read_bytes(), type=CheckpointIndex)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(str(error), where=str(path)) from None
    if index.schema != SCHEMA or index.version not in (1, 2, VERSION):
        raise FormatError(f"is {index.schema!r} version {index.version}, expected {SCHEMA!r} version {VERSION}", where=str(path))
    require_same_job(index, plan, data, str(path))
    return found[-1], index


def require_same_job(index: CheckpointIndex, plan: Plan, data: str, where: str) -> None:
    """Raises: UsageError when a checkpoint belongs to another model, job or data."""
    if index.plan != plan_identity(plan) and index.model != model_identity(plan):
        raise UsageError(
            "the checkpoint belongs to another plan or model", where=where,
            hint="resume with a plan of the same model, batch, optimizer and seed, or start a new folder",
        )  # fmt: skip
    if index.data != data or index.seed != plan.seed:
        raise UsageError(
            f"the checkpoint was trained on {index.data!r} with seed {index.seed}", where=where, hint="resume with the same --data and seed"
        )


def _file(rank: int) -> str:
    return f"rank-{rank:03d}.safetensors"


def make_index(plan: Plan, step: int, data: str, losses: Sequence[float | None], ranks: Sequence[SavedRank]) -> CheckpointIndex:
    """The index of what all ranks have saved."""
    parts: dict[str, dict[str, Part]] = {}
    for rank, saved in enumerate(ranks):
        for name, part in saved.parts.items():
            parts.setdefault(name, {})[_file(rank)] = part
    files = {_file(rank): saved.digest for rank, saved in enumerate(ranks)}
    writers = {_file(rank): f"rank {rank} ({device})" for rank, device in enumerate(plan.placement[: len(ranks)])}
    return CheckpointIndex(
        plan=plan_identity(plan), step=step, data=data, seed=plan.seed, losses=[*losses], files=files, model=model_identity(plan), parts=parts,
        scalars={k: v for saved in ranks for k, v in saved.scalars.items()}, writers=writers,
        residuals={name: digest for saved in ranks for name, digest in saved.residual.items()},
    )  # fmt: skip
