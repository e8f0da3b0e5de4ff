"""The embedding tables of a PyTorch module: its `EmbeddingBag`s and torchrec's `EmbeddingBagCollection`s, looked up once to see how often and where.

The module runs on its own example inputs under hooks that keep each table's indices: pooling is indices over bags, the histogram counts how often
rows are met. A table that the example does not reach keeps one lookup per sample and no histogram.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import CaptureError
from ..graph.embeddings import Table, Tables, histogram_of
from .resolve import build_model, user_code

__all__ = ["named_tables", "tables_of_module"]


def named_tables(model: str, *, batch: int | None = None, seed: int = 0) -> Tables:
    """Of the model that `FILE.py:function` builds, on `batch` samples (default: its example's). Raises: CaptureError, UsageError, UnknownName."""
    source = build_model(model, device="cpu", seed=seed, batch_size=batch)
    with user_code(model, model.rpartition(":")[0]):
        inputs = source.inputs[:-1] or source.inputs
        return tables_of_module(source.module, inputs, name=model.rpartition(":")[2])


def tables_of_module(module: nn.Module, inputs: tuple[Any, ...], *, name: str = "tables") -> Tables:
    """Raises: CaptureError for a module without tables, or with bags that take the largest of their rows."""
    bags = {n: m for n, m in module.named_modules() if isinstance(m, nn.EmbeddingBag)}
    collections = {n: m for n, m in module.named_modules() if hasattr(m, "embedding_bag_configs") and hasattr(m, "embedding_bags")}
    for n, c in collections.items():
        bags |= {f"{n}.embedding_bags.{config.name}".lstrip("."): c.embedding_bags[config.name] for config in c.embedding_bag_configs()}
    if not bags:
        raise CaptureError("has no EmbeddingBag and no EmbeddingBagCollection", where=name, hint="tables are what is split here; see `layout plan`")
    seen: dict[str, tuple[list[torch.Tensor], int]] = {n: ([], 0) for n in bags}
    hooks = [m.register_forward_pre_hook(_keeping(seen, n), with_kwargs=True) for n, m in bags.items()]
    try:
        with torch.no_grad():
            module(*inputs)
    finally:
        for h in hooks:
            h.remove()
    found = []
    for n, m in bags.items():
        mode = str(getattr(m, "mode", "sum"))
        if mode not in ("sum", "mean"):
            raise CaptureError(f"{n} takes the {mode} of its rows", where=name, hint="parts of a table add up: mode sum or mean")
        indices, count = seen[n]
        looked = torch.cat(indices) if indices else torch.zeros(0, dtype=torch.long)
        rows, dim = (int(x) for x in m.weight.shape)
        found.append(Table(
            name=n, rows=rows, dim=dim, pooling=len(looked) / count if count else 1.0, mode="mean" if mode == "mean" else "sum",
            histogram=histogram_of(looked.numpy()) if len(looked) else (),
        ))  # fmt: skip
    batch = max([count for _, count in seen.values()] + [1])
    size = next(iter(bags.values())).weight.element_size()
    return Tables(tables=tuple(found), batch=batch, name=name, element_bytes=size)


def _keeping(seen: dict[str, tuple[list[torch.Tensor], int]], name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        indices = args[0] if args else kwargs["input"]
        offsets = args[1] if len(args) > 1 else kwargs.get("offsets")
        kept, count = seen[name]
        if indices.dim() == 2 or offsets is None:
            bags = int(indices.shape[0])
        else:
            bags = len(offsets) - bool(getattr(module, "include_last_offset", False))
        seen[name] = ([*kept, indices.detach().flatten().cpu()], count + bags)

    return hook
