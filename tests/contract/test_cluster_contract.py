"""The battery of orders and allocations on ours. A new one only has to be listed in STRATEGIES."""

from meshwright.testing.contracts.cluster import *  # noqa: F403
