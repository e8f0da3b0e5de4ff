"""The battery of strategies for embedding tables on ours. A new one only has to be listed in STRATEGIES."""

from meshwright.testing.contracts.tables import *  # noqa: F403
