"""The battery of memory strategies on ours. A new one only has to be listed in STRATEGIES."""

from meshwright.testing.contracts.memory import *  # noqa: F403
