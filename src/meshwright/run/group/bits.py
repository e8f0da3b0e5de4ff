"""What sums of a run were made of and came to, kept for comparison; and the first collective, element and fold node in which two runs differ.

A record is a folder per group (`world`, `ranks-2-3`), and in it per sum and rank a safetensors file `<number>.<operation>.<operator>.<rank>of<ranks>`
with `input` and `output`, flat. Contributions are numbered by rank; where the runs have unlike numbers of ranks, one rank's contribution stands for
as many as it holds of the other's, as when training numbers them by micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...errors import FormatError, UsageError
from ...io.atomic import write_bytes
from ...io.shard_file import ShardFile

__all__ = ["BitsRecord", "Difference", "first_difference"]

MAX_RECORDED_BYTES = 1 << 30  # of one rank and group: the first difference matters, not the last
MAX_FILES = 1_000_000  # looked at in one record, so that a folder of something else ends
Key = tuple[int, str, str]  # number, operation, operator


@dataclass
class BitsRecord:
    """Of one rank in one group."""

    folder: Path
    rank: int
    ranks: int
    number: int = 0
    left: int = MAX_RECORDED_BYTES

    @staticmethod
    def of(folder: str, global_ranks: tuple[int, ...], rank: int, world: int) -> BitsRecord:
        name = "world" if len(global_ranks) == world else "ranks-" + "-".join(map(str, global_ranks))
        return BitsRecord(Path(folder, name[:200]), rank, len(global_ranks))

    def begin(self, op: str, operator: str, given: torch.Tensor, result: Callable[[], torch.Tensor | None]) -> Callable[[], None]:
        """Keeps what goes in; what it returns writes that and what came out."""
        self.number += 1
        name = f"{self.number:06d}.{op}.{operator or 'other'}.{self.rank}of{self.ranks}.safetensors"
        size = 2 * given.numel() * given.element_size()
        self.left -= size
        before = given.detach().reshape(-1).cpu().clone() if self.left >= 0 else None

        def end() -> None:
            if before is None:
                return
            from safetensors.torch import save

            found = result()
            tensors = {"input": before} | ({} if found is None else {"output": found.detach().reshape(-1).cpu().contiguous()})
            self.folder.mkdir(parents=True, exist_ok=True)
            write_bytes(self.folder / name, save(tensors))

        return end


@dataclass(frozen=True)
class Difference:
    """`node`: the fold node [low, high) of contributions in which the element first differs, lowest level first; `of`: how many there are."""

    group: str
    number: int
    what: str
    element: int = -1
    elements: int = 0  # that differ
    node: tuple[int, int] = (-1, -1)
    of: int = 0
    why: str = ""
    values: tuple[float, float] = field(default=(0.0, 0.0))

    def line(self) -> str:
        if self.element < 0:
            return f"{self.group}, sum {self.number} ({self.what}): {self.why}"
        low, high = self.node
        return (
            f"{self.group}, sum {self.number} ({self.what}): element {self.element} is {self.values[0]!r} and {self.values[1]!r} "
            f"({self.elements} elements differ); first at fold node [{low}, {high}) of {self.of}: {self.why}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "group": self.group, "number": self.number, "collective": self.what, "element": self.element, "elements": self.elements,
            "fold_node": list(self.node), "contributions": self.of, "why": self.why, "values": list(self.values),
        }  # fmt: skip


def first_difference(one: Path, other: Path) -> tuple[Difference | None, int]:
    """(the first difference of two records or None, sums compared). Raises: UsageError (no record), FormatError (a damaged one)."""
    runs = [_record(one), _record(other)]
    compared = 0
    for group in sorted(runs[0].keys() & runs[1].keys()):
        a, b = runs[0][group], runs[1][group]
        for number in sorted({k[0] for k in a} | {k[0] for k in b}):
            keys = [next((k for k in run if k[0] == number), None) for run in (a, b)]
            if keys[0] is None or keys[1] is None:
                break  # one run, or its record, ends here
            if keys[0] != keys[1]:
                return Difference(group, number, " ".join(keys[0][1:]), why=f"the other run makes {' '.join(keys[1][1:])}"), compared
            compared += 1
            if (found := _compare(group, keys[0], a[keys[0]], b[keys[0]])) is not None:
                return found, compared
    return None, compared


def _record(folder: Path) -> dict[str, dict[Key, list[Path]]]:
    """Files in rank order, by group and sum; sums of which some rank's file lacks are left out."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder", where="--bits", hint="set MESHWRIGHT_RECORD_BITS to a folder and run again")
    found: dict[str, dict[Key, dict[int, Path]]] = {}
    sizes: dict[tuple[str, Key], int] = {}
    for count, path in enumerate(sorted(folder.glob("*/*.safetensors"))):
        if count >= MAX_FILES:
            raise UsageError(f"{folder} holds more than {MAX_FILES} files", where="--bits", hint="name the record's own folder")
        number, op, operator, who = [*path.name.removesuffix(".safetensors").split("."), "", "", ""][:4]
        rank, _, ranks = who.partition("of")
        if not (number.isdigit() and rank.isdigit() and ranks.isdigit()):
            raise FormatError("is no part of a record of bits", where=str(path))
        key = int(number), op, operator
        found.setdefault(path.parent.name, {}).setdefault(key, {})[int(rank)] = path
        sizes[path.parent.name, key] = int(ranks)
    if not found:
        raise UsageError(f"{folder} holds no record of bits", where="--bits", hint="set MESHWRIGHT_RECORD_BITS to a folder and run again")
    whole = {g: {k: files for k, files in sums.items() if len(files) == sizes[g, k]} for g, sums in found.items()}
    return {g: {k: [files[r] for r in sorted(files)] for k, files in sums.items()} for g, sums in whole.items()}


