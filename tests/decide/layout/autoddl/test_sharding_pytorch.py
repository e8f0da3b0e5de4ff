"""Our signatures beside PyTorch's own sharding rules: what PyTorch runs without a collective gives what we say it gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sharding_problems import graph_of
from torch import fx

from meshwright.capture.forward import trace_forward
from meshwright.decide.layout.autoddl.network import spec_of
from meshwright.decide.layout.autoddl.rules import expand
from meshwright.errors import Unsupported, UsageError
from meshwright.plan.sbp import value_of
from meshwright.run.dtensor.placements import _fake_mesh, derived_signatures, dtensor_signatures, placement_of, wrap

# (case of test_sharding_signatures, signatures of ours that PyTorch must confirm)
CONFIRMED = {
    "mm": {(("S0", "B"), "S0"), (("B", "S1"), "S1"), (("S1", "S0"), "P"), (("B", "B"), "B")},
    "bmm": {(("S0", "S0"), "S0"), (("S1", "B"), "S1"), (("B", "S2"), "S2"), (("S2", "S1"), "P")},
    "add": {(("S0", "S0"), "S0"), (("P", "P"), "P")},
    "mul": {(("S0", "S0"), "S0")}, "relu": {(("S0",), "S0")}, "gelu": {(("S0",), "S0")},
    "softmax": {(("S0",), "S0"), (("S2",), "S2")}, "sum": {(("S1",), "P"), (("S0",), "S0"), (("S2",), "S1")},
    "transpose": {(("S1",), "S2"), (("S2",), "S1")}, "reshape, merge": {(("S0",), "S0")}, "layer_norm": {(("S0", "B", "B"), "S0")},
    "embedding": {(("S1", "B"), "S2"), (("B", "S0"), "S0")}, "linear": {(("S0", "B", "B"), "S0"), (("B", "S0", "S0"), "S1")},
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(CONFIRMED))
def test_pytorch_agrees(case: str) -> None:
    from test_sharding_signatures import CASES, call_of, graph_of, grown

    function, tensors = CASES[case]
    whole: dict[fx.Node, Any] = {}
    given = iter(tensors)
    compared = 0
    for node in graph_of(function, tensors).nodes:
        if node.op == "placeholder":
            whole[node] = grown(next(given), False)
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: whole[n])
            whole[node] = node.target(*args, **kwargs)
            call, _ = call_of(node, whole)
            spec = spec_of(call)
            assert spec is not None
            ours = {(value_of(s.inputs), value_of((s.output,))[0]) for s in expand(spec, call)}
            theirs = set(dtensor_signatures(node.target, args, kwargs))
            assert CONFIRMED[case] <= ours
            assert CONFIRMED[case] <= theirs, f"PyTorch lacks {CONFIRMED[case] - theirs}"
            results = dict(ours)
            for inputs, output in theirs:
                if inputs in results:
                    assert results[inputs] == output, (case, inputs, output, results[inputs])
                    compared += 1
    assert compared >= len(CONFIRMED[case])


def test_operators_we_do_not_know_get_pytorchs_rules() -> None:
    from sharding_problems import __file__ as problems

    traced = trace_forward(f"{problems}:branches")
    found = derived_signatures(traced, ["sort", "relu"])
    assert any(s.inputs == ("S0",) and s.output == "S0" for s in found["relu"])
    assert graph_of("branches").node("sort").target == "aten.sort.default"


def test_placements_by_name() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    assert [placement_of(k) for k in ("R", "B", "S2", "P", "M")] == [Replicate(), Replicate(), Shard(2), Partial(), Partial("max")]
    with pytest.raises(Unsupported, match="block by block"):
        placement_of("S0/3")


def test_a_real_process_group_forbids_asking_and_unknown_names_are_refused() -> None:
    from sharding_problems import problem

    from meshwright.decide.layout.autoddl import AutoDDL

    plan = AutoDDL().plan(problem("fc", devices=2))
    with _fake_mesh(2) as mesh:
        with pytest.raises(UsageError, match="real one"), _fake_mesh(2):
            pass
        with pytest.raises(UsageError, match="the plan has no"):
            wrap(plan, "param:nothing", torch.zeros(1), (1,), mesh)
