"""Classes as owners bring them: objects with a batch of their own (padding, masks, boxes) and a loss that the class computes.

`CLASSES`: name -> (configuration's class, its fields, model's class, kind of batch, more of the batch's tensors).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ROWS, LENGTH, VOCABULARY = 8, 12, 96
TEXT = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64}
KV = {**TEXT, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {**KV, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
BART = {
    "vocab_size": 96, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    "decoder_start_token_id": 2,
}  # fmt: skip
T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
        "num_labels": 5}
STAGES = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "num_labels": 5}
WAVE = {
    **TEXT, "conv_dim": [32, 32], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "num_labels": 5, "classifier_proj_size": 16, "apply_spec_augment": False, "pad_token_id": 0,
}  # fmt: skip
CLIP_TEXT = {**TEXT, "projection_dim": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CLIP_VISION = {**VISION, "projection_dim": 16}


def lengths() -> torch.Tensor:
    return torch.randint(LENGTH // 2, LENGTH + 1, (ROWS,))


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, mask): samples of several lengths, padded on the right."""
    mask = (torch.arange(LENGTH)[None] < lengths()[:, None]).long()
    mask[0] = 1
    return torch.randint(3, VOCABULARY, (ROWS, LENGTH)) * mask, mask


def text() -> dict[str, Any]:
    tokens, mask = padded()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def masked_text() -> dict[str, Any]:
    """A masked language model's: a few positions have targets."""
    tokens, mask = padded()
    chosen = (torch.rand(ROWS, LENGTH) < 0.4) & (mask == 1)
    chosen[:, 0] = True
    return {"input_ids": tokens.masked_fill(chosen, 4), "attention_mask": mask, "labels": tokens.masked_fill(~chosen, -100)}


def classified_text() -> dict[str, Any]:
    tokens, mask = padded()
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.randint(5, (ROWS,))}


def answered_text() -> dict[str, Any]:
    tokens, mask = padded()
    return {"input_ids": tokens, "attention_mask": mask, "start_positions": torch.randint(5, (ROWS,)), "end_positions": torch.randint(5, (ROWS,))}


def chosen_text() -> dict[str, Any]:
    """Multiple choice: three texts a sample."""
    return {"input_ids": torch.randint(3, VOCABULARY, (ROWS, 3, LENGTH)), "labels": torch.randint(3, (ROWS,))}


def translated() -> dict[str, Any]:
    tokens, mask = padded()
    target, kept = padded()
    return {"input_ids": tokens, "attention_mask": mask, "labels": target.masked_fill(kept == 0, -100)}


def pixels(size: int = 32, channels: int = 3) -> torch.Tensor:
    return torch.randn(ROWS, channels, size, size)


def pictures(size: int = 32) -> dict[str, Any]:
    return {"pixel_values": pixels(size), "labels": torch.randint(5, (ROWS,))}


