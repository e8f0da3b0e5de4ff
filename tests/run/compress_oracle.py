"""The steps of a plan with codecs worked out in one process: gradients by autograd, groups cut and put together by index, means by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from compress_rig import Rank, initial, model_of, rows
from rig import whole_model

from meshwright.codec.codec import parse_codec
from meshwright.plan.plan import Plan
from meshwright.plan.shards import part_ranges
from meshwright.run.codecs import At, make_codec

Mean = Callable[[list[torch.Tensor], tuple[int, str, int], int], torch.Tensor]


def cut(plan: Plan, name: str, whole: torch.Tensor, tensor: int) -> torch.Tensor:
    """What a tensor index holds of a parameter, as a view where it is all of it."""
    layout = plan.layout
    assert layout is not None
    found = next((s for s in layout.shards if s.param == name and layout.tensor > 1), None)
    if found is None:
        return whole
    ranges = part_ranges(whole.shape[found.axis], found, tensor, layout.tensor)
    return whole.index_select(found.axis, torch.tensor([i for a, b in ranges for i in range(a, b)]))


def put(plan: Plan, name: str, whole: torch.Tensor, tensor: int, part: torch.Tensor) -> None:
    layout = plan.layout
    assert layout is not None
    found = next((s for s in layout.shards if s.param == name and layout.tensor > 1), None)
    if found is None:
        whole.copy_(part)
        return
    ranges = part_ranges(whole.shape[found.axis], found, tensor, layout.tensor)
    whole.index_copy_(found.axis, torch.tensor([i for a, b in ranges for i in range(a, b)]), part)


def replicas(plan: Plan, pipeline: int, stage: int) -> list[list[tuple[int, int]]]:
    """(data index, micro-batch) that each replica of a stage computes, in the order of the replicas."""
    layout = plan.layout
    assert layout is not None
    found = []
    for p in layout.mates(pipeline):
        copies = {c for s, c in layout.hosted(p) if s == stage}
        found += [[(d, m) for m in range(layout.microbatches) if layout.copy(m) in copies] for d in range(layout.data)]
    return found


def by_codec(plan: Plan) -> Mean:
    """Means of groups by the codec's own code, called from here, sums and all; the codec itself is tested elsewhere."""
    layout = plan.layout
    assert layout is not None
    made: dict[Any, Any] = {}

    def mean(flats: list[torch.Tensor], where: tuple[int, str, int], step: int) -> torch.Tensor:
        pipeline, group, tensor = where
        bucket = layout.buckets_of(pipeline)[int(group)]
        names = [n for n in layout.held(pipeline).params if n in bucket.params]
        shapes = [tuple(cut(plan, n, initial(plan.seed, model_of(plan))[1][n], tensor).shape) for n in names]
        for r in range(len(flats)):
            if (where, r) not in made:
                codec = make_codec(parse_codec(bucket.codec), shapes, name=f"group {group} ({names[0]} to {names[-1]})")
                made[where, r] = (codec, codec.new_state())
        ats = [At(step=step, rank=r, world=len(flats)) for r in range(len(flats))]
        rank = [(*made[where, r], ats[r]) for r in range(len(flats))]
        out = torch.empty_like(flats[0])
        payloads = [c.encode(f, state, at) for f, (c, state, at) in zip(flats, rank, strict=True)]
        first = rank[0][0]
        if first.spec.aggregation == "all-gather":
            for r, payload in enumerate(payloads):
                first.decode(first.unpack(payload.wire), out, accumulate=r > 0)
        else:
            while True:
                total = torch.stack([p.summand.double() for p in payloads]).sum(0)
                for p in payloads:
                    p.summand.copy_(total)
                following = [c.advance(p, state, at) for p, (c, state, at) in zip(payloads, rank, strict=True)]
                if following[0] is None:
                    break
                payloads = following
            first.decode(payloads[0], out)
        first.finish(out, len(flats))
        return out

    return mean


def largest(density: float) -> Mean:
    """The k largest magnitudes of gradient and residual; the rest stays. No code of the codecs."""
    memories: dict[Any, torch.Tensor] = {}

    def mean(flats: list[torch.Tensor], where: tuple[int, str, int], step: int) -> torch.Tensor:
        total = torch.zeros_like(flats[0])
        for r, flat in enumerate(flats):
            x = flat + memories.get((where, r), 0)
            at = torch.topk(x.abs(), max(1, int(density * x.numel()))).indices
            sent = torch.zeros_like(x)
            sent[at] = x[at]
            memories[where, r] = x - sent
            total += sent
        return total / len(flats)

    return mean


