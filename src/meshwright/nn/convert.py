"""Expert layers of other makers' models, found by what they hold and do, and replaced by ours with equal outputs.

Cite: transformers (huggingface/transformers), whose Mixtral, Qwen, OLMoE and DeepSeek classes are the ones meant; J. Liu and others, "DeepSeek-V3"
(arXiv 2412.19437), section 2.1.2, for balance without a loss: a bias that only choosing reads.
Left open there: what else looks alike. Our answer: a layer is replaced if ours gives the same on random tokens, whatever its class is called.
Deviations: routers, shared experts and everything else stay the owner's. So do names, groups, recorded scores, and biases.
Invariant: outputs, losses and gradients are the owner's but for the order of sums; what is not replaced is named, with the reason.
Cost: two passes of eight tokens through every replaced layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import UsageError
from ..kernels.experts.padded import ACTIVATIONS
from .routed import Spread
from .stacked import NAMES, StackedExperts

__all__ = ["ConvertedExperts", "ExpertReport", "FoundRouter", "KeptWhole", "balance_biases", "convert_experts"]

PROBED_TOKENS = 8
CLOSE = 200.0  # roundings, in units of the type's epsilon times the largest value, between two orders of sums
ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]


@dataclass(frozen=True, kw_only=True)
class FoundRouter:
    """What a router was seen to do. score: "softmax", "sigmoid", or "other"; normalised: a token's weights add up to `scale`, else they are the
    score times `scale`; groups: (how many, how many of them a token may use); bias: name of the buffer that is added where experts are chosen."""

    path: str
    k: int
    score: str
    normalised: bool
    scale: float
    groups: tuple[int, int] = (1, 1)
    bias: str = ""

    @property
    def text(self) -> str:
        parts = [f"top {self.k} by {self.score}", "normalised" if self.normalised else "", f"times {self.scale:g}" if self.scale != 1 else ""]
        parts += [f"{self.groups[1]} of {self.groups[0]} groups" if self.groups[0] > 1 else "", f"balanced by {self.bias}" if self.bias else ""]
        return ", ".join(filter(None, parts))


@dataclass(frozen=True, kw_only=True)
class ConvertedExperts:
    """A replaced layer. shared: paths of what all tokens go through beside it; compared: outputs were compared (not where weights have no values)."""

    path: str
    kind: str
    experts: int
    model: int
    inner: int
    activation: str
    router: FoundRouter | None
    shared: tuple[str, ...]
    compared: bool

    @property
    def text(self) -> str:
        router = self.router.text if self.router is not None else "the owner's router"
        shared = f", beside {', '.join(self.shared)}" if self.shared else ""
        checked = "" if self.compared else "; not compared: the weights have no values"
        return f"{self.path} ({self.kind}): {self.experts} experts of {self.model} x {self.inner}, {self.activation}; {router}{shared}{checked}"


@dataclass(frozen=True, kw_only=True)
class KeptWhole:
    path: str
    kind: str
    why: str


@dataclass(frozen=True)
class ExpertReport:
    """What `convert_experts` did."""

    replaced: tuple[ConvertedExperts, ...]
    whole: tuple[KeptWhole, ...]

    @property
    def text(self) -> str:
        lines = [x.text for x in self.replaced] + [f"{x.path} ({x.kind}) stays whole: {x.why}" for x in self.whole]
        return "\n".join(lines) or "no expert layers"


def convert_experts(model: nn.Module, *, capacity_factor: float = 0.0, spread: Spread | None = None, group: Any = None) -> ExpertReport:
    """Replace the expert layers of `model`, in place, by `StackedExperts`.

    capacity_factor: 0 drops nothing, as the owners; others as `MoELayer`. group: the ranks over which experts lie, all of which call this with equal
    weights; None: this process. Its parameters stay the very ones then, so an optimizer made before goes on. spread: how they are reached.
    After this on several ranks, expert parameters are this rank's own (`parameter.meshwright_expert`): leave them out of averages. Their gradients
    are sums over all ranks. Raises: UsageError for a model that is none.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"a {type(model).__name__} was given", where="convert_experts", hint="convert_experts(nn.Module)")
    replaced, whole = [], []
    for path, parent, name, module in list(_candidates(model)):
        found = _activation(module) if (why := _unlike(module)) is None else ""
        why = why or (None if found else "its activation is none of " + ", ".join(ACTIVATIONS))
        if why is None:
            router_path, router = _router(parent, path.rpartition(".")[0], module)
            k = router.k if router is not None else 1
            alone = StackedExperts(module.gate_up_proj, module.down_proj, found, k=k, capacity_factor=0.0)
            why, compared = _differs(module, alone, k)
        if why is not None:
            whole.append(KeptWhole(path=path, kind=type(module).__name__, why=why))
            continue
        made = StackedExperts(
            module.gate_up_proj, module.down_proj, found, k=k, capacity_factor=capacity_factor, spread=spread, group=group
        ).train(module.training)  # fmt: skip
        setattr(parent, name, made)
        base = path.rpartition(".")[0]
        shared = tuple(f"{base}.{n}".lstrip(".") for n, _ in parent.named_children() if n != name and f"{base}.{n}".lstrip(".") != router_path)
        replaced.append(ConvertedExperts(
            path=path, kind=type(module).__name__, experts=made.experts, model=made.form.model, inner=made.form.inner, activation=found,
            router=router, shared=shared, compared=compared,
        ))  # fmt: skip
    return ExpertReport(tuple(replaced), tuple(whole))


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """(path, parent, name, module) of what is called experts, outermost."""
    inside: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{p}.") for p in inside) or isinstance(module, StackedExperts):
            continue
        parent, _, name = path.rpartition(".")
        if path and (name == "experts" or type(module).__name__.endswith("Experts")):
            inside.append(path)
            yield path, model.get_submodule(parent), name, module


