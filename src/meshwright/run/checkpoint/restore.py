"""A rank's part of a checkpoint of any layout, by reading only the bytes it needs.

From shared storage: every rank reads the boxes of tensors that it holds, wherever they lie. With local shards: each device has only the files that
its own old rank wrote; all ranks tell each other what they have, work out the same table (`decide.restart`), read what is theirs, and the rest
goes over the process group, from the rank that holds it. Bytes are counted where they are read, sent and received.

Files are verified before they are used: each whole file by one rank (that whose device has it; on shared storage, one after the other), against the
index's digest; a file that differs is named with the tensor and the bytes that do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ...decide.restart import RestartProblem, Transfers, plan_transfers, require_complete
from ...decide.restart.problem import STORAGE, Piece
from ...errors import FormatError, PlanMismatch, UsageError
from ...io.shard_file import ShardFile, require_digest
from ...plan.plan import Plan
from ...plan.regions import FlatRegion, divided_bytes, holdings, local_shape, lying
from ..machine.process import blob_get, blob_put
from ..recording.recording import RestartBytes
from ..train.segments import RankModule
from .index import CheckpointIndex, checkpoint_folder, decode_index, tensors_of

__all__ = ["LocalShards", "Restored", "agree_on_shards", "device_folder", "local_shards", "restore"]


@dataclass(frozen=True, kw_only=True)
class LocalShards:
    """What all ranks found: the newest index, and the devices that have each of its files."""

    index: CheckpointIndex
    homes: Mapping[str, tuple[str, ...]]


class _Found(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What one device's folder holds: its newest index, and files by step."""

    device: str
    index: str = ""
    files: dict[str, list[str]] = {}


def device_folder(pattern: str, device: str) -> Path:
    """The folder of a device's shards; `{device}` in the pattern stands for its name, with / as -."""
    return Path(pattern.replace("{device}", device.replace("/", "-")))


def local_shards(found: Sequence[tuple[str, Path]]) -> LocalShards:
    """From folders that this process can see itself, by device. Raises: as `agree_on_shards`."""
    return _agreed([_look(device, folder) for device, folder in found])


def agree_on_shards(store: Any, rank: int, world: int, device: str, folder: Path) -> LocalShards:
    """What the ranks' folders hold together, the same answer at every rank.

    Raises: UsageError where no device has an index; PlanMismatch where two devices have shards of different runs; FormatError.
    """
    blob_put(store, f"shards/{rank}", msgspec.json.encode(_look(device, folder)))
    return _agreed([msgspec.json.decode(blob_get(store, f"shards/{r}"), type=_Found) for r in range(world)])


def _look(device: str, folder: Path) -> _Found:
    steps = sorted(p for p in folder.glob("step-*") if p.is_dir())
    done = [p for p in steps if (p / "index.json").is_file()]
    index = (done[-1] / "index.json").read_text(errors="replace") if done else ""
    return _Found(device=device, index=index, files={p.name: sorted(f.name for f in p.glob("rank-*.safetensors")) for p in steps})


def _agreed(found: Sequence[_Found]) -> LocalShards:
    """The newest index counts: a rank that was killed may have written its shard of that step, but not yet the index."""
    known = {f.device: decode_index(f.index.encode(), f"index.json of {f.device}") for f in found if f.index}
    if not known:
        raise UsageError("no device has shards of a checkpoint", where="--local-shards", hint="run once without --resume, with the same folders")
    newest = max(known, key=lambda d: known[d].step)
    index = known[newest]
    for device, other in known.items():
        if (other.model, other.data, other.seed) != (index.model, index.data, index.seed):
            raise PlanMismatch(
                f"{device} has shards of another run than {newest}", where=device, hint="empty its folder, or name another with --local-shards",
                data={"devices": [device, newest]},
            )  # fmt: skip
        if other.step == index.step and other.files != index.files:
            raise PlanMismatch(f"{device} and {newest} have different checkpoints of step {index.step}", where=device, hint="one is of another run")
    step = checkpoint_folder(Path(), index.step).name
    homes = {f: tuple(x.device for x in found if f in x.files.get(step, ())) for f in index.files}
    return LocalShards(index=index, homes=homes)


