"""The nets that capture is tried on, and the same quantities taken from a real run."""

from __future__ import annotations

import gc
from functools import cache
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from meshwright.capture.forward import TracedForward, trace_forward
from meshwright.capture.graph import capture, capture_and_trace
from meshwright.graph.graph import OpGraph

EXAMPLES = Path(__file__).parents[2] / "examples"
ODD = Path(__file__).with_name("odd_models.py")

# One of each kind, reduced.
NETS = {
    "gpt": (f"{EXAMPLES}/gpt.py:tiny", "cross-entropy"),
    "gpt-tied": (f"{EXAMPLES}/gpt.py:tiny_tied", "cross-entropy"),
    "convnet": (f"{EXAMPLES}/convnet.py:tiny", "cross-entropy"),
    "encoder-decoder": (f"{EXAMPLES}/encoder_decoder.py:tiny", "cross-entropy"),
    "dlrm": (f"{EXAMPLES}/dlrm.py:tiny", "mse"),
    "dlrm-sparse": (f"{EXAMPLES}/dlrm.py:tiny_sparse", f"{EXAMPLES}/dlrm.py:click_loss"),
    "odd": (f"{ODD}:dropout_and_constants", "cross-entropy"),
}


@cache
def graph_of(net: str) -> OpGraph:
    model, loss = NETS[net]
    return capture(model, loss=loss)


@cache
def again_at(net: str, batch_size: int) -> tuple[OpGraph, TracedForward]:
    """Captured again at another batch size, with the trace on fakes that it was made of."""
    model, loss = NETS[net]
    return capture_and_trace(model, loss=loss, batch_size=batch_size)


@cache
def real(net: str, batch_size: int | None = None) -> TracedForward:
    model, loss = NETS[net]
    return trace_forward(model, loss=loss, device="cpu", batch_size=batch_size)


def real_saved_bytes(traced: TracedForward) -> int:
    """What autograd keeps in a real forward pass of the user's module: distinct storages, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in traced.objective.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in parameters:
            kept[x.untyped_storage().data_ptr()] = x  # kept alive: its address stays its own
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        traced.objective(*traced.inputs)
    return sum(x.untyped_storage().nbytes() for x in kept.values())


def real_flops(traced: TracedForward) -> int:
    traced.objective.zero_grad(set_to_none=True)
    with FlopCounterMode(display=False) as counter:
        traced.objective(*traced.inputs).backward()
    traced.objective.zero_grad(set_to_none=True)
    return counter.get_total_flops()


def real_peak_bytes(traced: TracedForward) -> int:
    """Peak of allocator events over one step, on top of parameters, buffers and inputs."""
    module = traced.objective
    module(*traced.inputs).backward()  # what is allocated once only is allocated now
    module.zero_grad(set_to_none=True)
    gc.collect()
    held = sum(x.untyped_storage().nbytes() for x in (*module.parameters(), *module.buffers(), *traced.inputs))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        module(*traced.inputs).backward()
    module.zero_grad(set_to_none=True)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return held + peak
