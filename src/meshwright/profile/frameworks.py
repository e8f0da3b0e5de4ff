"""What training frameworks of a generation do differently, as named profiles: kernels, precision, what runs beside computation.

A profile says what a framework does; how fast a kernel is says the device (`cost_models.gpu_rates`). Every field names its source; a field
that none states is argued here. Without a profile, operators are priced alone on a roofline and messages of sharded state run beside computation.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ..errors import UnknownName
from .state_bytes import StateBytes

__all__ = ["FRAMEWORKS", "MOMENT_BYTES", "TIME_ERROR", "Framework", "framework"]

# Bytes of optimizer state per parameter beside the weight, all in float32: AdamW keeps two moments, momentum one, plain SGD none.
MOMENT_BYTES = {"adamw": 8.0, "adam": 8.0, "momentum": 4.0, "sgd": 0.0}
# Half-width of a 90 % interval of a step's time under a profile: what the seen half of benchmarks/published.toml leaves, one rank further out.
TIME_ERROR = 0.17


class Framework(msgspec.Struct, frozen=True, kw_only=True):
    """Args:
        fused: position-wise operators between products are one kernel (torch.compile, hand-written ones), else each reads and writes memory.
        attention: the kernel; `eager` writes the scores.
        state: bytes per parameter of weight in computation, gradient, optimizer (master copy included), and of a gradient on the wire.
        accumulate_bytes: moved per parameter and micro-batch to add a gradient to the accumulated one, outside the product.
        clipping_bytes: moved per parameter and step for the norm of gradients and their scaling.
        sharding_messages: of levels 2 and 3; overlap_gradients: of the last backward; tensor_overlap: share of tensor collectives that is hidden.
        stolen: share of a device's processors that a collective takes while it runs beside computation.
        per_action_s, per_iteration_s: of the host, per pass of a micro-batch through a stage, and per step.
        fused_loss: the cross-entropy is one kernel; loss_bytes: held at once per logit: log-softmax, its gradient and that of the logits in float32
            (12), or 16-bit logits and their gradient (4).
        constant_bytes: of a process beside the model: allocator's rounding, libraries' workspaces where the allocator counts them.
    """

    name: str
    fused: bool = False
    attention: Literal["eager", "flash-1", "flash-2", "flash-3"] = "flash-2"
    state: StateBytes = StateBytes(2.0, 4.0, 12.0, 2.0)
    accumulate_bytes: float = 0.0
    clipping_bytes: float = 12.0
    sharding_messages: Literal["overlapped", "blocking"] = "overlapped"
    overlap_gradients: bool = False
    p2p: Literal["overlapped", "blocking"] = "overlapped"
    tensor_overlap: float = 0.0
    stolen: float = 0.12
    per_action_s: float = 0.0
    per_iteration_s: float = 0.0
    fused_loss: bool = False
    loss_bytes: float = 12.0
    constant_bytes: int = 0
    source: str = ""


FRAMEWORKS: dict[str, Framework] = {
    f.name: f
    for f in (
        Framework(
            name="megatron-2021", attention="eager", fused=True, fused_loss=True, accumulate_bytes=10.0, p2p="blocking",
            state=StateBytes(2.0, 4.0, 12.0, 4.0),
            source="Narayanan et al., SC 2021 (arXiv:2104.04473) section 4: fused bias, GeLU, dropout and scale-mask-softmax kernels, scores in "
            "memory, gradients all-reduced in float32 after the last backward, sends waited for",
        ),
        Framework(
            name="megatron-core", attention="flash-3", fused=True, fused_loss=True, loss_bytes=4.0, overlap_gradients=True,
            tensor_overlap=0.5, state=StateBytes(2.0, 4.0, 12.0, 4.0),
            source="Megatron-LM README (d98e8a64): --overlap-grad-reduce, --overlap-param-gather, --tp-comm-overlap, pipeline overlap by default; "
            "gradients added inside the product's kernel; half of a tensor collective taken as hidden (assumed)",
        ),
        Framework(
            name="torchtitan", attention="flash-2", fused=True, fused_loss=True, loss_bytes=4.0, state=StateBytes(2.0, 4.0, 10.0, 4.0),
            accumulate_bytes=6.0,
            source="FSDP2: float32 weights and states sharded, bfloat16 gathered, gradients reduced in float32; torch.compile of blocks and loss "
            "(820504e: torchtitan/components/loss.py); SDPA's flash kernel",
        ),
        Framework(
            name="composer", attention="flash-2", state=StateBytes(2.0, 4.0, 10.0, 4.0), accumulate_bytes=6.0, per_iteration_s=0.12,
            source="llm-foundry's FSDP on torch 2.1, eager, reductions in float32; the host's time per step is fitted on the seen half of "
            "benchmarks/published.toml",
        ),
        Framework(
            name="deepspeed", attention="flash-2", accumulate_bytes=6.0,
            source="Rajbhandari et al., SC 2020 (ZeRO): 16-bit weights, float32 states, reductions beside the backward; eager kernels; no published "
            "run of it is in benchmarks/published.toml",
        ),
    )
}  # fmt: skip


def framework(name: str) -> Framework:
    """Raises: UnknownName."""
    if name not in FRAMEWORKS:
        raise UnknownName(f"no framework {name!r}", where="framework", hint=f"one of: {', '.join(FRAMEWORKS)}")
    return FRAMEWORKS[name]
