"""Graphs run on threads over one storage: bits equal to eager in every interleaving, and plans that are wrong show."""

import threading
from dataclasses import replace

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from effort import few
from meshwright.arena import rows
from meshwright.check.arena import check_arena
from meshwright.errors import RunError, Unsupported, UsageError
from meshwright.run.executor.arena import ArenaGraph, _Record, arena_graph


class Branches(nn.Module):
    """Two branches, views, a concatenation, normalisation and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.norm, self.head = nn.Linear(16, 32), nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 5)
        self.mix = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(torch.relu(self.left(x)) + torch.tanh(self.right(x)))
        a, b = h.chunk(2, -1)
        out: torch.Tensor = self.head(torch.cat([a * b.sigmoid(), self.mix(b.unsqueeze(1)).sum(1)], -1))
        return out


def step_graph() -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Loss and gradients of one step as one graph of ATen calls."""
    torch.manual_seed(0)
    net = Branches()
    names, values = zip(*((n, p.detach().clone()) for n, p in net.named_parameters()), strict=True)

    def step(x: torch.Tensor, target: torch.Tensor, *parameters: torch.Tensor) -> list[torch.Tensor]:
        given = [p.requires_grad_() for p in parameters]
        loss = nn.functional.cross_entropy(torch.func.functional_call(net, dict(zip(names, given, strict=True)), (x,)), target)
        return [loss, *torch.autograd.grad(loss, given)]

    inputs = [torch.randn(8, 16), torch.randint(0, 5, (8,)), *values]
    return make_fx(step)(*[x.clone() for x in inputs]), [x.detach() for x in inputs]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_every_interleaving_gives_the_bits_of_eager(streams: int) -> None:
    graph, inputs = step_graph()
    wanted = graph(*inputs)
    made = arena_graph(graph, inputs, streams=streams)
    assert len({c.stream for c in made.calls}) == streams
    assert made.plan.arena_bytes < int(made.problem.size_bytes.sum()) / 2
    assert made.copied <= 2  # nearly all results are made where they lie
    before = set(threading.enumerate())
    for seed in range(few(12) if streams > 1 else 1):  # one stream has one order
        assert same(made.run(*inputs, sleep_s=3e-4, seed=seed), wanted)
    assert set(threading.enumerate()) <= before


def test_a_plan_that_shares_too_early_shows() -> None:
    """Two storages in use together at one place: refused by the checker, and wrong when run."""
    graph, inputs = step_graph()
    wanted = graph(*inputs)
    made = arena_graph(graph, inputs, streams=2)
    size, offset = made.problem.size_bytes, made.plan.offset_bytes
    wrong = 0
    for a, b in ((a, b) for a in range(len(size)) for b in range(a) if size[a] == size[b] > 0 and offset[a] != offset[b]):
        moved = offset.copy()
        moved[a] = moved[b]
        plan = replace(made.plan, offset_bytes=moved)
        if check_arena(made.problem, plan).ok:
            continue
        broken = ArenaGraph(made.problem, plan, made.calls, made.outputs, made.placeholders, made.constants)
        shown = any(not same(broken.run(*inputs, sleep_s=3e-4, seed=seed), wanted) for seed in range(60))  # a busy machine shows it late
        assert shown, (made.problem.name(a), made.problem.name(b))
        wrong += 1
        if wrong == 12:
            break
    assert wrong == 12


def test_lifetimes_of_one_order_are_not_safe_on_streams() -> None:
    """Planned as if calls ran one after the other, checked as they run."""
    graph, inputs = step_graph()
    made = arena_graph(graph, inputs, streams=3)
    alone = arena_graph(graph, inputs, streams=1)
    assert alone.problem.names == made.problem.names
    verdict = check_arena(made.problem, replace(alone.plan, clique=made.plan.clique, bound_bytes=made.plan.bound_bytes))
    assert verdict.status == "wrong"
    assert check_arena(replace(made.problem, stream=made.problem.stream * 0), alone.plan).ok


def test_in_place_calls_constants_and_views_as_outputs() -> None:
    table = torch.arange(12.0).reshape(3, 4)

    def function(x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        y = x.cos()
        z = y.exp()
        y.add_(1.0)
        y.mul_(z)
        return y.t()[1:], table[index] + z.sum(), 7

    inputs = [torch.randn(4, 4), torch.tensor([2, 0])]
    graph = make_fx(function)(*inputs)
    wanted = graph(*inputs)
    made = arena_graph(graph, inputs, streams=3)
    for seed in range(8):
        found = made.run(*inputs, sleep_s=3e-4, seed=seed)
        assert same(found[:2], wanted[:2]) and found[2] == 7
    other = [torch.randn(4, 4), torch.tensor([1, 1])]
    assert same(made.run(*other)[:2], graph(*other)[:2])


def test_who_reads_through_a_view_waits_for_what_was_written_in_place() -> None:
    """No edge of the graph says so: the view was made before."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.cos()
        row = y[0]
        y.add_(1.0)
        return row * 2.0

    inputs = [torch.randn(4, 4)]
    record = _Record(make_fx(function)(*inputs), inputs)
    number = {str(c.node.target): i for i, c in enumerate(record.calls)}
    cos, select, add, mul = (number[f"aten.{name}"] for name in ("cos.default", "select.int", "add_.Tensor", "mul.Tensor"))
    assert record.depends[mul] == {select, add} and record.depends[add] == {cos, select}


def test_nothing_in_the_arena_survives_its_last_reader() -> None:
    graph, inputs = step_graph()
    made = arena_graph(graph, inputs, streams=2)
    loose = ArenaGraph(made.problem, made.plan, made.calls, made.outputs, made.placeholders, made.constants)
    wanted = graph(*inputs)
    assert same(loose.run(*inputs, poison=False), wanted)
    early = rows([list(made.problem.consumers[t]) for t in range(len(made.problem.size_bytes))])
    assert len(early) == len(made.problem.size_bytes)
    first = next(c for c in made.calls if c.makes and not any(t in made.problem.to_end for t in c.touches) and len(c.touches) == 1)
    for call in made.calls:  # whoever reads what `first` made does not count: its range is overwritten at once
        if call is not first:
            call.touches = tuple(t for t in call.touches if t not in first.touches)
    assert not same(made.run(*inputs), wanted)


def test_what_cannot_run_is_refused_by_name() -> None:
    graph, inputs = step_graph()
    with pytest.raises(UsageError, match="at least 1"):
        arena_graph(graph, inputs, streams=0)
    with pytest.raises(UsageError, match="no input for"):
        arena_graph(graph, inputs[:-1])
    made = arena_graph(graph, inputs)
    with pytest.raises(UsageError, match=f"got 1 inputs for {len(inputs)}"):
        made.run(inputs[0])
    with pytest.raises(Unsupported, match=r"draws random numbers"):
        arena_graph(make_fx(lambda x: torch.rand_like(x) + x)(torch.ones(2)), [torch.ones(2)])
    with pytest.raises(Unsupported, match="is no call of an operator"):
        arena_graph(fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2))), [torch.ones(1, 2)])


def test_a_call_that_fails_is_named_and_no_thread_waits() -> None:
    graph, inputs = step_graph()
    made = arena_graph(graph, inputs, streams=2)
    before = set(threading.enumerate())
    with pytest.raises(RunError) as failed:
        made.run(inputs[0][:, :3], *inputs[1:])
    assert failed.value.data["call"] in {c.node.name for c in made.calls}
    assert set(threading.enumerate()) <= before
