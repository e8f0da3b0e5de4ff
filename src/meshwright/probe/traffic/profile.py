"""When the gradients of a model become ready: measured on its own backward, in autograd's order; and the whole profile of its traffic."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch
from torch import nn

from ...capture.losses import Objective
from ...capture.resolve import build_model, user_code
from ...codec.codec import parse_codec
from ...decide.collective import CollectiveProblem, Ring
from ...decide.collective.program_time import simulated_time_s
from ...errors import CaptureError
from ...fabric.fabric import Fabric
from ...traffic import CodecCost, GradientTensor, TrafficProfile
from .costs import codec_cost, time_codec

__all__ = ["model_tensors", "network_times", "profile_tensors", "ready_times"]

REPEATS = 5  # steps that are timed, after one that warms up


def ready_times(module: nn.Module, step: Callable[[], torch.Tensor], *, repeats: int = REPEATS) -> tuple[tuple[GradientTensor, ...], int]:
    """(gradients in the order in which they become ready, end of the backward in ns); `step` runs forward and loss.

    Medians over `repeats` steps after one that warms up. A shared parameter is ready when its last part is.
    Raises: CaptureError when no parameter gets a gradient.
    """
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    seen: dict[str, list[float]] = {name: [] for name in named}
    ends, began = [], 0.0

    def arrived(name: str) -> Callable[[torch.Tensor], None]:
        return lambda _: seen[name].append(time.perf_counter() - began)

    handles = [p.register_post_accumulate_grad_hook(arrived(name)) for name, p in named.items()]
    try:
        for _ in range(1 + repeats):
            module.zero_grad(set_to_none=True)
            began = time.perf_counter()
            step().backward()
            ends.append(time.perf_counter() - began)
    finally:
        for handle in handles:
            handle.remove()
        module.zero_grad(set_to_none=True)
    end_s = median(ends[1:])
    used = {name: median(times[1:]) if len(times) > 1 else end_s for name, times in seen.items()}
    if not any(seen.values()):
        raise CaptureError("no parameter gets a gradient", where=type(module).__name__, hint="does the loss depend on the parameters?")
    order = sorted(used, key=lambda name: used[name])
    tensors = tuple(GradientTensor(name=n, shape=tuple(named[n].shape), ready_ns=int(used[n] * 1e9)) for n in order)
    return tensors, max(int(end_s * 1e9), tensors[-1].ready_ns)


def model_tensors(model: str, loss: str, batch: int | None) -> tuple[tuple[GradientTensor, ...], int]:
    """`ready_times` of a model function, on its example inputs.

    Raises: UsageError, CaptureError (the function, its module or the loss).
    """
    source = build_model(model, device="cpu", batch_size=batch)
    objective = Objective(source.module, loss, calling=source.calling)
    with user_code(model):
        tensors, end_ns = ready_times(source.module, lambda: objective(*source.inputs))
    return tensors, end_ns


def network_times(fabric: Fabric, ranks: int) -> Callable[[str, int], float]:
    """(operation, bytes of one rank) -> seconds of a ring on the fabric, simulated."""
    known: dict[tuple[str, int], float] = {}

    def time_s(operation: str, size_bytes: int) -> float:
        if ranks == 1 or not size_bytes:
            return 0.0
        whole = size_bytes * ranks if operation == "all-gather" else -(-size_bytes // (4 * ranks)) * 4 * ranks
        if (operation, whole) not in known:
            problem = CollectiveProblem.on(fabric, operation, whole, element_bytes=1)
            program = Ring().plan(problem, rng=np.random.default_rng(0)).program
            known[operation, whole] = simulated_time_s(program, fabric, problem.ranks, None)
        return known[operation, whole]

    return time_s


def profile_tensors(
    tensors: Sequence[GradientTensor], backward_ns: int, fabric: Fabric, codecs: Sequence[str], *, interference_permille: int = 0
) -> TrafficProfile:
    """Codecs timed in this process on tensors of these shapes, exchanges simulated as rings on the fabric, one rank per device.

    Raises: what `parse_codec` raises.
    """
    ranks = len(fabric.devices)
    network_s = network_times(fabric, ranks)
    costs: list[CodecCost] = []
    for text in dict.fromkeys(["none", *codecs]):
        spec = parse_codec(text)
        costs.append(codec_cost(spec, tensors, time_codec(spec, tensors, ranks), network_s))
    return TrafficProfile(
        tensors=tuple(tensors), codecs=tuple(costs), ranks=ranks, interference_permille=interference_permille, backward_ns=backward_ns,
        source=f"codecs timed here, exchanges simulated as rings on {fabric.name}",
    )  # fmt: skip
