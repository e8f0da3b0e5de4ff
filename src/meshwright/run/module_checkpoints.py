"""Planning by whole modules where a step cannot be captured: which children of a module run under a checkpoint.

The module runs once for real, so it must fit here. What autograd keeps is counted by storage, at the child that was running when it was saved; a
child under `torch.utils.checkpoint` keeps its inputs only. Children are chosen by bytes given up per second of forward time until the rest fits.
Predicted: what is kept when backward begins, plus parameters, gradients and inputs; what the backward of the largest child needs counts too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..capture.forward import build_objective
from ..capture.torch_private import storage_key
from ..capture.work import tensors_in
from ..errors import Infeasible

__all__ = ["ModuleUse", "module_uses", "plan_modules"]


@dataclass
class ModuleUse:
    """`kept_bytes`: first saved for backward while it ran; `input_bytes`: of its inputs that nobody else keeps."""

    path: str
    kept_bytes: int = 0
    input_bytes: int = 0
    forward_s: float = 0.0

    @property
    def given_up_bytes(self) -> int:
        return max(0, self.kept_bytes - self.input_bytes)


class _Watch:
    def __init__(self, paths: dict[nn.Module, str], fixed: set[int]) -> None:
        self.uses = {m: ModuleUse(path) for m, path in paths.items()}
        self.running: list[tuple[nn.Module, float]] = []
        self.outside = ModuleUse("")
        self.seen, self.alive = set(fixed), list[torch.Tensor]()

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        if storage_key(x) not in self.seen:
            self.seen.add(storage_key(x))
            self.alive.append(x)
            use = self.uses[self.running[-1][0]] if self.running else self.outside
            use.kept_bytes += x.untyped_storage().nbytes()
        return x

    def before(self, module: nn.Module, given: Any) -> None:
        new = {storage_key(x): x.untyped_storage().nbytes() for x in tensors_in(given) if storage_key(x) not in self.seen}
        self.uses[module].input_bytes += sum(new.values())
        self.running.append((module, time.thread_time()))

    def after(self, module: nn.Module, given: Any, result: Any) -> None:
        at, start = self.running.pop()
        self.uses[at].forward_s += time.thread_time() - start


def module_uses(objective: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[list[ModuleUse], int]:
    """(what each repeated child keeps, bytes kept outside of them): children of the model, a list's members each on its own."""
    model: nn.Module = objective.model
    paths: dict[nn.Module, str] = {}
    for name, child in model.named_children():
        inner = list(child.named_children()) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        paths |= {m: f"{name}.{k}" for k, m in inner} if inner else {child: name}
    fixed = {storage_key(p) for p in (*objective.parameters(), *objective.buffers(), *inputs)}
    watch = _Watch(paths, fixed)
    hooks = [h for m in paths for h in (m.register_forward_pre_hook(watch.before), m.register_forward_hook(watch.after))]
    try:
        with torch.random.fork_rng(devices=[]), torch.autograd.graph.saved_tensors_hooks(watch.pack, lambda x: x):
            objective(*inputs)
    finally:
        for h in hooks:
            h.remove()
    return list(watch.uses.values()), watch.outside.kept_bytes


def plan_modules(model: str, *, loss: str, batch_size: int | None, budget: str | None, refusal: str, seed: int) -> tuple[dict[str, Any], str]:
    """(document, text). Raises: Infeasible when not even a checkpoint around every child fits."""
    from .step_fit import budget_bytes

    objective, source, _ = build_objective(model, loss=loss, batch_size=batch_size, seed=seed, device="cpu")
    uses, outside = module_uses(objective, source.inputs)
    fixed = sum(2 * p.untyped_storage().nbytes() for p in objective.parameters() if p.requires_grad)
    fixed += sum(t.untyped_storage().nbytes() for t in (*source.inputs, *objective.buffers()))
    full = fixed + outside + sum(u.kept_bytes for u in uses)
    limit = full if budget is None else budget_bytes(budget, full)
    chosen: list[ModuleUse] = []
    peak, least = full, full
    for use in sorted(uses, key=lambda u: -u.given_up_bytes / max(u.forward_s, 1e-9)):
        if peak <= limit or not use.given_up_bytes:
            break
        chosen.append(use)
        peak = full - sum(u.given_up_bytes for u in chosen) + max(u.given_up_bytes for u in chosen)
        least = min(least, peak)
    if peak > limit:
        raise Infeasible(
            f"with a checkpoint around every child {least:,} B are kept at least, the budget is {limit:,} B", where=model,
            hint=f"planned by whole modules, because {refusal}; a smaller batch keeps less", data={"least_bytes": least, "budget_bytes": limit},
        )  # fmt: skip
    time_s = sum(u.forward_s for u in chosen)
    document = {
        "schema": "meshwright.memory.modules", "version": 1, "model": model, "batch_size": source.batch_size, "budget_bytes": limit,
        "peak_bytes": peak, "keep_peak_bytes": full, "extra_s": time_s, "checkpoint": [u.path for u in chosen], "refusal": refusal,
    }  # fmt: skip
    text = [f"{model}: planned by whole modules, because {refusal}", f"  kept {peak:,} B of {full:,} B, {time_s * 1e3:.4g} ms computed again"]
    text.append("  under torch.utils.checkpoint: " + (", ".join(u.path for u in chosen) or "nothing"))
    return document, "\n".join(text)
