"""The battery of pipeline schedules on ours. A new one only has to be listed in STRATEGIES."""

from meshwright.testing.contracts.pipeline import *  # noqa: F403