def maps(size: int = 32) -> dict[str, Any]:
    """Segmentation, with pixels that count nowhere."""
    labels = torch.randint(5, (ROWS, size, size))
    labels[:, : size // 4] = 255
    return {"pixel_values": pixels(size), "labels": labels}


def videos() -> dict[str, Any]:
    return {"pixel_values": torch.randn(ROWS, 4, 3, 32, 32), "labels": torch.randint(5, (ROWS,))}


def sound() -> dict[str, Any]:
    return {"input_values": torch.randn(ROWS, 1600), "labels": torch.randint(5, (ROWS,))}


def spoken() -> dict[str, Any]:
    """CTC."""
    labels = torch.randint(1, VOCABULARY, (ROWS, 6))
    labels[::2, 4:] = -100
    return {"input_values": torch.randn(ROWS, 1600), "labels": labels}


def pairs() -> dict[str, Any]:
    tokens, mask = padded()
    return {"input_ids": tokens, "attention_mask": mask, "pixel_values": pixels(), "return_loss": True}


def boxes(count: int = 2) -> list[dict[str, torch.Tensor]]:
    return [{"class_labels": torch.randint(5, (count,)), "boxes": torch.rand(count, 4) * 0.4 + 0.3} for _ in range(ROWS)]


def _config(name: str, fields: dict[str, Any]) -> Any:
    import transformers

    return getattr(transformers, name)(**{k: v() if callable(v) else v for k, v in fields.items()})


Entry = tuple[str, dict[str, Any], str, Callable[[], dict[str, Any]]]
CLASSES: dict[str, Entry] = {
    # decoders
    "recurrent_gemma": ("RecurrentGemmaConfig", {**KV, "lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
        "RecurrentGemmaForCausalLM", text),
    "rwkv": ("RwkvConfig", {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64}, "RwkvForCausalLM",
        lambda: {k: v for k, v in text().items() if k != "attention_mask"}),
    "jamba": ("JambaConfig", {**EXPERTS, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "mamba_d_state": 4, "num_logits_to_keep": None}, "JambaForCausalLM", text),
    "zamba2": ("Zamba2Config", {**KV, "mamba_d_state": 8, "n_mamba_heads": 2, "mamba_ngroups": 1, "mamba_headdim": 32, "chunk_size": 4,
        "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "use_mem_rope": False}, "Zamba2ForCausalLM", text),
    "falcon_h1": ("FalconH1Config", {**KV, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4,
        "mamba_n_groups": 1}, "FalconH1ForCausalLM", text),
    "persimmon": ("PersimmonConfig", KV, "PersimmonForCausalLM", text),
    "phimoe": ("PhimoeConfig", EXPERTS, "PhimoeForCausalLM", text),
    "jetmoe": ("JetMoeConfig", {**EXPERTS, "kv_channels": 8}, "JetMoeForCausalLM", text),
    "mixtral-balanced": ("MixtralConfig", {**EXPERTS, "output_router_logits": True}, "MixtralForCausalLM", text),
    "granitemoehybrid": ("GraniteMoeHybridConfig", {**EXPERTS, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4,
        "layer_types": ["mamba", "attention"], "shared_intermediate_size": 32}, "GraniteMoeHybridForCausalLM", text),
    "qwen3_next": ("Qwen3NextConfig", {**EXPERTS, "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 32, "layer_types": ["linear_attention",
        "full_attention"]}, "Qwen3NextForCausalLM", text),
    "bitnet": ("BitNetConfig", KV, "BitNetForCausalLM", text),
    "diffllama": ("DiffLlamaConfig", KV, "DiffLlamaForCausalLM", text),
    "gpt2-two-heads": ("GPT2Config", {**GPT, "num_labels": 1}, "GPT2DoubleHeadsModel", lambda: {"input_ids": (t := torch.randint(3, 96, (ROWS, 2,
        LENGTH))), "labels": t, "mc_token_ids": torch.randint(LENGTH, (ROWS, 2))}),
    "gpt2-classifier": ("GPT2Config", {**GPT, "num_labels": 5, "pad_token_id": 0}, "GPT2ForSequenceClassification", classified_text),
    "xlnet": ("XLNetConfig", {"vocab_size": 96, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "num_labels": 5},
        "XLNetForSequenceClassification", lambda: {**classified_text()}),
    "minimax": ("MiniMaxConfig", {**EXPERTS, "head_dim": 8, "block_size": 4, "layer_types": ["linear_attention", "full_attention"]},
        "MiniMaxForCausalLM", text),
    "dots1": ("Dots1Config", {**EXPERTS, "head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1}, "Dots1ForCausalLM", text),
    "deepseek_v2": ("DeepseekV2Config", {**KV, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1}, "DeepseekV2ForCausalLM", text),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", {**EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1}, "Ernie4_5_MoeForCausalLM", text),
    "doge": ("DogeConfig", KV, "DogeForCausalLM", text),
    "hunyuan_moe": ("HunYuanMoEV1Config", {**EXPERTS, "head_dim": 8, "moe_topk": [2, 2]}, "HunYuanMoEV1ForCausalLM", text),
    "gemma3n": ("Gemma3nTextConfig", {**KV, "head_dim": 8, "sliding_window": 8, "intermediate_size": [64, 64], "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"], "laurel_rank": 4,
        "activation_sparsity_pattern": [0.5, 0.0]}, "Gemma3nForCausalLM", text),
    "xlstm": ("xLSTMConfig", {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "chunk_size": 4,
        "max_inference_chunksize": 64, "return_last_states": False}, "xLSTMForCausalLM", lambda: {k: v for k,
        v in text().items() if k != "attention_mask"}),
    "qwen2-answers": ("Qwen2Config", KV, "Qwen2ForQuestionAnswering", answered_text),
    # encoders
    "funnel": ("FunnelConfig", {"vocab_size": 96, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "block_sizes": [1, 1],
        "num_decoder_layers": 1, "num_labels": 5}, "FunnelForTokenClassification", lambda: {**text(), "labels": torch.randint(5, (ROWS,
        LENGTH))}),
    "mobilebert": ("MobileBertConfig", {**TEXT, "embedding_size": 16, "intra_bottleneck_size": 32, "true_hidden_size": 32},
        "MobileBertForMaskedLM", masked_text),
    "convbert": ("ConvBertConfig", {**TEXT, "embedding_size": 32}, "ConvBertForMaskedLM", masked_text),
    "perceiver": ("PerceiverConfig", {"vocab_size": 96, "d_model": 32, "num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4, "num_cross_attention_heads": 4, "max_position_embeddings": LENGTH, "qk_channels": 32, "v_channels": 32},
        "PerceiverForMaskedLM", lambda: {("inputs" if k == "input_ids" else k): v for k, v in masked_text().items()}),
    "big_bird": ("BigBirdConfig", {**TEXT, "attention_type": "original_full"}, "BigBirdForMaskedLM", masked_text),
    "layoutlm": ("LayoutLMConfig", {**TEXT, "max_2d_position_embeddings": 64, "num_labels": 5}, "LayoutLMForTokenClassification",
        lambda: {**text(), "bbox": torch.randint(20, (ROWS, LENGTH, 4)).sort(-1).values, "labels": torch.randint(5, (ROWS, LENGTH))}),
    "esm": ("EsmConfig", {**TEXT, "pad_token_id": 0, "mask_token_id": 4, "position_embedding_type": "rotary"}, "EsmForMaskedLM", masked_text),
    "longformer": ("LongformerConfig", {**TEXT, "attention_window": 4, "max_position_embeddings": 80}, "LongformerForMaskedLM", masked_text),
    "luke": ("LukeConfig", {**TEXT, "entity_vocab_size": 20, "entity_emb_size": 16, "max_position_embeddings": 80, "num_labels": 5},
        "LukeForSequenceClassification", classified_text),
    "deberta": ("DebertaConfig", {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16},
        "DebertaForMaskedLM", masked_text),
    "reformer": ("ReformerConfig", {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 2, "attention_head_size": 16,
        "attn_layers": ["local", "local"], "axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16], "local_attn_chunk_length": 4,
        "feed_forward_size": 64, "max_position_embeddings": 16, "is_decoder": True}, "ReformerModelWithLMHead",
        lambda: {"input_ids": (t := torch.randint(3, 96, (ROWS, 16))), "labels": t}),
    "bert-pretraining": ("BertConfig", TEXT, "BertForPreTraining", lambda: {**masked_text(), "next_sentence_label": torch.randint(2, (ROWS,))}),
    "bert-choice": ("BertConfig", TEXT, "BertForMultipleChoice", chosen_text),
    "electra-pretraining": ("ElectraConfig", {**TEXT, "embedding_size": 32}, "ElectraForPreTraining", lambda: {**text(),
        "labels": torch.randint(2, (ROWS, LENGTH))}),
    "roberta-multilabel": ("RobertaConfig", {**TEXT, "max_position_embeddings": 80, "num_labels": 5,
        "problem_type": "multi_label_classification"}, "RobertaForSequenceClassification", lambda: {**classified_text(),
        "labels": torch.randint(2, (ROWS, 5)).float()}),
    "tapas": ("TapasConfig", {**TEXT, "num_labels": 5, "type_vocab_sizes": [3, 8, 8, 2, 8, 8, 4]}, "TapasForSequenceClassification",
        lambda: {**classified_text(), "token_type_ids": torch.randint(2, (ROWS, LENGTH, 7))}),
    # encoder-decoders
    "umt5": ("UMT5Config", T5, "UMT5ForConditionalGeneration", translated),
    "longt5-global": ("LongT5Config", {**T5, "local_radius": 3, "global_block_size": 4, "encoder_attention_type": "transient-global"},
        "LongT5ForConditionalGeneration", translated),
    "switch": ("SwitchTransformersConfig", {**T5, "num_experts": 4, "expert_capacity": 8, "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1}, "SwitchTransformersForConditionalGeneration", translated),
    "led": ("LEDConfig", {**BART, "attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
        "LEDForConditionalGeneration", translated),
    "pegasus_x": ("PegasusXConfig", {**BART, "num_global_tokens": 2, "block_size": 4}, "PegasusXForConditionalGeneration", translated),
    "nllb-moe": ("NllbMoeConfig", {**BART, "num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 16},
        "NllbMoeForConditionalGeneration", translated),
    "bart-classifier": ("BartConfig", {**BART, "num_labels": 5}, "BartForSequenceClassification",
        lambda: {"input_ids": torch.cat([torch.randint(3, 96, (ROWS, LENGTH - 1)), torch.full((ROWS, 1), 2)], 1), "labels": torch.randint(5,
        (ROWS,))}),
    "speech_to_text": ("Speech2TextConfig", {**BART, "input_feat_per_channel": 8, "input_channels": 1, "max_source_positions": 64,
        "max_target_positions": 64, "conv_channels": 16}, "Speech2TextForConditionalGeneration", lambda: {"input_features": torch.randn(ROWS, 40,
        8), "attention_mask": torch.ones(ROWS, 40, dtype=torch.long), "labels": torch.randint(3, 96, (ROWS, 8))}),
    # vision
    "swinv2": ("Swinv2Config", SWIN, "Swinv2ForImageClassification", pictures),
    "mobilevit": ("MobileViTConfig", {"image_size": 32, "patch_size": 2, "hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 8, 16, 16,
        32], "num_attention_heads": 2, "num_labels": 5}, "MobileViTForImageClassification", pictures),
    "levit": ("LevitConfig", {"image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 3, 4], "depths": [1, 1, 1],
        "key_dim": [8, 8, 8], "num_labels": 5, "down_ops": [["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 3, 4, 2, 2]]},
        "LevitForImageClassification", lambda: pictures(64)),
    "poolformer": ("PoolFormerConfig", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4,
        2], "padding": [2, 1], "mlp_ratio": 2.0, "num_labels": 5}, "PoolFormerForImageClassification", pictures),
    "pvt_v2": ("PvtV2Config", {"image_size": 32, "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
        "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "num_labels": 5},
        "PvtV2ForImageClassification", pictures),
    "regnet": ("RegNetConfig", {**STAGES, "groups_width": 4}, "RegNetForImageClassification", pictures),
    "cvt": ("CvtConfig", {"patch_sizes": [3, 3, 3], "patch_stride": [2, 2, 2], "patch_padding": [1, 1, 1], "embed_dim": [8, 16, 32],
        "num_heads": [1, 2, 4], "depth": [1, 2, 3], "num_labels": 5}, "CvtForImageClassification", pictures),
    "focalnet": ("FocalNetConfig", {"image_size": 32, "embed_dim": 16, "depths": [1, 1], "hidden_sizes": [16, 32], "focal_levels": [2, 2],
        "focal_windows": [3, 3], "num_labels": 5}, "FocalNetForImageClassification", pictures),
    "hiera": ("HieraConfig", {"image_size": [32, 32], "patch_size": [7, 7], "embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2],
        "query_stride": [2, 2], "num_query_pool": 1, "masked_unit_size": [4, 4], "masked_unit_attention": [True, False], "num_labels": 5},
        "HieraForImageClassification", pictures),
    "vit_mae": ("ViTMAEConfig", {**VISION, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 32}, "ViTMAEForPreTraining", lambda: {"pixel_values": pixels(), "noise": torch.rand(ROWS, 16)}),
    "segformer-maps": ("SegformerConfig", {"num_encoder_blocks": 4, "depths": [1, 1, 1, 1], "sr_ratios": [4, 2, 1, 1], "hidden_sizes": [8, 16,
        16, 16], "num_attention_heads": [1, 2, 2, 2], "decoder_hidden_size": 16, "num_labels": 5}, "SegformerForSemanticSegmentation", maps),
    "beit-maps": ("BeitConfig", {**VISION, "num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "use_auxiliary_head": True, "pool_scales": [1,
        2]}, "BeitForSemanticSegmentation", maps),
    "upernet": ("UperNetConfig", {"hidden_size": 16, "auxiliary_channels": 8, "auxiliary_in_channels": 16, "num_labels": 5, "pool_scales": [1,
        2], "backbone_config": lambda: _config("ConvNextConfig", {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_stages": 4,
        "out_features": ["stage1", "stage2", "stage3", "stage4"]})}, "UperNetForSemanticSegmentation", maps),
    "yolos": ("YolosConfig", {**VISION, "image_size": [32, 32], "num_detection_tokens": 6}, "YolosForObjectDetection",
        lambda: {"pixel_values": pixels(), "labels": boxes()}),
    "detr": ("DetrConfig", {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_queries": 6, "num_labels": 5, "use_timm_backbone": False,
        "use_pretrained_backbone": False, "backbone": None, "backbone_config": lambda: _config("ResNetConfig", {**STAGES,
        "out_features": ["stage2"]})}, "DetrForObjectDetection", lambda: {"pixel_values": pixels(), "labels": boxes()}),
    "maskformer": ("Mask2FormerConfig", {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 32,
        "encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "dim_feedforward": 32, "num_queries": 6, "num_labels": 5,
        "train_num_points": 32, "backbone_config": lambda: _config("SwinConfig", {**SWIN, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 4, 4],
        "out_features": ["stage1", "stage2", "stage3", "stage4"]})}, "Mask2FormerForUniversalSegmentation", lambda: {"pixel_values": pixels(64),
        "mask_labels": [(torch.rand(2, 64, 64) > 0.5).float() for _ in range(ROWS)], "class_labels": [torch.randint(5,
        (2,)) for _ in range(ROWS)]}),
    "glpn": ("GLPNConfig", {"num_encoder_blocks": 4, "depths": [1, 1, 1, 1], "sr_ratios": [4, 2, 1, 1], "hidden_sizes": [8, 16, 16, 16],
        "num_attention_heads": [1, 2, 2, 2], "decoder_hidden_size": 16}, "GLPNForDepthEstimation", lambda: {"pixel_values": pixels(),
        "labels": torch.rand(ROWS, 32, 32) + 0.1}),
    "videomae-masked": ("VideoMAEConfig", {**VISION, "num_frames": 4, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2, "decoder_intermediate_size": 32}, "VideoMAEForPreTraining", lambda: {"pixel_values": torch.randn(ROWS,
        4, 3, 32, 32), "bool_masked_pos": (torch.arange(32) % 2 == 0).expand(ROWS, 32).clone()}),
    # audio
    "wav2vec2-ctc": ("Wav2Vec2Config", WAVE, "Wav2Vec2ForCTC", spoken),
    "sew": ("SEWConfig", {**WAVE, "squeeze_factor": 2}, "SEWForCTC", spoken),
    "sew-d": ("SEWDConfig", {**WAVE, "squeeze_factor": 2, "max_position_embeddings": 64, "position_buckets": 16}, "SEWDForCTC", spoken),
    "unispeech": ("UniSpeechConfig", {**WAVE, "num_ctc_classes": 96}, "UniSpeechForCTC", spoken),
    "data2vec-audio": ("Data2VecAudioConfig", {**WAVE, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 5}, "Data2VecAudioForCTC", spoken),
    "whisper-classifier": ("WhisperConfig", {**BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32, "num_labels": 5,
        "classifier_proj_size": 16}, "WhisperForAudioClassification", lambda: {"input_features": torch.randn(ROWS, 8, 32),
        "labels": torch.randint(5, (ROWS,))}),
    "moonshine": ("MoonshineConfig", {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4, "encoder_num_key_value_heads": 4,
        "decoder_num_key_value_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1}, "MoonshineForConditionalGeneration", lambda: {"input_values": torch.randn(ROWS, 4000),
        "labels": torch.randint(3, 96, (ROWS, 8))}),
    # several kinds of input
    "clip": ("CLIPConfig", {"text_config": CLIP_TEXT, "vision_config": CLIP_VISION, "projection_dim": 16}, "CLIPModel", pairs),
    "blip": ("BlipConfig", {"text_config": {**CLIP_TEXT, "encoder_hidden_size": 32}, "vision_config": VISION, "projection_dim": 16,
        "image_text_hidden_size": 16}, "BlipForConditionalGeneration", lambda: {**text(), "pixel_values": pixels()}),
    "vilt": ("ViltConfig", {**TEXT, "image_size": 32, "patch_size": 8, "num_labels": 5}, "ViltForQuestionAnswering", lambda: {**{k: v for k,
        v in text().items() if k != "labels"}, "pixel_values": pixels(), "labels": torch.rand(ROWS, 5)}),
    "git": ("GitConfig", {**TEXT, "vision_config": VISION}, "GitForCausalLM", lambda: {**text(), "pixel_values": pixels()}),
    "lxmert": ("LxmertConfig", {**TEXT, "l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 16, "num_qa_labels": 5},
        "LxmertForQuestionAnswering", lambda: {**classified_text(), "visual_feats": torch.randn(ROWS, 4, 16), "visual_pos": torch.rand(ROWS, 4,
        4)}),
    "visual_bert": ("VisualBertConfig", {**TEXT, "visual_embedding_dim": 16, "num_labels": 5}, "VisualBertForQuestionAnswering",
        lambda: {**{k: v for k, v in classified_text().items() if k != "labels"}, "visual_embeds": torch.randn(ROWS, 4, 16),
        "visual_attention_mask": torch.ones(ROWS, 4), "labels": torch.rand(ROWS, 5)}),
    "llava": ("LlavaConfig", {"text_config": {"model_type": "llama", **KV}, "vision_config": {"model_type": "clip_vision_model", **CLIP_VISION},
        "image_token_id": 95, "vision_feature_layer": -1, "image_seq_length": 16}, "LlavaForConditionalGeneration",
        lambda: {"input_ids": (t := torch.cat([torch.full((ROWS, 16), 95), torch.randint(3, 95, (ROWS, LENGTH))], 1)),
        "attention_mask": torch.ones_like(t), "pixel_values": pixels(), "labels": t.masked_fill(t == 95, -100)}),
    "paligemma": ("PaliGemmaConfig", {"text_config": {"model_type": "gemma", **KV, "head_dim": 8},
        "vision_config": {"model_type": "siglip_vision_model", **VISION, "projection_dim": 32}, "image_token_id": 95, "projection_dim": 32,
        "hidden_size": 32}, "PaliGemmaForConditionalGeneration", lambda: {"input_ids": (t := torch.cat([torch.full((ROWS, 16), 95),
        torch.randint(3, 95, (ROWS, LENGTH))], 1)), "attention_mask": torch.ones_like(t), "token_type_ids": torch.zeros_like(t),
        "pixel_values": pixels(), "labels": t.masked_fill(t == 95, -100)}),
    "groupvit": ("GroupViTConfig", {"text_config": CLIP_TEXT, "vision_config": {**VISION, "depths": [1, 1], "num_group_tokens": [4, 2],
        "num_output_groups": [4, 2], "num_hidden_layers": 2}, "projection_dim": 16, "projection_intermediate_dim": 32}, "GroupViTModel", pairs),
    "clap": ("ClapConfig", {"text_config": {**TEXT, "max_position_embeddings": 80, "projection_dim": 16}, "audio_config": {"spec_size": 32,
        "patch_size": 4, "patch_stride": [4, 4], "num_mel_bins": 8, "hidden_size": 32, "patch_embeds_hidden_size": 16, "depths": [1, 1],
        "num_attention_heads": [2, 2], "window_size": 4, "num_classes": 5, "projection_dim": 16, "enable_fusion": False}, "projection_dim": 16},
        "ClapModel", lambda: {**{k: v for k, v in text().items() if k != "labels"}, "input_features": torch.randn(ROWS, 1, 32, 8),
        "return_loss": True}),
    # series
    "time_series": ("TimeSeriesTransformerConfig", {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 2,
        "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}, "TimeSeriesTransformerForPrediction", lambda: {"past_values": torch.randn(ROWS, 10),
        "past_time_features": torch.randn(ROWS, 10, 2), "past_observed_mask": torch.ones(ROWS, 10), "future_values": torch.randn(ROWS, 4),
        "future_time_features": torch.randn(ROWS, 4, 2)}),
    "informer": ("InformerConfig", {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 2, "d_model": 16,
        "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32}, "InformerForPrediction", lambda: {"past_values": torch.randn(ROWS, 10), "past_time_features": torch.randn(ROWS,
        10, 2), "past_observed_mask": torch.ones(ROWS, 10), "future_values": torch.randn(ROWS, 4), "future_time_features": torch.randn(ROWS, 4,
        2)}),
    "patchtst": ("PatchTSTConfig", {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 16,
        "num_attention_heads": 2, "ffn_dim": 32, "num_hidden_layers": 2, "prediction_length": 4}, "PatchTSTForPrediction",
        lambda: {"past_values": torch.randn(ROWS, 16, 2), "future_values": torch.randn(ROWS, 4, 2)}),
}  # fmt: skip


def without_drawing(config: Any) -> Any:
    """Nothing of it draws random numbers: dropout, layers and paths left out at random are off."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            without_drawing(value)
        elif ("drop" in name or name in ("summary_first_dropout",)) and isinstance(value, float):
            setattr(config, name, 0.0)
        elif "drop" in name and isinstance(value, list):
            setattr(config, name, [0.0] * len(value))
        elif isinstance(value, dict):
            for k in [k for k in value if "drop" in str(k)]:
                value[k] = 0.0
    return config


class Owned(torch.nn.Module):
    """An owner's wrapper, in which flags and lists stand."""

    def __init__(self, model: torch.nn.Module, kind: str) -> None:
        super().__init__()
        self.model, self.kind = model, kind

    def forward(self, **batch: torch.Tensor) -> Any:
        if self.kind == "pairs":
            return self.model(**batch, return_loss=True)
        if self.kind == "masks":
            return self.model(batch["pixel_values"], mask_labels=list(batch["mask_labels"]), class_labels=list(batch["class_labels"]))
        labels = [{"class_labels": c, "boxes": b} for c, b in zip(batch["class_labels"], batch["boxes"], strict=True)]
        return self.model(batch["pixel_values"], labels=labels)


def bring(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The module and a batch of `ROWS` samples."""
    import transformers

    config_name, fields, kind, _ = CLASSES[name]
    config = without_drawing(_config(config_name, fields))
    config.use_cache = False
    torch.manual_seed(0)
    module = getattr(transformers, kind)(config).train()
    wrapped, batch = _flat(name, 1)
    return (Owned(module, wrapped) if wrapped else module), batch


def more(name: str, seed: int) -> dict[str, torch.Tensor]:
    """Another batch."""
    return _flat(name, seed)[1]


def _flat(name: str, seed: int) -> tuple[str, dict[str, torch.Tensor]]:
    """(what the wrapper makes of it, tensors by name)."""
    torch.manual_seed(seed)
    batch = CLASSES[name][3]()
    if batch.pop("return_loss", False):
        return "pairs", batch
    if "mask_labels" in batch:
        return "masks", {n: torch.stack(x) if isinstance(x, list) else x for n, x in batch.items()}
    if isinstance(labels := batch.get("labels"), list):
        return "boxes", {"pixel_values": batch["pixel_values"], **{k: torch.stack([x[k] for x in labels]) for k in labels[0]}}
    return "", batch
