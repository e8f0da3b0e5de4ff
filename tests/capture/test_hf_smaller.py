"""Smaller configurations: fewer of everything, divisible as the ones they come from, whatever a family calls its sizes."""

from __future__ import annotations

import pytest

from meshwright.capture.hf_smaller import smaller_config
from meshwright.errors import Unsupported

LLAMA = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "bos_token_id": 128000, "eos_token_id": [128001, 7], "pad_token_id": None,
    "layer_types": ["full"] * 3 + ["sliding"] * 77, "sliding_window": 4096, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize("split", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("stages", [1, 4, 8])
def test_it_divides_as_the_large_one(split: int, stages: int) -> None:
    found, said = smaller_config(LLAMA, split=split, stages=stages, length=32)
    for name in ("intermediate_size", "num_attention_heads", "vocab_size"):
        assert found[name] < LLAMA[name] and (found[name] % split == 0) == (LLAMA[name] % split == 0), name
    few, many = found["num_key_value_heads"], LLAMA["num_key_value_heads"]
    assert (few % split == 0 or split % few == 0) == (many % split == 0 or split % many == 0) and few <= many
    assert found["num_attention_heads"] % few == 0 and found["hidden_size"] == found["num_attention_heads"] * found["head_dim"]
    assert found["num_hidden_layers"] == max(stages, 4) == len(found["layer_types"]) and found["layer_types"][-1] == "sliding"
    assert found["bos_token_id"] == found["vocab_size"] - 1 and found["eos_token_id"] == [found["vocab_size"] - 1, 7]
    assert found["pad_token_id"] is None and found["tie_word_embeddings"] is False and found["sliding_window"] == 16
    assert f"layers {found['num_hidden_layers']} of 80" in said and set(found) == set(LLAMA)


def test_words_of_other_families() -> None:
    gpt2, said = smaller_config({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}, split=2, stages=2, length=32)
    assert (gpt2["n_embd"], gpt2["n_layer"], gpt2["n_head"], gpt2["vocab_size"]) == (16, 2, 2, 129) and len(said) == 4
    t5, _ = smaller_config(
        {"model_type": "t5", "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "num_decoder_layers": 6}, split=1, stages=3,
        length=32,
    )  # fmt: skip
    assert (t5["num_layers"], t5["num_decoder_layers"], t5["d_kv"], t5["num_heads"]) == (3, 3, 8, 1)


def test_experts_and_names_of_stages() -> None:
    fields = {"model_type": "x", "hidden_size": 512, "num_hidden_layers": 12, "num_experts": 128, "num_experts_per_tok": 8}
    found, _ = smaller_config({**fields, "out_features": ["stage12"]}, split=2, stages=1, length=8)
    assert (found["num_experts"], found["num_experts_per_tok"]) == (4, 2) and "out_features" not in found


def test_what_is_small_already_stays() -> None:
    small = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1, "vocab_size": 20}
    assert smaller_config(small, split=1, stages=4, length=8) == (small, [])


def test_a_configuration_without_the_usual_words_is_refused() -> None:
    with pytest.raises(Unsupported, match="'perceiver' does not say its layers and width"):
        smaller_config({"model_type": "perceiver", "num_latents": 4}, split=1, stages=1, length=8)
