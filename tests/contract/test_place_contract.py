"""The battery of placement strategies on ours. A new one only has to be listed in STRATEGIES."""

from meshwright.testing.contracts.place import *  # noqa: F403
