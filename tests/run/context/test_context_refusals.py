"""What is not done on a part of the positions is refused before anything runs."""

from __future__ import annotations

import msgspec
import pytest
from rig import graph_of
from tensor_rig import plan_case, run_case

from meshwright.cli.train_plan import _degree
from meshwright.decide.layout.grid import degrees_of
from meshwright.drive.training.decisions import context_of
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.errors import PlanMismatch, UsageError
from meshwright.job import Training
from meshwright.run.calibrate.transport import laptop_shape

MODEL = "tests/run/context_models.py:interleaved"


@pytest.mark.parametrize("text", ["0", "-1", "two", ""])
def test_degrees_are_numbers_or_auto(text: str) -> None:
    assert _degree("auto", "--context") is None and _degree("4", "--context") == 4
    with pytest.raises(UsageError, match="must be auto or a degree"):
        _degree(text, "--context")


def test_degrees_that_do_not_divide_the_devices() -> None:
    context = context_of(Training(model=MODEL, global_batch=2), laptop_shape(4), graph=graph_of(MODEL, 2), wishes=(LayoutWanted(context=3),))
    with pytest.raises(UsageError, match="context degree 3 does not divide 4 devices") as error:
        list(degrees_of(context.problem))
    assert "--context 2" in str(error.value.hint)


def test_another_model() -> None:
    case = plan_case("interleaved", (1, 1, 1), models=MODEL.partition(":")[0] + ":", context=(2, "ring"))
    renamed = tuple(msgspec.structs.replace(s, nodes=(*s.nodes, "nobody")) for s in case.layout.segments)
    case.layout = msgspec.structs.replace(case.layout, segments=renamed)
    with pytest.raises(PlanMismatch, match="runs 'nobody', which the model does not call"):
        run_case(0, None, case)