def _unlike(module: nn.Module) -> str | None:
    """Why it is not of the form that can be replaced; None if it is."""
    if isinstance(module, nn.ModuleList):
        return "its experts are modules of their own: transformers 5 keeps them in one tensor, or build it with MoELayer(ModuleExpert(...))"
    parameters = dict(module.named_parameters())
    if set(parameters) != set(NAMES):
        return f"its parameters are {', '.join(sorted(parameters)) or 'none'}, not {' and '.join(NAMES)}"
    given = [n for n in inspect.signature(type(module).forward).parameters if n != "self"]
    if given[:3] != ARGUMENTS:
        return f"it is called with ({', '.join(given)}), not ({', '.join(ARGUMENTS)})"
    up, down = parameters["gate_up_proj"], parameters["down_proj"]
    if up.dim() != 3 or down.dim() != 3 or tuple(up.shape) != (down.shape[0], 2 * down.shape[2], down.shape[1]):
        return f"its tensors are {list(up.shape)} and {list(down.shape)}, not [E, 2F, H] and [E, H, F]"
    return None


def _activation(module: nn.Module) -> str:
    """The activation's name, by its values; "" for one that is not known."""
    act, x = getattr(module, "act_fn", None), torch.linspace(-6, 6, 97, dtype=torch.float64, device="cpu")
    if not callable(act):
        return ""
    with torch.no_grad():
        y = act(x)
    return next((name for name, (known, _) in ACTIVATIONS.items() if torch.allclose(known(x), y, rtol=1e-7, atol=1e-9)), "")


def _differs(module: nn.Module, ours: StackedExperts, k: int) -> tuple[str | None, bool]:
    """(why ours is not the same, whether it was compared): on random tokens, experts and weights."""
    up = ours.gate_up_proj
    if up.is_meta or type(up.data).__name__ == "FakeTensor":
        return None, False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PROBED_TOKENS, ours.form.model, generator=generator, dtype=torch.float64, device="cpu").to(up)
    index = torch.rand(PROBED_TOKENS, ours.experts, generator=generator, device="cpu").topk(k).indices.to(up.device)
    weights = torch.rand(PROBED_TOKENS, k, generator=generator, dtype=torch.float64, device="cpu").to(up)
    forward: Any = type(module).forward
    with torch.no_grad():
        got = ours.train(False)(x, index, weights)
        try:
            want = module(x, index, weights)
        except Exception:  # e.g. a product that torch lacks for the type; the plain form is below the owner's choice of one
            try:
                want = getattr(forward, "__wrapped__", forward)(module, x, index, weights)
            except Exception as error:
                return f"it cannot be called on a probe: {type(error).__name__}: {str(error)[:120]}", True
    far, size = float((want - got).abs().max()), float(want.abs().max())
    if not far <= CLOSE * torch.finfo(up.dtype).eps * max(size, 1e-30):
        return f"ours gives other outputs on a probe: {far:.3g} of {size:.3g}", True
    return None, True


