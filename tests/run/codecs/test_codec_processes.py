"""Two real processes over gloo compute what `mean_together` computes in one, bit for bit, with every codec."""

from __future__ import annotations

import pytest
import torch
from codec_rank import SHAPES, STEPS, all_exchanged, gradient
from processes import RankPool

from meshwright.codec.codec import parse_codec
from meshwright.codec.kinds import CODECS
from meshwright.run.codecs import make_codec
from meshwright.testing.codecs_together import mean_together


@pytest.mark.real
def test_processes_and_one_process_agree(pool: RankPool) -> None:
    texts = [k.name for k in CODECS]
    found = pool.run(all_exchanged, 2, texts)
    for i, text in enumerate(texts):
        codec = make_codec(parse_codec(text), SHAPES, name="g")
        states = [codec.new_state() for _ in range(2)]
        expected = torch.stack([mean_together(codec, [gradient(0, s), gradient(1, s)], states, s) for s in range(STEPS)])
        assert torch.equal(found[0][i], expected) and torch.equal(found[1][i], expected), text
