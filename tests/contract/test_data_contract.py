"""The battery of strategies that feed training on ours. A new one only has to be listed in STRATEGIES."""

from meshwright.testing.contracts.data import *  # noqa: F403
