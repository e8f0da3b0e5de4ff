"""A loader as a plan says: files kept up to its budget, where it says, with its workers."""

from __future__ import annotations

from typing import Any

from ..profile.input_plan import InputPlan
from .kept import Files, Kept

__all__ = ["planned_loader", "with_dataset"]


def planned_loader(loader: Any, plan: InputPlan, *, files: Files | None = None) -> Any:
    """A DataLoader over the same items as `loader`, fed as planned on this node. Files that nodes keep together are asked for by `PeerFiles`, batches
    that jobs share by `SharedLoader` or `data serve`: a single loader takes its share of the memory alone.

    Raises: as `Kept` does.
    """
    dataset = loader.dataset
    if plan.kept and plan.kept_bytes:
        dataset = Kept(dataset, plan.kept_bytes, files=files, seed=plan.seed, medium=plan.medium or "page-cache")
    return with_dataset(loader, dataset, workers=plan.workers)


def with_dataset(loader: Any, dataset: Any, *, workers: int | None = None) -> Any:
    """The loader over another dataset of the same items, its workers (default: as many as it has) kept from epoch to epoch."""
    from torch.utils.data import DataLoader

    if loader.batch_sampler is not None and hasattr(loader.batch_sampler, "sampler"):  # torch's own: sampler, batch size and drop_last say all
        how: dict[str, Any] = {"sampler": loader.sampler, "batch_size": loader.batch_size, "drop_last": loader.drop_last}
    else:
        how = {"batch_sampler": loader.batch_sampler}
    more = {"persistent_workers": True, "prefetch_factor": loader.prefetch_factor, "multiprocessing_context": loader.multiprocessing_context}
    count = loader.num_workers if workers is None else workers
    return DataLoader(
        dataset, num_workers=count, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory, generator=loader.generator,
        worker_init_fn=loader.worker_init_fn, **how, **(more if count else {}),
    )  # fmt: skip
