"""The battery of collective strategies on ours, and what only ours must do. A new strategy only has to be listed in STRATEGIES."""

import sys

from meshwright.decide.collective import strategy
from meshwright.testing.contracts.collective import *  # noqa: F403


def test_header_says_what_the_paper_leaves_open(kind):
    module = sys.modules[kind.__module__]
    assert kind.cite.title == module.CITE.title and isinstance(module.DEVIATIONS, tuple) and module.DEVIATIONS
    for part in ("Cite:", "Left open by the paper:", "Deviations:", "Invariant:", "Cost:"):
        assert part in (module.__doc__ or ""), part
    assert kind.name.replace("-", "") == kind.__name__.lower() and strategy(kind.name) is kind
