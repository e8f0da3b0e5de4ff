"""The cost of a job on the machine it runs on: measured compute and calibrated messages, at the ranks' share of the cores."""

from __future__ import annotations

from collections.abc import Mapping

from ...cost import Cost, Priced
from ...run.calibrate.segments import at_share
from ...run.calibrate.transport import Calibration

__all__ = ["run_cost"]


def run_cost(calibration: Calibration, prices: Mapping[str, Priced], *, measured_together: bool = False) -> Cost:
    """`prices` hold CPU seconds (`run.calibrate.rank_times`, `run.calibrate.segments`). Wall time = CPU time x slowdown / share.

    `measured_together`: the ranks measured at the same time, so the prices already contain what they cost each other in caches.
    """
    pacing = calibration.pacing
    table = at_share(prices, pacing.share, 1.0 if measured_together else calibration.slowdown)
    source = f"measured here with {len(calibration.fabric.devices)} ranks, pacing {pacing.mode}, share {pacing.share:g}"
    return Cost(name="measured", table=table, transport=calibration.transport, source=source)