def serial(plan: Plan, steps: int, mean: Mean, rate: float = 0.05) -> tuple[dict[str, torch.Tensor], list[float]]:
    """(weights after so many steps of SGD, losses): groups with a codec as `mean` has them, all else the plain mean."""
    layout = plan.layout
    assert layout is not None
    module, parameters, _ = whole_model(model_of(plan), seed=plan.seed)
    trained = {n: p for n, p in parameters.items() if p.requires_grad}
    losses = []
    for step in range(steps):
        own: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        total = 0.0
        for d in range(layout.data):
            for m in range(layout.microbatches):
                module.zero_grad()
                loss = module(*rows(step, d, m, plan))
                loss.backward()
                own[d, m] = {n: (torch.zeros_like(p) if p.grad is None else p.grad.clone()) for n, p in trained.items()}
                total += float(loss.detach()) / (layout.data * layout.microbatches)
        losses.append(total)
        means = {n: sum(g[n] for g in own.values()) / len(own) for n in trained}
        for family in layout.families():
            for number, bucket in enumerate(layout.buckets_of(family[0])):
                whose = replicas(plan, family[0], bucket.stage)
                names = [n for n in layout.held(family[0]).params if n in bucket.params]
                for tensor in range(layout.tensor) if bucket.codec else ():
                    flats = []
                    for mine in whose:  # a replica's mean: its share of all micro-batches, times the number of replicas
                        grads = {n: sum((own[at][n] for at in mine), torch.zeros_like(trained[n])) * (len(whose) / len(own)) for n in names}
                        flats.append(torch.cat([cut(plan, n, grads[n], tensor).reshape(-1) for n in names]))
                    found = mean(flats, (family[0], str(number), tensor), step)
                    shapes = [cut(plan, n, means[n], tensor).shape for n in names]
                    for n, shape, piece in zip(names, shapes, found.split([s.numel() for s in shapes]), strict=True):
                        put(plan, n, means[n], tensor, piece.view(shape))
        with torch.no_grad():
            for n, p in trained.items():
                p -= rate * means[n]
    return {n: p.detach() for n, p in parameters.items()}, losses


def agree(plan: Plan, found: list[tuple[dict[str, torch.Tensor], list[float | None]]], wanted: tuple[dict[str, torch.Tensor], list[float]],
          tolerance: float = 2e-6) -> None:  # fmt: skip
    """Every rank's weights are its parts of the serial ones, and replicas' are equal to the last bit; losses are the serial ones."""
    layout = plan.layout
    assert layout is not None
    weights, losses = wanted
    for rank, (mine, _) in enumerate(found):
        pipeline, _, tensor = layout.coordinates(rank)
        for name, value in mine.items():
            torch.testing.assert_close(value, cut(plan, name, weights[name], tensor), rtol=1e-5, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
            twin = found[layout.rank(layout.mates(pipeline)[0], 0, tensor)][0][name]
            assert torch.equal(value, twin), f"{name} differs between replicas"
    for step, loss in enumerate(losses):
        got = {layout.coordinates(r)[:2]: x[step] for r, (_, x) in enumerate(found) if x[step] is not None}
        assert abs(sum(got.values()) / len(got) - loss) <= 1e-5 * max(1.0, abs(loss)), f"loss of step {step}"


def owed(ranks: list[Rank], plan: Plan) -> dict[str, torch.Tensor]:
    """Residuals of all ranks as whole tensors, summed over replicas."""
    total: dict[str, torch.Tensor] = {}
    layout = plan.layout
    assert layout is not None
    for made in ranks:
        for g in made.work.compressed.groups.values():
            pieces = g.state["residual"].split([p.numel() for p in g.parts])
            for name, shape, values in zip(g.names, g.shapes, pieces, strict=True):
                p = made.module.parameters[name]
                index = torch.arange(torch.Size(p.full_shape).numel()).view(p.full_shape)
                where = cut(plan, name, index, layout.coordinates(made.work.rank)[2])
                total.setdefault(name, torch.zeros(index.numel(), dtype=torch.float64)).index_add_(0, where.reshape(-1), values.double())
                assert where.shape == torch.Size(shape)
    return total
