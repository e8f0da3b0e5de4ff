"""A collective whose arguments do not fit is refused before anything is sent, as an error that torch's users catch too."""

from __future__ import annotations

import pytest
import torch

from meshwright.errors import UsageError, WrongCall
from meshwright.run.group.routes import packed, require_own_places


def test_elements_that_share_memory_hold_no_result() -> None:
    shared = torch.zeros(1, 3).expand(4, 3)
    for call in (require_own_places, lambda x: packed(x, [])):
        with pytest.raises(WrongCall, match=r"shape \(4, 3\) share memory") as caught:
            call(shared)
        assert isinstance(caught.value, RuntimeError) and isinstance(caught.value, UsageError) and "contiguous" in caught.value.hint
    require_own_places(torch.zeros(4, 3)[:, :2])