# ---- one rank ----------------------------------------------------------------------------------------------------------
@dataclass
class Restored:
    """`own`: folder of the device's own files (None: shared storage only); `shared`: the checkpoint that all ranks can read (None: there is none)."""

    plan: Plan
    rank: int
    index: CheckpointIndex
    shared: Path | None
    own: Path | None = None
    homes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    count: RestartBytes = field(default_factory=RestartBytes)
    files: dict[Path, ShardFile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layout = self.plan.layout
        assert layout is not None
        where = str(self.own or self.shared)
        self.tensors, held = tensors_of(self.index, where)
        group = {str(d.get("name")): str(d.get("group", "")) for d in self.plan.target_fabric.get("devices", ())}
        placement = self.plan.placement[: layout.ranks]
        stored = frozenset(f for f in held if self.shared is not None and (self.own is None or (self.shared / f).is_file()))
        divided = divided_bytes(self.plan.main, layout)
        self.problem = RestartProblem(
            tensors=self.tensors, needs=tuple(holdings(layout, r, self.tensors, divided[r]) for r in range(layout.ranks)), files=held,
            homes=self.homes, placement=placement, servers=tuple(group.get(d, "") for d in placement), stored=stored,
        )  # fmt: skip
        self.table: Transfers = plan_transfers(self.problem)

    def run(self, module: RankModule, optimizer: Any) -> RestartBytes:
        """Restore parameters, buffers and optimizer state."""
        targets = self.targets(module)
        self.complete()
        self.verify()
        try:
            with torch.no_grad():
                self.fill(targets)
        finally:
            for file in self.files.values():
                file.__exit__(None, None, None)
        by_name = {p.name: trained for p, trained, _ in module.updated()}
        for name, tensor in targets.items():
            kind, _, rest = name.partition(":")
            if kind == "optimizer":
                trained = by_name.get(rest.rpartition(":")[0])
                if trained is None:
                    raise FormatError(f"{name} is optimizer state of a parameter that is not trained", where=str(self.own or self.shared))
                same = tensor.shape == trained.shape
                optimizer.state[trained][rest.rpartition(":")[2]] = tensor.to(trained.device) if same else tensor
        for name, value in self.index.scalars.items():
            kind, _, rest = name.partition(":")
            if kind == "optimizer" and (trained := by_name.get(rest.rpartition(":")[0])) is not None:
                optimizer.state[trained][rest.rpartition(":")[2]] = value
        self.count.needed_bytes = self.table.needed_bytes[self.rank]
        return self.count

    def targets(self, module: RankModule) -> dict[str, torch.Tensor]:
        """Where every tensor goes: the module's own parameters (or pieces) and buffers, new tensors for optimizer state.

        Raises: FormatError for what differs.
        """
        where, needs = str(self.own or self.shared), self.problem.needs[self.rank]
        expected = {f"param:{p.name}": (p.full_shape, kept.detach()) for p, kept, _ in module.kept()}
        expected |= {f"buffer:{n}": (tuple(b.shape), b) for n, b in module.buffers.items()}
        found: dict[str, torch.Tensor] = {}
        for name, (shape, tensor) in expected.items():
            if name not in self.tensors:
                raise FormatError(f"{name} is missing", where=where, hint="the checkpoint is of another model")
            if self.tensors[name].shape != tuple(shape) or self.dtype(name) != tensor.dtype:
                raise FormatError(f"{name} is {self.tensors[name].shape} {self.dtype(name)}, expected {tuple(shape)} {tensor.dtype}", where=where)
            found[name] = tensor
        for name in needs:
            if name not in found:
                found[name] = torch.empty(local_shape(needs[name]), dtype=self.dtype(name))
        return found

    def dtype(self, name: str) -> torch.dtype:
        kind: torch.dtype = getattr(torch, next(iter(self.index.parts[name].values())).dtype)
        return kind

    def complete(self) -> None:
        """Raises: FormatError for a checkpoint on storage that lacks a part; Infeasible naming what no device and no storage has."""
        if self.own is None and self.table.lost:
            x = self.table.lost[0]
            lacks, whole = self.problem.size_bytes(x.tensor, x.box), prod(self.tensors[x.tensor].shape) * self.tensors[x.tensor].item_bytes
            raise FormatError(f"{x.tensor} lacks {lacks} of {whole} bytes, {_range(x.box)}", where=str(self.shared), hint="the checkpoint is damaged")
        require_complete(self.problem, self.table, self.index.writers)

    def verify(self) -> None:
        """Raises: FormatError naming file, tensor and bytes of a file that is not what the index says."""
        used = sorted({p.file for p in self.table.pieces if self.own is None or p.source == STORAGE})
        if self.shared is not None:
            for number, file in enumerate(used):
                if number % len(self.problem.needs) == self.rank:
                    self.require_intact(self.shared / file)
        if self.own is not None:
            for file in sorted({p.file for p in self.table.pieces if p.source == self.rank}):
                self.require_intact(self.own / file)

    def require_intact(self, path: Path) -> None:
        sums = {name: x.crc32 for name, parts in self.index.parts.items() if (x := parts.get(path.name)) is not None}
        require_digest(path, self.index.files.get(path.name), sums if all(s >= 0 for s in sums.values()) else None)
        self.count.verified_bytes += path.stat().st_size

    # ---- bytes -----------------------------------------------------------------------------------------------------
    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        over: dict[tuple[int, int], list[Piece]] = {}
        for piece in self.table.pieces:
            direct = self.own is None or piece.source in (STORAGE, piece.rank)
            if direct and piece.rank == self.rank:
                self.put(targets, piece, self.fetch(piece))
            elif not direct and self.rank in (piece.source, piece.rank):
                over.setdefault((piece.source, piece.rank), []).append(piece)
        waits, arriving = [], {}
        for pair, pieces in sorted(over.items()):
            size = sum(self.problem.size_bytes(p.tensor, p.box) for p in pieces)
            if pair[0] == self.rank:
                message = torch.cat([self.fetch(p, count=False).reshape(-1).view(torch.uint8) for p in pieces])
                self.count.sent_bytes += message.numel()
                waits.append((dist.isend(message, pair[1]), message))
            else:
                arriving[pair] = torch.empty(size, dtype=torch.uint8)
                waits.append((dist.irecv(arriving[pair], pair[0]), arriving[pair]))
        for work, _ in waits:
            work.wait()
        for pair, message in arriving.items():
            self.count.received_bytes += message.numel()
            at = 0
            for piece in over[pair]:
                size = self.problem.size_bytes(piece.tensor, piece.box)
                part = message[at : at + size].clone().view(self.dtype(piece.tensor))  # a copy lies as its type needs
                self.put(targets, piece, part)
                at += size

    def fetch(self, piece: Piece, *, count: bool = True) -> torch.Tensor:
        """The piece, read from the file that holds it."""
        folder = self.shared if self.own is None or piece.source == STORAGE else self.own
        assert folder is not None
        path, dtype = folder / piece.file, self.dtype(piece.tensor)
        if path not in self.files:
            self.files[path] = ShardFile(path)
        region = self.problem.files[piece.file][piece.tensor]
        found = torch.empty([b - a for a, b in piece.box], dtype=dtype)
        bytes_of = found.reshape(-1).view(torch.uint8)
        before = self.files[path].read_bytes
        self.files[path].read(piece.tensor, local_shape(region), dtype, lying(region, piece.box), bytes_of.numpy())
        if count:
            read = self.files[path].read_bytes - before
            if self.own is not None and piece.source != STORAGE:
                self.count.reused_bytes += read
            else:
                self.count.stored_bytes += read
        return found

    def put(self, targets: Mapping[str, torch.Tensor], piece: Piece, value: torch.Tensor) -> None:
        target, region = targets[piece.tensor], self.problem.needs[self.rank][piece.tensor]
        where = lying(region, piece.box)
        if isinstance(region, FlatRegion):
            target = target[where.first : where.first + prod(where.shape)].view(where.shape)
        for dim, (low, high) in enumerate(where.box):
            target = target.narrow(dim, low, high - low)
        target.copy_(value.reshape(target.shape))


def restore(module: RankModule, optimizer: Any, plan: Plan, rank: int, index: CheckpointIndex, folder: Path) -> RestartBytes:
    """From a checkpoint on shared storage."""
    return Restored(plan=plan, rank=rank, index=index, shared=folder).run(module, optimizer)


def _range(box: Sequence[tuple[int, int]]) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in box) + "]"
