"""Weights of a model in safetensors files of a folder, read tensor by tensor and part by part: a rank reads what it holds, and no more.

`model.safetensors`, or several files that `model.safetensors.index.json` names. A tensor is found under any of the names that a parameter has in the
module (ties). Files are mapped into memory; bytes of a tensor are read where a part of it is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.errors import FormatError, MissingExtra

__all__ = ["INDEX", "SINGLE", "WeightFiles", "has_weights", "weight_files"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20
Ranges = Sequence[tuple[int, int]]


def has_weights(folder: Path | None) -> bool:
    return folder is not None and (any(folder.glob("*.safetensors")) or (folder / INDEX).is_file())


@dataclass
class WeightFiles:
    """`file[name]`: where a tensor of that name lies; `known_as[name]`: what a parameter or buffer of the module is called there (`fit`)."""

    file: Mapping[str, Path]
    opened: dict[Path, Any] = field(default_factory=dict)
    known_as: dict[str, str] = field(default_factory=dict)

    def _slice(self, name: str) -> Any:
        path = self.file[name]
        if path not in self.opened:
            self.opened[path] = _open(path)
        try:
            return self.opened[path].get_slice(name)
        except Exception as error:
            raise FormatError(f"has no tensor {name!r}, where {INDEX} says it lies: {_first(error)}", where=str(path)) from None

    def fit(self, module: nn.Module) -> list[str]:
        """Finds every parameter and persistent buffer of the module; the names of those that no file has. What files have besides is left.

        Raises: FormatError for a tensor of another shape than the module's.
        """
        state = module.state_dict(keep_vars=True)
        names: dict[int, list[str]] = {}
        for name, x in state.items():
            names.setdefault(id(x), []).append(name)
        missing = []
        for alike in names.values():
            found = next((n for n in alike if n in self.file), None)
            if found is None:
                missing.append(alike[0])
                continue
            shape, wanted = tuple(self._slice(found).get_shape()), tuple(state[alike[0]].shape)
            if shape != wanted:
                raise FormatError(
                    f"tensor {found!r} has the shape {shape}, the model's is {wanted}", where=str(self.file[found]),
                    hint="the configuration and the weights do not belong together", data={"tensor": found},
                )  # fmt: skip
            self.known_as |= dict.fromkeys(alike, found)
        return missing

    def part(self, name: str, dtype: torch.dtype, axis: int = 0, ranges: Ranges | None = None) -> torch.Tensor:
        """A tensor of the module by its name there, or these ranges of its dimension `axis`, one after the other; a tensor of its own."""
        found = self._slice(self.known_as[name])
        rows = [(slice(None),) * axis + (slice(low, high),) for low, high in ranges] if ranges is not None else [...]
        parts = [(found[row] if found.get_shape() else found[...]).to(dtype) for row in rows]
        return parts[0].clone(memory_format=torch.contiguous_format) if len(parts) == 1 else torch.cat(parts, dim=axis)

    def close(self) -> None:
        self.opened.clear()


def weight_files(folder: Path) -> WeightFiles:
    """Of a folder that `has_weights`. Every file is opened, and its header read.

    Raises: FormatError for an index that is none, names a file outside the folder or one that is not there, and for a file that is cut short or none
    of safetensors; MissingExtra.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        opened = {single: _open(single)}
        return WeightFiles(dict.fromkeys(opened[single].keys(), single), opened)
    if not index.is_file():
        raise FormatError(f"has neither {SINGLE} nor {INDEX}", where=str(folder), hint="name the files so, or remove other safetensors files")
    names = _index(index)
    opened = {path: _open(path) for path in sorted({folder / name for name in names.values()})}
    return WeightFiles({name: folder / file for name, file in names.items()}, opened)


def _index(path: Path) -> dict[str, str]:
    with path.open("rb") as file:
        data = file.read(MAX_INDEX_BYTES + 1)
    if len(data) > MAX_INDEX_BYTES:
        raise FormatError(f"more than {MAX_INDEX_BYTES} bytes are no index", where=str(path))
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"no JSON: {_first(error)}", where=str(path)) from None
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(v, str) for v in names.values()):
        raise FormatError("an index is a JSON object whose `weight_map` gives every tensor's file", where=str(path))
    if odd := next((v for v in names.values() if Path(v).name != v), None):
        raise FormatError(f"names a file outside its folder: {odd!r}", where=str(path))
    return names


def _open(path: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        raise MissingExtra("safetensors", extra="torch", needed_for="weights of a folder") from None
    if not path.is_file():
        raise FormatError("is not there, and the index names it", where=str(path), hint="copy all files of the model")
    try:
        return safe_open(path, framework="pt")
    except Exception as error:
        raise FormatError(f"is no safetensors file, or cut short: {_first(error)}", where=str(path), hint="copy the file again") from None


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
