"""Planning by whole modules where a step cannot be captured: which children of a module run under a checkpoint.

The module runs for real, so it must fit here. What autograd keeps is counted by storage, at the child that was running when it was saved; a child
under `torch.utils.checkpoint` keeps its inputs only. Children are chosen by bytes given up per second of forward time, and every choice is run and
measured until one fits: workspaces and gradients on the way are in no prediction of this mode.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...capture.forward import build_objective
from ...capture.torch_private import storage_key
from ...capture.work import tensors_in
from ...errors import Infeasible, MeshwrightError, RunError, UnknownName
from ...run.steps.storage_peak import peak_of
from .optimizer import optimizer_named

__all__ = ["ModuleUse", "checkpointed", "measured_step_bytes", "module_uses", "plan_modules"]


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


@contextlib.contextmanager
def _named(where: str, paths: Collection[str] = ()) -> Iterator[None]:
    """Errors of the model's own code, of whatever type, as RunError."""
    try:
        yield
    except MeshwrightError:
        raise
    except Exception as error:
        inside = f" with checkpoints around {', '.join(sorted(paths))[:200]}" if paths else ""
        said = str(error).strip().partition("\n")[0][:300]
        raise RunError(
            f"a training step of the model fails{inside}: {type(error).__name__}: {said}",
            where=where, hint="correct the model, and try one training step in plain PyTorch",
        ) from error  # fmt: skip


def module_uses(objective: nn.Module, inputs: tuple[torch.Tensor, ...], *, where: str = "") -> tuple[list[ModuleUse], int]:
    """(what each repeated child keeps, bytes kept outside of them): children of the model, a list's members each on its own.

    Raises: RunError when the forward pass fails.
    """
    model: nn.Module = objective.model
    paths: dict[nn.Module, str] = {}
    for name, child in model.named_children():
        inner = list(child.named_children()) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        paths |= {m: f"{name}.{k}" for k, m in inner} if inner else {child: name}
    fixed = {storage_key(p) for p in (*objective.parameters(), *objective.buffers(), *inputs)}
    watch = _Watch(paths, fixed)
    hooks = [h for m in paths for h in (m.register_forward_pre_hook(watch.before), m.register_forward_hook(watch.after))]
    try:
        with torch.random.fork_rng(devices=[]), torch.autograd.graph.saved_tensors_hooks(watch.pack, lambda x: x), _named(where):
            objective(*inputs)
    finally:
        for h in hooks:
            h.remove()
    return list(watch.uses.values()), watch.outside.kept_bytes


@contextlib.contextmanager
def checkpointed(model: nn.Module, paths: Collection[str]) -> Iterator[None]:
    """While it lasts, the named modules run under `torch.utils.checkpoint`: random states are put back, gradients are the same to the last bit.

    Raises: UnknownName for a path that the model does not have.
    """
    modules = dict(model.named_modules())
    if missing := [x for x in paths if x not in modules]:
        raise UnknownName(f"the model has no module {missing[0][:64]!r}", where="checkpoint", hint=f"there are: {', '.join(list(modules)[1:9])}")
    kept = {path: modules[path].__dict__.get("forward") for path in paths}
    for path in paths:
        modules[path].forward = functools.partial(checkpoint, modules[path].forward, use_reentrant=False)
    try:
        yield
    finally:
        for path, own in kept.items():
            if own is None:
                del modules[path].__dict__["forward"]
            else:
                modules[path].forward = own


def measured_step_bytes(
    objective: nn.Module, inputs: tuple[torch.Tensor, ...], paths: Collection[str], optimizer: str = "none", *, where: str = ""
) -> int:
    """The allocator's peak of a training step with checkpoints around `paths`, the second one, when the optimizer's state is there; parameters,
    gradients, buffers, inputs and state included. Changes the parameters. Raises: RunError when the step fails."""
    make = optimizer_named(optimizer).make
    update = make([p for p in objective.parameters() if p.requires_grad]) if make is not None else None

    def step() -> None:
        with _named(where, paths):
            objective(*inputs).backward()
        if update is not None:
            update.step()

    with torch.random.fork_rng(devices=[]), checkpointed(objective.model, paths):
        step()
        objective.zero_grad(set_to_none=True)
        state = [x for of in update.state.values() for x in of.values() if isinstance(x, torch.Tensor)] if update is not None else []
        peak = peak_of(step, [*objective.parameters(), *objective.buffers(), *inputs, *state])
    objective.zero_grad(set_to_none=True)
    return peak


def plan_modules(
    model: str, *, loss: str, batch_size: int | None, budget: str | None, refusal: str, seed: int, optimizer: str = "none"
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """(document, text). Children are added, those that give up most bytes per second first, until a real step is measured to fit.

    Raises: Infeasible when not even a checkpoint around every child that keeps something fits; RunError when the model's step fails.
    """
    from .fit import budget_bytes

    objective, source, _ = build_objective(model, loss=loss, batch_size=batch_size, seed=seed, device="cpu")
    uses, outside = module_uses(objective, source.inputs, where=model)
    fixed = sum(2 * p.untyped_storage().nbytes() for p in objective.parameters() if p.requires_grad)
    fixed += sum(t.untyped_storage().nbytes() for t in (*source.inputs, *objective.buffers()))
    kept = fixed + outside + sum(u.kept_bytes for u in uses)
    plain = measured_step_bytes(objective, source.inputs, (), optimizer, where=model)
    limit = plain if budget is None else budget_bytes(budget, plain)
    order = [u for u in sorted(uses, key=lambda u: -u.given_up_bytes / max(u.forward_s, 1e-9)) if u.given_up_bytes]
    count, peak, least = 0, plain, plain
    while peak > limit and count < len(order):
        missing, count = peak - limit, count + 1
        while count < len(order) and (missing := missing - order[count - 1].given_up_bytes) > 0:
            count += 1
        peak = measured_step_bytes(objective, source.inputs, [u.path for u in order[:count]], optimizer, where=model)
        least = min(least, peak)
    if peak > limit:
        raise Infeasible(
            f"with a checkpoint around every child a step is measured at {least:,} B at least, the budget is {limit:,} B", where=model,
            hint=f"planned by whole modules, because {refusal}; a smaller batch keeps less", data={"least_bytes": least, "budget_bytes": limit},
        )  # fmt: skip
    chosen = order[:count]
    given_up = sum(u.given_up_bytes for u in chosen)
    predicted = kept - given_up + max((u.given_up_bytes for u in chosen), default=0)
    time_s = sum(u.forward_s for u in chosen)
    document = {
        "schema": "meshwright.memory.modules", "version": 1, "model": model, "batch_size": source.batch_size, "budget_bytes": limit,
        "peak_bytes": predicted, "measured_peak_bytes": peak, "keep_peak_bytes": kept, "measured_keep_peak_bytes": plain, "extra_s": time_s,
        "checkpoint": [u.path for u in chosen], "refusal": refusal,
    }  # fmt: skip
    text = [
        f"{model}: planned by whole modules, because {refusal}",
        f"  measured peak {peak:,} B of {plain:,} B without checkpoints (budget {limit:,} B), {time_s * 1e3:.4g} ms computed again",
        f"  held when backward begins, largest child's own included: {predicted:,} B, of {kept:,} B",
        "  under torch.utils.checkpoint: " + (", ".join(u.path for u in chosen) or "nothing"),
    ]
    return document, "\n".join(text)
