"""Every class of transformers with expert layers, from a small config: recognised and equal, or kept whole and named.

Run: `python benchmarks/expert_classes.py [NAME,...]` (needs transformers 5; two minutes of one processor). Each `...ForCausalLM` whose package
has a class of experts is built twice from one seed, in float64, and one of them is converted. Compared: logits, loss and every gradient, largest
difference over the largest element. Classes that cannot be built from a small config, or do not run as they are, are listed. Target: 1e-9.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pkgutil
import sys
import warnings
from pathlib import Path
from typing import Any

import machine
import torch

from meshwright.nn import convert_experts

TARGET, ROWS, LENGTH, VOCABULARY = 1e-9, 2, 8, 64
# What configs call their sizes; those that a config has are set.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "d_model": 32, "num_hidden_layers": 2, "n_layers": 2, "num_attention_heads": 4, "n_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "moe_intermediate_size": 24, "ffn_dim": 24, "shared_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "intermediate_size_mlp": 24, "expert_ffn_hidden_size": 24, "ffn_hidden_size": 24, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "n_group": 1,
    "num_shared_experts": 1, "n_shared_experts": 1, "moe_num_shared_experts": 1, "topk_group": 1, "num_expert_group": 1, "q_lora_rank": 16,
    "max_position_embeddings": 64, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 0,
    "num_dense_layers": 0, "decoder_sparse_step": 1, "mamba_d_state": 4, "mamba_expand": 2, "mamba_n_heads": 8, "mamba_d_head": 8,
    "mamba_n_groups": 1, "mamba_num_heads": 8, "mamba_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "sliding_window": 8, "moe_layer_start_index": 0, "moe_layer_end_index": 1,
    "moe_layer_interval": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "use_cache": False,
    "router_jitter_noise": 0.0, "attention_dropout": 0.0, "index_topk": 4, "index_n_heads": 2, "index_head_dim": 8, "zero_expert_num": 2,
    "num_nextn_predict_layers": 0, "block_size": 4, "num_layers": 1,
}  # fmt: skip
OPEN = (  # which some defaults leave open
    "num_experts_per_tok", "n_routed_experts", "num_experts", "head_dim", "n_shared_experts", "top_k_experts", "moe_intermediate_size",
)  # fmt: skip
OWN: dict[str, dict[str, Any]] = {  # what single packages ask for beyond that
    "gemma4": {"enable_moe_block": True, "top_k_experts": 2}, "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1}, "hy_v4": {"indexer_types": ["full", "shared"]},
    "qwen4_exp": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4, "indexer_compress_ratio": 1},
}  # fmt: skip
LISTED = ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types", "moe_layer_freq")  # an entry per layer


def kinds(wanted: set[str]) -> list[str]:
    import transformers.models as models

    found = []
    for package in pkgutil.iter_modules(models.__path__):
        source = f"{models.__path__[0]}/{package.name}/modeling_{package.name}.py"
        with contextlib.suppress(OSError):
            text = Path(source).read_text(encoding="utf-8")
            if "Experts(nn.Module" in text and "ForCausalLM(" in text and (not wanted or package.name in wanted):
                found.append(package.name)
    return found


def small_config(kind: Any, own: dict[str, Any]) -> Any:
    """The class's config with small sizes, by the names that its default has."""
    made, layers = kind(), SIZES["num_hidden_layers"]
    default = made.to_dict() | {alias: getattr(made, alias, None) for alias in kind.attribute_map}
    sizes = {n: x for n, x in SIZES.items() if isinstance(default.get(n), (int, float)) or (n in OPEN and n in default)}
    if "kv_lora_rank" in default:  # latent attention has as many heads of keys as of queries
        sizes["num_key_value_heads"] = SIZES["num_attention_heads"]
    settable = [n for n in LISTED if not isinstance(getattr(kind, n, None), property)]
    sizes |= {name: list(x[-layers:]) for name in settable if isinstance(x := default.get(name), (list, tuple))}
    sizes |= own
    config = kind(**sizes)
    for name, value in sizes.items():
        with contextlib.suppress(AttributeError):
            setattr(config, name, value)
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    return config


def compared(name: str) -> dict[str, Any]:
    import transformers

    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    kind = next(getattr(module, n) for n in module.__all__ if n.endswith("ForCausalLM"))
    row: dict[str, Any] = {"what": kind.__name__}
    try:
        config = small_config(kind.config_class, OWN.get(name, {}))
        pair = []
        for _ in range(2):
            torch.manual_seed(0)
            model = kind(config).to(torch.float64).eval()
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.1)
            pair.append(model)
        x = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
        outputs = [stepped(pair[0], x)]
    except Exception as error:
        return row | {"state": "not built or run from a small config", "why": f"{type(error).__name__}: {str(error)[:160]}"}
    report = convert_experts(pair[1])
    if not report.replaced:
        return row | {"state": "stays whole" if report.whole else "not seen", "why": report.whole[0].why if report.whole else ""}
    outputs.append(stepped(pair[1], x))
    off = max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)) for a, b in zip(*outputs, strict=True))
    row |= {"state": "replaced", "value": off, "limit": TARGET, "unit": "", "layers": len(report.replaced), "whole": [w.why for w in report.whole]}
    row |= {"router": r.router.text if (r := report.replaced[0]).router else "", "shared": len(r.shared), "transformers": transformers.__version__}
    return row


def stepped(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Logits, loss, and every gradient there is."""
    logits = model(input_ids=x).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    loss.backward()
    return [logits.detach(), loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def main() -> None:
    warnings.simplefilter("ignore")
    rows = []
    for name in kinds(set(sys.argv[1].split(",")) if len(sys.argv) > 1 else set()):
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                row = compared(name)
            except Exception as error:
                row = {"what": name, "state": "FAILED", "why": f"{type(error).__name__}: {str(error)[:200]}"}
        rows.append(row)
        off = f" {row['value']:.1e}" if "value" in row else ""
        print(f"{row['what']:<36} {row['state']}{off}  {row.get('router') or row.get('why', '')}  {row.get('whole') or ''}", flush=True)
    machine.record("expert_classes", rows, command="python benchmarks/expert_classes.py", raw=[])


if __name__ == "__main__":
    main()
