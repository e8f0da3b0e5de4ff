"""The battery of layout strategies on ours. A new one only has to be listed in STRATEGIES."""

from meshwright.testing.contracts.layout import *  # noqa: F403
