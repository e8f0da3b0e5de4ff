"""The oracle: the unmodified module trained in one process on the same samples."""

from __future__ import annotations

import torch

from ..capture.losses import Objective
from ..capture.resolve import build_model
from ..job import Training
from .data import open_data
from .optimizers import make_optimizer

__all__ = ["serial_losses"]


def serial_losses(job: Training, *, data: str, steps: int, rows: int | None = None) -> list[float]:
    """Loss of every step of plain eager training of `job.model` on global batches, whole batch at once (or `rows` samples at a time, accumulated)."""
    source = build_model(job.model, device="cpu", seed=job.seed, batch_size=job.global_batch)
    objective = Objective(source.module, job.loss)
    optimizer = make_optimizer(job.optimizer, list(source.module.named_parameters()), job.learning_rate)
    dataset = open_data(data, source.inputs, job.seed)
    rows = rows or job.global_batch
    losses = []
    for step in range(steps):
        samples = [dataset.sample(step * job.global_batch + i) for i in range(job.global_batch)]
        batch = [torch.stack(column) for column in zip(*samples, strict=True)]
        optimizer.zero_grad()
        total = 0.0
        for first in range(0, job.global_batch, rows):
            part = [x[first : first + rows] for x in batch]
            loss = objective(*part) * (len(part[0]) / job.global_batch)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses
