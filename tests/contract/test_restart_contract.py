"""The battery of restart strategies on ours. A new one only has to be listed in STRATEGIES."""

from meshwright.testing.contracts.restart import *  # noqa: F403
