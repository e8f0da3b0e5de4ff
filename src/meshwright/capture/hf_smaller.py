"""A smaller model of the same classes: a configuration with fewer layers, narrower, which divides as the one that it comes from.

Layers: one per pipeline stage at least, and as many as it takes to have one of each kind. Heads, key-value heads, vocabulary and hidden sizes that
`split` ranks divide are multiples of it, others are not. What a configuration calls its sizes differs by family; `SIZES` has the words. A field that
none of them names stays as it is, so a model may stay large in a place, or transformers may refuse the mixture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import Unsupported

__all__ = ["smaller_config"]

SIZES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"),
    "width": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
    "key-value heads": ("num_key_value_heads", "num_kv_heads"),
    "head width": ("head_dim", "d_kv"),
    "hidden width": (
        "intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_hidden_size", "hidden_dim",
        "moe_intermediate_size", "shared_expert_intermediate_size",
    ),
    "vocabulary": ("vocab_size",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts of a token": ("num_experts_per_tok", "num_experts_per_token"),
    "projected width": ("word_embed_proj_dim", "embedding_size"),
    "rotary width": ("rotary_dim",),
    "window": ("sliding_window", "window_size", "local_attention"),
}  # fmt: skip
HEAD_WIDTH = 8  # of a head in the copy: even, for rotary positions
MAX_RATIO = 4  # of query heads to key-value heads
VOCABULARY = 64  # rows of a rank
HIDDEN_WIDTH = 16  # of a rank
EXPERTS = 4
OF_STAGES = ("stage_names", "out_features", "out_indices")  # follow from the layers, and would name some that are gone


def smaller_config(fields: Mapping[str, Any], *, split: int, stages: int, length: int) -> tuple[dict[str, Any], list[str]]:
    """(a configuration of the same type with all its fields, what of it is smaller, in words). `length`: tokens that it is to be used with.

    Raises: Unsupported where the configuration names no layers or no width.
    """
    found, said = dict(fields), list[str]()

    def put(what: str, size: Any) -> None:
        """`size` of the value that is there; said once."""
        changed: dict[int, int] = {}
        for name in SIZES[what]:
            old = fields.get(name)
            if isinstance(old, int) and not isinstance(old, bool) and old > 0 and (new := size(old)) < old:
                found[name] = changed[old] = new
        said.extend(f"{what} {new} of {old}" for old, new in list(changed.items())[:1])

    def number(what: str) -> int:
        return next((x for n in SIZES[what] if isinstance(x := fields.get(n), int) and not isinstance(x, bool)), 0)

    layers, width, heads = number("layers"), number("width"), number("heads")
    if not layers or not width:
        raise Unsupported(f"a configuration of type {fields.get('model_type')!r} does not say its layers and width by the usual names")
    kept = max(min(layers, stages), _kinds_of_layers(fields, layers), min(layers, 2))
    put("layers", lambda old: kept)
    for name, value in fields.items():  # a kind for each layer
        if isinstance(value, list) and len(value) == layers:
            found[name] = value[:kept]
    few = number("key-value heads") or heads
    new_few = _divided(few, split, split) if few % split == 0 or split % few else few
    new_heads = new_few * min(max(1, heads // max(1, few)), MAX_RATIO) if heads else 0
    if heads and heads % split == 0 and new_heads % split:
        new_heads = split * new_few
    new_width = max(1, new_heads) * HEAD_WIDTH
    put("width", lambda old: new_width)
    put("heads", lambda old: new_heads)
    put("key-value heads", lambda old: new_few)
    put("head width", lambda old: HEAD_WIDTH)
    put("rotary width", lambda old: HEAD_WIDTH // 2)
    put("projected width", lambda old: new_width)
    put("hidden width", lambda old: _divided(old, split, HIDDEN_WIDTH * split))
    put("experts", lambda old: max(EXPERTS, split))
    put("experts of a token", lambda old: EXPERTS // 2)
    put("vocabulary", lambda old: _divided(old, split, VOCABULARY * split))
    put("window", lambda old: max(2, length // 2))
    for name in OF_STAGES:
        found.pop(name, None)
    words = number("vocabulary") and found[next(n for n in SIZES["vocabulary"] if n in found)]
    for name, value in fields.items():
        if words and name.endswith("_token_id") and isinstance(value, int) and value >= words:
            found[name] = words - 1
        elif words and name.endswith("_token_id") and isinstance(value, list):
            found[name] = [min(x, words - 1) for x in value]
    return found, said


def _divided(old: int, split: int, new: int) -> int:
    """`new`, a multiple of `split`, or the number after it where `old` is none."""
    return min(old, new if old % split == 0 else new + 1)


def _kinds_of_layers(fields: Mapping[str, Any], layers: int) -> int:
    """How many layers it takes, from the first on, to have one of each kind that the configuration lists."""
    lists = [v for v in fields.values() if isinstance(v, list) and len(v) == layers and all(isinstance(x, (str, int, float)) for x in v)]
    return max((max(v.index(x) for x in set(v)) + 1 for v in lists), default=1)
