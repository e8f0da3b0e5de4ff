"""How tokens choose experts: shares by law and by file, and what predictions make of them."""

from __future__ import annotations

import pytest
from expert_loops import batch_of, loss_of, model_of

import meshwright as mw
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.errors import FormatError, UsageError
from meshwright.io.costs.expert_loads import read_expert_loads, write_expert_loads
from meshwright.plan.routing import UNIFORM, Routing


def test_shares_sum_to_one_and_follow_the_law():
    assert UNIFORM.shares(4, "a") == [0.25] * 4
    found = Routing(zipf=1.0).shares(8, "a")
    total = sum(1 / i for i in range(1, 9))
    assert sorted(found, reverse=True) == pytest.approx([1 / i / total for i in range(1, 9)]) and found == Routing(zipf=1.0).shares(8, "a")
    assert found != Routing(zipf=1.0).shares(8, "b")


def test_measured_loads_come_first_and_must_fit(tmp_path):
    routing = Routing(zipf=1.0, measured=(("blocks.*", (3, 1)), ("rest", (0, 0))))
    assert routing.shares(2, "blocks.1.experts") == [0.75, 0.25] and routing.shares(2, "rest") == [0.5, 0.5]
    with pytest.raises(UsageError, match="measured with 2 experts"):
        routing.shares(4, "blocks.1")
    write_expert_loads(tmp_path / "loads.json", routing)
    assert read_expert_loads(tmp_path / "loads.json") == Routing(measured=routing.measured)


@pytest.mark.parametrize(("layers", "text"), [("{}", "names no layer"), ('{"a": []}', "got 0 numbers"), ('{"a": [1, -1]}', "none below 0")])
def test_bad_files_are_refused(layers, text, tmp_path):
    (tmp_path / "x.json").write_text(f'{{"schema": "meshwright.expert-loads", "version": 1, "layers": {layers}}}')
    with pytest.raises(FormatError, match=text):
        read_expert_loads(tmp_path / "x.json")


def test_exponents_that_are_none_are_refused():
    with pytest.raises(UsageError, match="must be 0 to 8"):
        Routing(zipf=-1.0)


def test_predictions_follow_the_routing():
    """All tokens on one rank's experts: the step is as long as the worst of every other routing's range; alike: as the least."""
    import torch

    model, found = model_of(torch.float32, converted=True), {}
    one_rank = Routing(measured=(("*", (1, 1, 0, 0)),))
    for name, routing in (("alike", UNIFORM), ("zipf", Routing(zipf=1.5)), ("one", one_rank)):
        wanted = LayoutWanted(data=2, tensor=1, pipeline=1, microbatch=2, expert=2, routing=routing)
        plan = mw.plan(model, batch_of(0), loss=loss_of, fabric="laptop:2", zero=0, wishes=[wanted])
        found[name] = plan.prediction.time_s, plan.decisions["experts"]["options"]
    low, high = found["zipf"][1]["range_s"]
    assert [found["alike"][0], found["alike"][1]["range_s"][0]] == pytest.approx([low, low], rel=1e-9)
    assert found["one"][0] == pytest.approx(found["one"][1]["range_s"][1], rel=1e-9)
    assert low < found["zipf"][0] < high and found["zipf"][1]["routing"] == "zipf:1.5"
