"""The battery of resizing on ours. A new strategy only has to be listed in STRATEGIES."""

from meshwright.testing.contracts.cluster_resize import *  # noqa: F403
