"""How far a loss may move when its sample is padded: rounding passes, in a narrow precision more of it, a sample that counts otherwise does not."""

from __future__ import annotations

import pytest

from meshwright.run.gate.shapes import TOLERANCE, unlike


@pytest.mark.parametrize("loss", [3e-6, -1.0, 2.5, 4e5])
def test_rounding_passes_and_other_losses_do_not(loss: float) -> None:
    for narrow, least in ((False, TOLERANCE), (True, 100 * TOLERANCE)):
        near, far = loss * (1 + 0.9 * least), loss * (1 + 1.2 * least)
        assert not unlike(loss, near, narrow=narrow) and not unlike(near, loss, narrow=narrow)
        assert unlike(loss, far, narrow=narrow) and unlike(far, loss, narrow=narrow)
    assert unlike(1.0, -1.0, narrow=True) and not unlike(0.0, 0.0, narrow=False)
