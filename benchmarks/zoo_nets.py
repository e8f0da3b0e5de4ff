"""The zoo: configurations of transformers' classes, small, and model functions of other nets. `TRANSFORMERS`: name -> (fields, loss)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

TEXT = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
KV = {**TEXT, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
BART = {
    "vocab_size": 96, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    "decoder_start_token_id": 2,
}  # fmt: skip
T5 = {
    "vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8, "num_labels": 5
}  # fmt: skip
EXPERTS = {**KV, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WAVE = {
    **TEXT, "conv_dim": [32, 32], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "num_labels": 5, "classifier_proj_size": 16, "apply_spec_augment": False,
}  # fmt: skip


def _named(model_type: str, kind: str, fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [kind], **fields, **more}


TRANSFORMERS: dict[str, tuple[dict[str, Any], str]] = {
    # decoders
    "gpt2": (_named("gpt2", "GPT2LMHeadModel", GPT), "cross-entropy"),
    "gpt_neo": (
        _named(
            "gpt_neo", "GPTNeoForCausalLM", {**TEXT, "num_layers": 2, "num_heads": 4}, attention_types=[[["global", "local"], 1]], window_size=8
        ),
        "cross-entropy",
    ),
    "gpt_neox": (_named("gpt_neox", "GPTNeoXForCausalLM", TEXT, bos_token_id=1, eos_token_id=2), "cross-entropy"),
    "gptj": (_named("gptj", "GPTJForCausalLM", GPT, rotary_dim=4), "cross-entropy"),
    "codegen": (_named("codegen", "CodeGenForCausalLM", GPT, rotary_dim=4), "cross-entropy"),
    "llama": (_named("llama", "LlamaForCausalLM", KV), "cross-entropy"),
    "llama-own-loss": (_named("llama", "LlamaForCausalLM", KV, tie_word_embeddings=True), "output"),
    "mistral": (_named("mistral", "MistralForCausalLM", KV, sliding_window=8), "cross-entropy"),
    "qwen2": (_named("qwen2", "Qwen2ForCausalLM", KV), "cross-entropy"),
    "qwen3": (_named("qwen3", "Qwen3ForCausalLM", KV, head_dim=8), "cross-entropy"),
    "gemma": (_named("gemma", "GemmaForCausalLM", KV, head_dim=8), "cross-entropy"),
    "gemma2": (_named("gemma2", "Gemma2ForCausalLM", KV, head_dim=8, sliding_window=8), "cross-entropy"),
    "gemma3_text": (_named("gemma3_text", "Gemma3ForCausalLM", KV, head_dim=8, sliding_window=8), "cross-entropy"),
    "phi": (_named("phi", "PhiForCausalLM", KV), "cross-entropy"),
    "phi3": (_named("phi3", "Phi3ForCausalLM", KV), "cross-entropy"),
    "opt": (_named("opt", "OPTForCausalLM", {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32, "pad_token_id": 1}), "cross-entropy"),
    "bloom": (_named("bloom", "BloomForCausalLM", {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4}), "cross-entropy"),
    "falcon": (_named("falcon", "FalconForCausalLM", TEXT), "cross-entropy"),
    "mpt": (_named("mpt", "MptForCausalLM", {"vocab_size": 96, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}), "cross-entropy"),
    "olmo2": (_named("olmo2", "Olmo2ForCausalLM", KV), "cross-entropy"),
    "stablelm": (_named("stablelm", "StableLmForCausalLM", KV), "cross-entropy"),
    "cohere": (_named("cohere", "CohereForCausalLM", KV), "cross-entropy"),
    "starcoder2": (_named("starcoder2", "Starcoder2ForCausalLM", KV), "cross-entropy"),
    "granite": (_named("granite", "GraniteForCausalLM", KV), "cross-entropy"),
    "biogpt": (_named("biogpt", "BioGptForCausalLM", TEXT), "cross-entropy"),
    "mamba": (_named("mamba", "MambaForCausalLM", {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}), "cross-entropy"),
    # mixtures of experts
    "mixtral": (_named("mixtral", "MixtralForCausalLM", EXPERTS), "cross-entropy"),
    "qwen2_moe": (_named("qwen2_moe", "Qwen2MoeForCausalLM", EXPERTS, shared_expert_intermediate_size=32), "cross-entropy"),
    "qwen3_moe": (_named("qwen3_moe", "Qwen3MoeForCausalLM", EXPERTS, head_dim=8), "cross-entropy"),
    "olmoe": (_named("olmoe", "OlmoeForCausalLM", EXPERTS), "cross-entropy"),
    "granitemoe": (_named("granitemoe", "GraniteMoeForCausalLM", EXPERTS), "cross-entropy"),
    # encoders
    "bert": (_named("bert", "BertForMaskedLM", TEXT), "cross-entropy"),
    "bert-classifier": (_named("bert", "BertForSequenceClassification", TEXT, num_labels=5), "cross-entropy"),
    "bert-own-loss": (_named("bert", "BertForTokenClassification", TEXT, num_labels=5), "output"),
    "roberta": (_named("roberta", "RobertaForMaskedLM", {**TEXT, "max_position_embeddings": 80}), "cross-entropy"),
    "distilbert": (
        _named("distilbert", "DistilBertForMaskedLM", {"vocab_size": 96, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}), "cross-entropy"
    ),
    "electra": (_named("electra", "ElectraForSequenceClassification", TEXT, embedding_size=32, num_labels=5), "cross-entropy"),
    "albert": (_named("albert", "AlbertForMaskedLM", TEXT, embedding_size=16), "cross-entropy"),
    "deberta-v2": (
        _named("deberta-v2", "DebertaV2ForMaskedLM", TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=16),
        "cross-entropy",
    ),
    "mpnet": (_named("mpnet", "MPNetForMaskedLM", {**TEXT, "max_position_embeddings": 80}), "cross-entropy"),
    "modernbert": (_named("modernbert", "ModernBertForMaskedLM", TEXT, pad_token_id=0, local_attention=8), "cross-entropy"),
    # encoder-decoders
    "t5": (_named("t5", "T5ForConditionalGeneration", T5), "cross-entropy"),
    "t5-own-loss": (_named("t5", "T5ForConditionalGeneration", T5), "output"),
    "bart": (_named("bart", "BartForConditionalGeneration", BART), "cross-entropy"),
    "mbart": (_named("mbart", "MBartForConditionalGeneration", BART), "cross-entropy"),
    "marian": (_named("marian", "MarianMTModel", BART), "cross-entropy"),
    "pegasus": (_named("pegasus", "PegasusForConditionalGeneration", BART), "cross-entropy"),
    # vision
    "vit": (_named("vit", "ViTForImageClassification", VISION), "cross-entropy"),
    "deit": (_named("deit", "DeiTForImageClassification", VISION), "cross-entropy"),
    "dinov2": (_named("dinov2", "Dinov2ForImageClassification", VISION), "cross-entropy"),
    "beit": (_named("beit", "BeitForImageClassification", VISION), "cross-entropy"),
    "swin": (
        _named("swin", "SwinForImageClassification", {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4],
               "window_size": 4, "num_labels": 5}), "cross-entropy",
    ),
    "convnext": (_named("convnext", "ConvNextForImageClassification", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32,
                        "num_labels": 5}), "cross-entropy"),
    "mobilenet_v2": (
        _named("mobilenet_v2", "MobileNetV2ForImageClassification", {"depth_multiplier": 0.25, "image_size": 32, "num_labels": 5}), "cross-entropy"
    ),
    "resnet": (_named("resnet", "ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "image_size": 32,
                      "num_labels": 5, "layer_type": "basic"}), "cross-entropy"),
    "segformer": (_named("segformer", "SegformerForImageClassification", {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1],
                         "hidden_sizes": [8, 16], "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
                         "decoder_hidden_size": 16, "image_size": 32, "num_labels": 5}), "cross-entropy"),
    # audio
    "whisper": (_named("whisper", "WhisperForConditionalGeneration", {**BART, "num_mel_bins": 8, "max_source_positions": 16,
                       "max_target_positions": 32}), "cross-entropy"),
    "wav2vec2": (_named("wav2vec2", "Wav2Vec2ForSequenceClassification", WAVE), "cross-entropy"),
    "hubert": (_named("hubert", "HubertForSequenceClassification", WAVE), "cross-entropy"),
    "ast": (_named("audio-spectrogram-transformer", "ASTForAudioClassification", {**VISION, "max_length": 32, "num_mel_bins": 16}), "cross-entropy"),
    # in no list when it was first run with them
    "smollm3": (_named("smollm3", "SmolLM3ForCausalLM", KV), "cross-entropy"),
    "gpt_oss": (_named("gpt_oss", "GptOssForCausalLM", EXPERTS, head_dim=8, sliding_window=8), "cross-entropy"),
    "deepseek_v3": (
        _named("deepseek_v3", "DeepseekV3ForCausalLM", {**KV, "num_key_value_heads": 4}, q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=4,
               qk_nope_head_dim=4, v_head_dim=8, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16,
               first_k_dense_replace=1), "cross-entropy",
    ),
    "mamba2": (
        _named("mamba2", "Mamba2ForCausalLM", {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8,
               "head_dim": 8, "n_groups": 1, "chunk_size": 4}), "cross-entropy",
    ),
    "lfm2": (_named("lfm2", "Lfm2ForCausalLM", KV, layer_types=["conv", "full_attention"]), "cross-entropy"),
    "xglm": (
        _named("xglm", "XGLMForCausalLM", {"vocab_size": 96, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4,
               "max_position_embeddings": 64}), "cross-entropy",
    ),
    "exaone4": (_named("exaone4", "Exaone4ForCausalLM", KV, head_dim=8, sliding_window=8, sliding_window_pattern=2), "cross-entropy"),
    "glm4": (_named("glm4", "Glm4ForCausalLM", KV, head_dim=8), "cross-entropy"),
    "ernie4_5": (_named("ernie4_5", "Ernie4_5ForCausalLM", KV, head_dim=8), "cross-entropy"),
    "hunyuan": (_named("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", KV, head_dim=8), "cross-entropy"),
    "nemotron": (_named("nemotron", "NemotronForCausalLM", KV, head_dim=8), "cross-entropy"),
    "apertus": (_named("apertus", "ApertusForCausalLM", KV), "cross-entropy"),
    "arcee": (_named("arcee", "ArceeForCausalLM", KV, head_dim=8), "cross-entropy"),
    "seed_oss": (_named("seed_oss", "SeedOssForCausalLM", KV, head_dim=8), "cross-entropy"),
    "helium": (_named("helium", "HeliumForCausalLM", KV, head_dim=8), "cross-entropy"),
    "cohere2": (_named("cohere2", "Cohere2ForCausalLM", KV, sliding_window=8), "cross-entropy"),
    "vaultgemma": (_named("vaultgemma", "VaultGemmaForCausalLM", KV, head_dim=8, sliding_window=8), "cross-entropy"),
    "glm4_moe": (
        _named("glm4_moe", "Glm4MoeForCausalLM", EXPERTS, head_dim=8, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1,
               topk_group=1), "cross-entropy",
    ),
    "llama4": (
        _named("llama4_text", "Llama4ForCausalLM", EXPERTS, head_dim=8, intermediate_size_mlp=64, interleave_moe_layer_step=2,
               attention_chunk_size=16), "cross-entropy",
    ),
    "roformer": (_named("roformer", "RoFormerForMaskedLM", TEXT, embedding_size=32), "cross-entropy"),
    "fnet": (_named("fnet", "FNetForMaskedLM", TEXT), "cross-entropy"),
    "m2m_100": (_named("m2m_100", "M2M100ForConditionalGeneration", BART), "cross-entropy"),
}  # fmt: skip

NETS: dict[str, str] = {}  # of model functions below: the loss


def _net(loss: str) -> Any:
    def add(function: Any) -> Any:
        NETS[function.__name__] = loss
        return function

    return add


@_net("mse")
def unet():
    """diffusers' conditional U-Net."""
    from diffusers import UNet2DConditionModel

    module = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4, cross_attention_dim=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=4,
    )  # fmt: skip
    inputs = {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.randint(1000, (2,)), "encoder_hidden_states": torch.randn(2, 5, 16)}
    return module, {**inputs, "target": torch.randn(2, 4, 8, 8)}