def _read(path: Path) -> dict[str, torch.Tensor]:
    from ...plan.regions import Lying

    with ShardFile(path) as file:
        found = {}
        for name, stored in file.stored.items():
            tensor = torch.empty(stored.shape, dtype=stored.dtype)
            where = Lying(0, stored.shape, tuple((0, extent) for extent in stored.shape))
            file.read(name, stored.shape, stored.dtype, where, tensor.view(torch.uint8).numpy().data)
            found[name] = tensor
    return found


def _result(op: str, ranks: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    outputs = [r["output"] for r in ranks if "output" in r]
    return torch.cat(outputs) if op == "reduce-scatter" else outputs[0]


def _differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elements whose bits differ."""
    width = a.element_size()
    return (a.view(torch.uint8).view(-1, width) != b.view(torch.uint8).view(-1, width)).any(dim=1).nonzero().view(-1)


def _compare(group: str, key: Key, one: list[Path], other: list[Path]) -> Difference | None:
    a, b = [_read(p) for p in one], [_read(p) for p in other]
    what = f"{key[1]} {key[2]}"
    x, y = _result(key[1], a), _result(key[1], b)
    if x.shape != y.shape or x.dtype != y.dtype:
        return Difference(group, key[0], what, why=f"{x.numel()} elements of {x.dtype}, and {y.numel()} of {y.dtype}")
    places = _differing(x, y)
    if not len(places):
        return None
    at = int(places[0])
    values = float(x[at]), float(y[at])
    leaves = [torch.stack([r["input"][at] for r in run]) for run in (a, b)]
    levels = [list(_levels(row, key[2])) for row in leaves]
    n = min(len(a), len(b))
    rounds = [len(lv[0]) // n if len(lv[0]) % n == 0 else 0 for lv in levels]
    shift = [r.bit_length() - 1 for r in rounds]
    if any(r < 1 or r & (r - 1) for r in rounds):
        return Difference(group, key[0], what, at, len(places), (0, n), n, f"{len(a)} and {len(b)} contributions have no nodes in common", values)
    common = zip(levels[0][shift[0] :], levels[1][shift[1] :], strict=False)
    for height, (row, twin) in enumerate(common):
        for k in _differing(row, twin).tolist():
            node = k << height, min(n, k + 1 << height)
            why = "the contributions differ before anything is added" if not height else "its operands are equal, its sum is not"
            return Difference(group, key[0], what, at, len(places), node, n, why, values)
    folded = levels[0][-1][0]
    wrong = [name for name, value in (("first", x[at]), ("second", y[at])) if bool(_differing(value.view(1), folded.view(1)).numel())]
    why = f"all contributions are equal; the {' and the '.join(wrong)} run's result is not their fold, so it was added up in another order"
    return Difference(group, key[0], what, at, len(places), (0, n), n, why, values)


def _levels(row: torch.Tensor, operator: str) -> Iterator[torch.Tensor]:
    """The fold's nodes, from the leaves up."""
    combine = {"prod": torch.mul, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}.get(operator, torch.add)
    yield row
    while len(row) > 1:
        pairs = combine(row[0 : len(row) // 2 * 2 : 2], row[1::2])
        row = torch.cat([pairs, row[len(row) // 2 * 2 :]])
        yield row
