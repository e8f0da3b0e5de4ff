"""The oracle: the unmodified module trained in one process on the same samples, with the same dropout masks (`dropout.SerialDraws`)."""

from __future__ import annotations

import torch

from ..capture.forward import trace_forward
from ..capture.losses import Objective
from ..capture.resolve import build_model
from ..job import Training
from ..run.steps.forward_graph import from_traced
from ..run.train.data import open_data
from ..run.train.dropout import Draws, PlacesUnknown, RandomPlace, SerialDraws, random_places
from ..run.train.update import make_update

__all__ = ["serial_losses"]


def serial_losses(job: Training, *, data: str, steps: int, rows: int | None = None) -> list[float]:
    """Loss of every step of plain eager training of `job.model` on global batches, whole batch at once (or `rows` samples at a time, accumulated)."""
    source = build_model(job.model, device="cpu", seed=job.seed, batch_size=job.global_batch, sizes=job.sizes or (), dtype=job.dtype)
    objective = Objective(source.module, job.loss, calling=source.calling)
    optimizer = make_update(job, list(source.module.named_parameters()))
    dataset = open_data(data, source.examples, job.seed, job.global_batch)
    rows = rows or job.global_batch
    losses = []

    places: list[RandomPlace] | None = None

    def forward(draws: Draws, part: list[torch.Tensor]) -> torch.Tensor:
        nonlocal places
        try:
            with SerialDraws(draws, places):
                return objective(*part)
        except PlacesUnknown:  # it has dropout: its random calls are numbered by tracing it once
            traced = trace_forward(job.model, loss=job.loss, batch_size=job.global_batch, seed=job.seed, device="cpu")
            places = list(random_places(from_traced(traced)).values())
            return forward(draws, part)

    for step in range(steps):
        samples = [dataset.sample(step * job.global_batch + i) for i in range(job.global_batch)]
        batch = [torch.stack(column) for column in zip(*samples, strict=True)]
        optimizer.optimizer.zero_grad()
        total = 0.0
        for first in range(0, job.global_batch, rows):
            part = [x[first : first + rows] for x in batch]
            draws = Draws(job.seed, step, step * job.global_batch + first, len(part[0]))
            loss = forward(draws, part) * (len(part[0]) / job.global_batch)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses
