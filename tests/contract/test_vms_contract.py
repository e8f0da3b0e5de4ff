"""The battery of strategies that say where machines go, on ours. A new one only has to be listed in STRATEGIES."""

from meshwright.testing.contracts.cluster_vms import *  # noqa: F403
