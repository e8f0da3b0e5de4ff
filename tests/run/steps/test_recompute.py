"""Recomputation for real: bit-equal gradients, and exactly the policy's bytes kept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from captured import captured
from meshwright.capture.forward import TracedForward, trace_forward
from meshwright.decide.memory.captured import core_attention, layer_nodes, layer_of
from meshwright.decide.memory.problem import Layer, LayerPolicy, policy_of
from meshwright.decide.memory.selective import best_policy
from meshwright.errors import PlanMismatch, UsageError
from meshwright.probe.costs.saved_bytes import saved_bytes
from meshwright.run.steps.recompute import Call, calls_of, recomputing

LEDGER = Path(__file__).parents[2] / "ledger"
LAYERS = ("blocks.0", "blocks.1")


def case(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...], TracedForward, list[tuple[Layer, Any]]]:
    sys.path.insert(0, str(LEDGER))
    try:
        from ledger_blocks import SHAPES, build
    finally:
        sys.path.remove(str(LEDGER))
    torch.manual_seed(3)
    module, inputs = build(SHAPES[name])
    where = f"{LEDGER / 'ledger_blocks.py'}:{name}"
    graph = captured(where, loss="output", scalable=False)
    traced = trace_forward(where, loss="output")
    layers = [(layer_of(graph, path, lambda n: float(n.forward.flops + n.forward.bytes_read)), layer_nodes(graph, path)) for path in LAYERS]
    return module, inputs, traced, layers


def gradients(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    torch.manual_seed(11)
    loss = module(*inputs)
    found = torch.autograd.grad(loss, [*module.parameters()])
    return [loss.detach(), *found, torch.rand(3)]  # the last: the random state after the step


def policies(layer: Layer, nodes: Any) -> dict[str, LayerPolicy]:
    whole = policy_of(layer, ())
    found = {"none": whole, "core": policy_of(layer, [n for n in core_attention(nodes) if n in {o.name for o in layer.operators}])}
    found["all"] = policy_of(layer, [o.name for o in layer.operators])
    found |= {f"optimal {share}": best_policy(layer, whole.kept_bytes * share // 8) for share in (2, 4, 6)}
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["double", "paper", "noise_masks", "llama", "grouped"])
def test_gradients_are_bit_equal_and_the_bytes_are_the_policys(name: str) -> None:
    module, inputs, traced, layers = case(name)
    plain = gradients(module, inputs)
    hooks = saved_bytes(module, lambda: module(*inputs)).by_module
    kept_plain = sum(size for path, size in hooks.items() if path.startswith("blocks.0"))
    assert kept_plain == policy_of(layers[0][0], ()).kept_bytes
    for label in policies(*layers[0]):
        chosen = [policies(*layer)[label] for layer in layers]
        sequences = [calls_of(traced, path, policy.recompute) for path, policy in zip(LAYERS, chosen, strict=True)]
        with recomputing(module.blocks[0], sequences[0]) as first, recomputing(module.blocks[1], sequences[1]) as second:
            again = gradients(module, inputs)
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True)), label
        assert (first.size_bytes, second.size_bytes) == tuple(p.kept_bytes for p in chosen), label
        assert first.recomputed == sum(c.again for c in sequences[0])
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(module, inputs), strict=True))  # and the module is as before


def test_the_allocator_sees_the_same_bytes() -> None:
    """Live memory after forward, from the allocator's events: what a policy saves is really not there."""
    module, _, traced, layers = case("double")
    block, layer = module.blocks[0], layers[0][0]
    x = torch.randn(2, 32, 64, dtype=torch.float64, requires_grad=True)

    def live(policy: LayerPolicy) -> int:
        kept: list[torch.Tensor] = []
        with recomputing(block, calls_of(traced, "blocks.0", policy.recompute)):
            block(x).sum().backward()  # caches and lazy state first
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
                kept.append(block(x))
        events = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        return sum(events) - kept[0].untyped_storage().nbytes()

    state = torch.get_rng_state().nbytes
    for policy in policies(*layers[0]).values():
        sequence = calls_of(traced, "blocks.0", policy.recompute)
        random = sum(c.again and ("dropout" in c.target or "bernoulli" in c.target) for c in sequence)
        # x was there before; each random call keeps its state; hooks are not shown the divisor of the scores, a number as a tensor of 8 bytes
        assert live(policy) == policy.kept_bytes - layer.sizes[0] + random * state + 8


def test_torchs_own_checkpoint_gives_the_same_gradients_and_runs_more() -> None:
    """The peer: a whole block checkpointed by torch. It runs the block's last product again, whose result nobody needs."""
    from torch.utils.checkpoint import checkpoint

    module, inputs, traced, layers = case("double")
    layer = layers[0][0]
    block, forward = module.blocks[0], module.blocks[0].forward
    block.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    theirs = gradients(module, inputs)
    del block.forward
    least = best_policy(layer, layer.sizes[0])  # only the block's input is kept
    with recomputing(block, calls_of(traced, "blocks.0", least.recompute)) as account:
        ours = gradients(module, inputs)
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
    assert account.size_bytes == layer.sizes[0] == 2 * 32 * 64 * 8
    assert account.recomputed < sum(1 for _ in calls_of(traced, "blocks.0", ()))


def test_a_retained_graph_can_be_walked_twice() -> None:
    module, inputs, traced, layers = case("double")
    policy = policy_of(layers[0][0], [o.name for o in layers[0][0].operators])
    with recomputing(module.blocks[0], calls_of(traced, "blocks.0", policy.recompute)):
        loss = module(*inputs)
        leaves = [*module.parameters()]
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        second = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_without_gradients_nothing_changes() -> None:
    module, inputs, traced, _ = case("plain")
    with torch.no_grad():
        expected = module(*inputs)
        with recomputing(module.blocks[0], calls_of(traced, "blocks.0", ())) as account:
            assert torch.equal(module(*inputs), expected)
    assert account.size_bytes == 0


def test_in_place_operators_are_run_again_in_order() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2.0
            y.add_(1.0)
            z = y.relu_()
            return (z * z).sin()

    net, x = Net(), torch.randn(5, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(net(x).sum(), x)
    names = ("aten.mul.Tensor", "aten.add_.Tensor", "aten.relu_.default", "aten.mul.Tensor", "aten.sin.default")
    with recomputing(net, [Call(n, i < 3) for i, n in enumerate(names)]) as account:
        found = torch.autograd.grad(net(x).sum(), x)
    assert torch.equal(found[0], expected[0])
    assert account.size_bytes == 2 * 40  # x, from which y is made again, and z * z, which the sine keeps


def test_a_module_that_does_something_else_is_refused() -> None:
    net = nn.ReLU()
    x = torch.randn(3, requires_grad=True)
    with recomputing(net, [Call("aten.gelu.default", True)]), pytest.raises(PlanMismatch, match=r"call 0 is aten\.relu"):
        net(x)
    with recomputing(net, []), pytest.raises(PlanMismatch, match="fewer calls"):
        net(x)
    with recomputing(net, [Call("aten.relu.default", True)] * 2), pytest.raises(PlanMismatch, match="made 1 calls"):
        net(x)
    assert "forward" not in net.__dict__


def test_choices_outside_the_module_are_refused() -> None:
    _, _, traced, layers = case("plain")
    with pytest.raises(UsageError, match="does not run in module"):
        calls_of(traced, "blocks.0", [layers[1][0].operators[0].name])
    opaque = trace_forward(f"{LEDGER / 'ledger_blocks.py'}:plain", loss="output", opaque=True)
    with pytest.raises(UsageError, match="one operator"):
        calls_of(opaque, "blocks.0", [])
