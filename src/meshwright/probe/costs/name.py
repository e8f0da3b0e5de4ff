"""Names of costs on the command line: `roofline`, `tables:SYSTEM`, or a cost file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...cost import Cost, assumed_cost
from ...errors import UsageError
from ...fabric.fabric import Fabric
from ...io.costs.table import read_cost

if TYPE_CHECKING:
    from .gpu_tables import TablePrices

__all__ = ["load_cost", "load_prices"]


def load_cost(spec: str, fabric: Fabric) -> Cost:
    """The cost that `spec` names, for planning on `fabric`.

    - `roofline`: peak rates of the fabric's devices and the default efficiencies; everything assumed;
    - `tables:SYSTEM` or `tables:SYSTEM:DTYPE`: fitted to measured GPU tables (extra `tables`), e.g. `tables:h100_sxm`; bf16 by default;
    - anything else: the path of a cost file (`meshwright.io.costs.table`).
    `measured` needs the job and is made by the caller (`meshwright.run.calibrate.rank_times`).
    Raises: UsageError, UnknownName, MissingExtra, FormatError.
    """
    if spec == "roofline":
        return assumed_cost(fabric)
    if spec == "measured":
        raise UsageError("measured costs are taken from a job that can run here, not from a name", hint="use roofline, tables:SYSTEM or a cost file")
    kind, _, rest = spec.partition(":")
    if kind == "tables":
        if not rest:
            raise UsageError("tables:SYSTEM needs a system", where=spec, hint="e.g. tables:h100_sxm")
        if any(d.kind == "cpu" for d in fabric.devices):
            raise UsageError(f"fabric {fabric.name!r} has processors, and the tables are of GPUs", where=spec, hint="use roofline or measured")
        from .gpu_tables import tables_cost

        system, _, dtype = rest.partition(":")
        return tables_cost(system, dtype=dtype or "bf16")
    return read_cost(spec)


def load_prices(spec: str, cost: Cost, fabric: Fabric) -> TablePrices | None:
    """Prices of operators behind `tables:SYSTEM`, for planning with `cost` (made by `load_cost`); None for other names and on mixed fabrics.

    Raises: UnknownName, MissingExtra, FormatError.
    """
    kind, _, rest = spec.partition(":")
    if kind != "tables":
        return None
    from .gpu_tables import TablePrices

    return TablePrices.of(rest.partition(":")[0], cost, fabric)
