"""The published greedy on a device whose idle times can be gone through by hand."""

from meshwright.decide.pipeline.fill_compat import published_greedy
from meshwright.decide.pipeline.fill_place import Idle
from meshwright.deferrable import Deferrable, FillWork


def item(name: str, seconds: float) -> Deferrable:
    return Deferrable(name=name, kind=name.split()[0], duration_s=seconds, ranks=(0,))


def test_by_hand() -> None:
    """F0 F1, 4 s idle, B0, 2 s idle, B1: A fits at once, B after each backward, an inverse of 3 s alone in a gap, one of 5 s nowhere."""
    idle = Idle(
        step_s=10.0, gaps=(((2.0, 6.0, 2), (7.0, 9.0, 3)),), action_end_s=({"0F0": 1.0, "0F1": 2.0, "0B0": 7.0, "0B1": 10.0},), busy_s=(4.0,)
    )
    curvature = [item(f"curvature {x} 0:m{m}", 1.0) for m in range(2) for x in "AB"]
    (found,) = published_greedy(idle, FillWork(items=(*curvature, item("inverse A 0.0", 3.0))))
    # step 1: A, A in the first gap, B in the second; step 2: B, and the 3 s behind it are too short with the margin; step 3: the inverse
    assert (found.steps, found.exposed_s) == (3, 0.0) and found.used == (12 + 4 + 3) / 30
    (found,) = published_greedy(idle, FillWork(items=(*curvature, item("inverse B 0.0", 5.0))))
    assert found.exposed_s == 5.0 and found.steps == 3