def _router(parent: nn.Module, base: str, experts: nn.Module) -> tuple[str, FoundRouter | None]:
    """The sibling that gives (scores, weights, experts), and what it was seen to do; (its path or "", None) where it does neither."""
    for name, module in parent.named_children():
        weight = getattr(module, "weight", None)
        shape = (experts.down_proj.shape[0], experts.down_proj.shape[1])
        if module is experts or not isinstance(weight, torch.Tensor) or tuple(weight.shape) != shape:
            continue
        path = f"{base}.{name}".lstrip(".")
        try:
            return path, _seen(path, module, shape)
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return path, None
    return "", None


def _seen(path: str, module: nn.Module, shape: tuple[int, int]) -> FoundRouter:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, PROBED_TOKENS, shape[1], generator=generator, device="cpu")
    state = {n: torch.zeros(t.shape, dtype=t.dtype, device="cpu") for n, t in module.named_buffers()}
    state |= {"weight": torch.randn(shape, generator=generator, device="cpu") / shape[1] ** 0.5}
    with torch.no_grad():
        logits, weights, index = torch.func.functional_call(module, state, (x,))
    found, scores = "other", {"softmax": logits.float().softmax(-1), "sigmoid": logits.float().sigmoid()}
    ratio = weights
    for name, score in scores.items():
        each = weights / score.gather(1, index)
        if float((each / each[:, :1] - 1).abs().max()) < 1e-3 and found == "other":
            found, ratio = name, each
    total = weights.sum(1)
    normalised = weights.shape[1] > 1 and float((total / total[0] - 1).abs().max()) < 1e-4
    groups = (int(getattr(module, "num_group", 1) or 1), int(getattr(module, "topk_group", 1) or 1))
    limited = groups if groups[0] > 1 and getattr(module, "topk_method", "group") != "greedy" else (1, 1)
    bias = next((n for n, t in module.named_buffers() if tuple(t.shape) == (shape[0],)), "")
    scale = round(float(total[0] if normalised else ratio.mean()), 4)
    return FoundRouter(path=path, k=weights.shape[1], score=found, normalised=normalised, scale=scale, groups=limited, bias=bias)


def balance_biases(model: nn.Module, speed: float, *, group: Any = None) -> dict[str, torch.Tensor]:
    """Move every converted layer's balancing bias by `speed` towards its less loaded experts, and forget the loads. Call it after each step.

    bias += speed · sign(mean load - load), loads summed over the ranks of `group` that share the model's data (DeepSeek-V3, section 2.1.2, where
    speed is 0.001). Returns the loads by path of the experts. Raises: UsageError for a model without such a buffer.
    """
    found = {}
    for path, module in model.named_modules():
        if not isinstance(module, StackedExperts) or module.load is None:
            continue
        parent = model.get_submodule(path.rpartition(".")[0])
        buffers = [b for child in parent.children() if child is not module for _, b in child.named_buffers() if tuple(b.shape) == (module.experts,)]
        if not buffers:
            continue
        load, module.load = module.load, None
        if group is not None:
            dist.all_reduce(load, group=group)
        with torch.no_grad():
            buffers[0] += speed * torch.sign(load.double().mean() - load).to(buffers[0])
        found[path] = load
    if not found:
        raise UsageError("no converted layer with a bias for balance has been trained", where="balance_biases", hint="see convert_experts(...).text")
    return found