@_net("cross-entropy")
def perceptron():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 5)), (torch.randn(2, 16), torch.randint(5, (2,)))


class Sequence(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.table, self.net, self.head = nn.Embedding(20, 16), kind(16, 16, num_layers=2, batch_first=True), nn.Linear(16, 20)

    def forward(self, x):
        return self.head(self.net(self.table(x))[0])


def _tokens() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(20, (2, 6)), torch.randint(20, (2, 6))


@_net("cross-entropy")
def lstm():
    return Sequence(nn.LSTM), _tokens()


@_net("cross-entropy")
def gru():
    return Sequence(nn.GRU), _tokens()


@_net("cross-entropy")
def conv_group_norm():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    return net, (torch.randn(2, 3, 12, 12), torch.randint(5, (2,)))


@_net("cross-entropy")
def conv_batch_norm_frozen():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(200, 5))
    net[1].eval()
    return net, (torch.randn(2, 3, 12, 12), torch.randint(5, (2,)))


@_net("mse")
def autoencoder():
    net = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.Tanh(), nn.ConvTranspose2d(4, 1, 4, stride=2, padding=1))
    return net, (torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8))


@_net("cross-entropy")
def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(20, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 20)), _tokens()


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.net = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.net(self.table(source), self.table(target), tgt_mask=mask, tgt_is_causal=True))


@_net("cross-entropy")
def translator():
    return Translator(), (*_tokens(), torch.randint(20, (2, 6)))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(50, 16, mode="mean"), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.bag(x))


@_net("mse")
def bags():
    return Bags(), (torch.randint(50, (2, 4)), torch.randn(2, 1))


@_net("mse")
def bilinear():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Bilinear(8, 8, 8), nn.PReLU(), nn.LayerNorm(8)

        def forward(self, x, y):
            return self.c(self.b(self.a(x, y)))

    return Two(), (torch.randn(2, 8), torch.randn(2, 8), torch.randn(2, 8))
