"""The strategies deliver what their docstring promises."""

import subprocess
import sys

import pytest
from hypothesis import find, given, settings
from hypothesis.internal.conjecture import providers

from effort import PROFILE
from meshwright.errors import Disconnected
from meshwright.testing.fabrics import SHAPES, fabrics


@given(fabrics(max_devices=7))
def test_connected_unless_asked(fabric):
    fabric.require_connected()
    assert 1 <= len(fabric.devices) <= 7
    assert all(link.rate_Bps > 0 and link.src != link.dst for link in fabric.links)


@given(fabrics(connected=False))
def test_disconnected_on_request(fabric):
    with pytest.raises(Disconnected):
        fabric.require_connected()


@given(fabrics(symmetric=True))
def test_symmetric_means_equal_in_and_out(fabric):
    for actor in fabric.actor_names:
        out = sum(x.rate_Bps for x in fabric.links if x.src == actor)
        assert out == sum(x.rate_Bps for x in fabric.links if x.dst == actor)


@pytest.mark.parametrize("shape", SHAPES)
def test_zero_latency_and_named_shape(shape):
    @settings(max_examples=20)
    @given(fabrics(max_devices=3, zero_latency=True, shapes=[shape]))
    def holds(fabric):
        assert fabric.name == f"random-{shape}"
        assert all(link.latency_s == 0 for link in fabric.links)

    holds()


def _parallel(fabric):
    ends = [(x.src, x.dst) for x in fabric.links]
    return len(ends) != len(set(ends))


def _one_way(fabric):
    ends = {(x.src, x.dst) for x in fabric.links}
    return any((b, a) not in ends for a, b in ends)


@pytest.mark.parametrize("wanted", [_parallel, _one_way, lambda f: len(f.switches) == 3, lambda f: len(f.devices) == 1])
def test_the_odd_cases_are_drawn(wanted):
    assert wanted(find(fabrics(max_devices=5), wanted))


@pytest.mark.interpreter
def test_without_hypothesis_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "from meshwright.errors import MissingExtra\n"
        "try:\n    import meshwright.testing\nexcept MissingExtra as e:\n    assert 'meshwright[test]' in e.hint and e.exit_code == 2\n"
        "else:\n    sys.exit('no error')\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=200).returncode == 0


@pytest.mark.skipif(PROFILE != "ci", reason="others draw constants of sources too")
def test_examples_are_the_same_whatever_was_imported_before():
    """hypothesis has the function that conftest.py replaces, and calls it."""
    before = len(providers._local_constants)
    assert providers.HypothesisProvider(None)._local_constants is providers._get_local_constants()
    assert len(providers._get_local_constants()) == before == 0 and "meshwright" in sys.modules
