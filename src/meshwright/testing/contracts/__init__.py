"""The contract batteries: what every strategy of a decision must do, on generated problems. For ours, and for anyone's.

`meshwright strategies check PACKAGE` runs them on the strategies that an installed package lists as entry points. In our own suite `tests/contract`
runs them on the tuples of `decide`. They need the `test` extra; nothing in meshwright imports this package.
"""

import pytest

BATTERIES = (
    "cluster", "cluster.resize", "cluster.vms", "collective", "data", "layout", "memory", "pipeline", "place", "restart", "tables", "topology",
    "traffic",
)  # fmt: skip
pytest.register_assert_rewrite(*(f"{__name__}.{name.replace('.', '_')}" for name in BATTERIES))
