"""The battery of traffic strategies on ours. A new one only has to be listed in STRATEGIES."""

from meshwright.testing.contracts.traffic import *  # noqa: F403
