"""The embedding tables of a PyTorch module: its `EmbeddingBag`s, torchrec's `EmbeddingBagCollection`s, and `Embedding`s that get one id of a sample.

The module runs on its own example inputs under hooks that keep each table's indices: pooling is indices over bags, the histogram counts how often
rows are met. A bag that the example does not reach keeps one lookup per sample and no histogram. An `Embedding` of several positions stays with the
other layers: its rows are not pooled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn

from ..errors import CaptureError
from ..graph.embeddings import Table, Tables, histogram_of
from .placed_tables import unlike
from .resolve import build_model, user_code

__all__ = ["named_tables", "placeable_tables", "tables_of_module"]


@dataclass
class _Seen:
    """Of a table: its indices, bags, lookups of a bag at most, calls, and whether a sample has ids of several positions."""

    indices: list[torch.Tensor] = field(default_factory=list)
    bags: int = 0
    most: int = 0
    calls: int = 0
    wide: bool = False


def named_tables(model: str, *, batch: int | None = None, seed: int = 0) -> Tables:
    """Of the model that `FILE.py:function` builds, on `batch` samples (default: its example's). Raises: CaptureError, UsageError, UnknownName."""
    source = build_model(model, device="cpu", seed=seed, batch_size=batch)
    with user_code(model, model.rpartition(":")[0]):
        return tables_of_module(source.module, source.inputs[:-1] or source.inputs, name=model.rpartition(":")[2])


def placeable_tables(model: str, *, batch: int, state_bytes: int, seed: int = 0) -> tuple[Tables, list[str]]:
    """Those of a named model that can be placed (`placed_tables`), for iterations of `batch` samples; and notes on the others.

    Raises: CaptureError where none can; as `named_tables`."""
    source = build_model(model, device="cpu", seed=seed)
    inputs = source.inputs[:-1] or source.inputs
    with user_code(model, model.rpartition(":")[0]):
        bags, seen = _looked_up(source.module, inputs)
        _, more = _looked_up(source.module, tuple(torch.cat([x, x[:1]]) for x in inputs))  # a bag more with every sample
    whole = {n: unlike(m) or ("" if seen[n].calls == 1 else f"is looked up {seen[n].calls} times in a pass") for n, m in bags.items()}
    whole |= {n: "has bags that are not one for each sample" for n, s in seen.items() if s.calls == 1 and more[n].bags != s.bags + 1}
    whole |= {n: "has ids of several positions, which are not pooled" for n, s in seen.items() if s.wide}
    notes = [f"table {n} stays with the other layers: it {why}" for n, why in whole.items() if why]
    placed = {n: m for n, m in bags.items() if not whole[n]}
    if not placed:
        raise CaptureError("has no embedding tables that can be placed", where=model, hint="; ".join(notes) or "train plan without --tables")
    found = _tables(placed, seen, model.rpartition(":")[2])
    return msgspec.structs.replace(found, batch=batch, state_bytes=state_bytes), notes


def tables_of_module(module: nn.Module, inputs: tuple[Any, ...], *, name: str = "tables") -> Tables:
    """Raises: CaptureError for a module without tables, or with bags that take the largest of their rows."""
    bags, seen = _looked_up(module, inputs)
    one = {n for n, s in seen.items() if s.calls and not s.wide and s.bags == len(inputs[0]) * s.calls}
    bags = {n: m for n, m in bags.items() if isinstance(m, nn.EmbeddingBag) or n in one}
    if not bags:
        raise CaptureError("has no EmbeddingBag and no EmbeddingBagCollection", where=name, hint="tables are what is split here; see `layout plan`")
    return _tables(bags, seen, name)


def _looked_up(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[dict[str, nn.Module], dict[str, _Seen]]:
    bags = {n: m for n, m in module.named_modules() if isinstance(m, (nn.EmbeddingBag, nn.Embedding))}
    collections = {n: m for n, m in module.named_modules() if hasattr(m, "embedding_bag_configs") and hasattr(m, "embedding_bags")}
    for n, c in collections.items():
        bags |= {f"{n}.embedding_bags.{config.name}".lstrip("."): c.embedding_bags[config.name] for config in c.embedding_bag_configs()}
    seen = {n: _Seen() for n in bags}
    hooks = [m.register_forward_pre_hook(_keeping(seen[n]), with_kwargs=True) for n, m in bags.items()]
    try:
        with torch.no_grad():
            module(*inputs)
    finally:
        for h in hooks:
            h.remove()
    return bags, seen


def _tables(bags: dict[str, nn.Module], seen: dict[str, _Seen], name: str) -> Tables:
    found = []
    for n, m in bags.items():
        mode = str(getattr(m, "mode", "sum"))
        if mode not in ("sum", "mean"):
            raise CaptureError(f"{n} takes the {mode} of its rows", where=name, hint="parts of a table add up: mode sum or mean")
        looked = torch.cat(seen[n].indices) if seen[n].indices else torch.zeros(0, dtype=torch.long)
        rows, dim = (int(x) for x in m.weight.shape)
        found.append(Table(
            name=n, rows=rows, dim=dim, pooling=len(looked) / seen[n].bags if seen[n].bags else 1.0, mode="mean" if mode == "mean" else "sum",
            histogram=histogram_of(looked.numpy()) if len(looked) else (), most=seen[n].most,
        ))  # fmt: skip
    batch = max([seen[n].bags for n in bags] + [1])
    size = next(iter(bags.values())).weight.element_size()
    return Tables(tables=tuple(found), batch=batch, name=name, element_bytes=size)


def _keeping(seen: _Seen) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        indices = args[0] if args else kwargs["input"]
        offsets = args[1] if len(args) > 1 else kwargs.get("offsets")
        if isinstance(module, nn.Embedding) or indices.dim() == 2 or offsets is None:
            bags, most = int(indices.shape[0]), int(indices[0].numel()) if len(indices) else 0
            seen.wide |= isinstance(module, nn.Embedding) and indices.dim() > 1
        else:
            bags = len(offsets) - bool(getattr(module, "include_last_offset", False))
            ends = torch.cat([offsets[:bags], offsets.new_tensor([len(indices)])])
            most = int(ends.diff().max()) if bags else 0
        seen.indices.append(indices.detach().flatten().cpu())
        seen.bags, seen.most, seen.calls = seen.bags + bags, max(seen.most, most), seen.calls + 1

    return hook
