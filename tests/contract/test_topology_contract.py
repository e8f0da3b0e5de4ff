"""The battery of topology strategies on ours. A new one only has to be listed in STRATEGIES."""

from meshwright.testing.contracts.topology import *  # noqa: F403
