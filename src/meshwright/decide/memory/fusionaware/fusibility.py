"""Which operators a fusing compiler puts into one kernel, by name: pointwise, views, reductions, random ones.

After the operator list of torch's partitioner: matrix products, convolutions and fused attentions are computed by library kernels and fuse with
nothing.
"""

from __future__ import annotations

from ....graph.step_graph import StepNode

__all__ = ["fusible", "is_compute_intensive", "is_fusible", "is_recomputable", "is_view", "operator_of"]

def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


COMPUTE_INTENSIVE = _names("""
    _efficient_attention_forward _flash_attention_forward _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward _scaled_mm addmm baddbmm bmm convolution convolution_backward grid_sampler_2d linear
    matmul mm upsample_bilinear2d
""")
VIEWS = _names("""
    _reshape_alias _unsafe_view alias as_strided broadcast_in_dim detach diagonal expand permute reshape select slice split split_with_sizes
    squeeze t transpose unbind unfold unsqueeze view view_as_complex view_as_real
""")
RANDOM = _names("""
    bernoulli inductor_lookup_seed inductor_randint inductor_random native_dropout rand rand_like randn randn_like
""")
POINTWISE = _names("""
    __and__ __lshift__ __or__ __rshift__ __xor__ _to_copy abs acos acosh add addcdiv addcmul angle arange asin asinh atan atan2 atanh
    bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clone constant_pad_nd convert_element_type copy copysign cos
    cosh cumsum div elu elu_backward embedding empty empty_like eq erf erfc erfinv exp exp2 expm1 fill flip floor fmax fmin fmod frac full
    full_like gather ge gelu gelu_backward getitem gt hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward
    index iota isinf isnan le leaky_relu leaky_relu_backward lerp lgamma lift_fresh_copy log log10 log1p log2 log_sigmoid_backward
    log_sigmoid_forward logical_and logical_not logical_or lt masked_fill maximum minimum mish mish_backward mul mvlgamma ne neg new_empty
    new_full new_zeros one_hot ones ones_like pow reciprocal relu remainder repeat roll round rsqrt rsub scalar_tensor sigmoid sigmoid_backward
    sign silu silu_backward sin sinc sinh softplus softplus_backward sqrt square sub tan tanh tanh_backward threshold threshold_backward to tril
    triu trunc type_as where xlogy zeros zeros_like
""")
REDUCTIONS = _names("""
    _fused_rms_norm _fused_rms_norm_backward _grad_sum_to_size _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data all amax
    amin any argmax argmin logsumexp max mean min native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward norm
    prepare_softmax_online prod rms_norm std sum sum_to_size var var_mean
""")
FUSED_BY_CODE = POINTWISE | VIEWS | REDUCTIONS
# Decomposed before torch's partitioner sees them, so that its list lacks them; they are norms and softmaxes and may run again like their parts.
ALLOWED = FUSED_BY_CODE


def operator_of(node: StepNode) -> str:
    """`aten.mm.default` -> `mm`; `getitem` stays."""
    parts = node.target.split(".")
    return parts[1] if len(parts) > 2 else parts[-1]


def is_view(node: StepNode) -> bool:
    """By what it does: its result lies in storages it did not make (an item of a tuple too)."""
    return node.phase != "input" and bool(node.storages) and not node.makes


def is_compute_intensive(node: StepNode) -> bool:
    return operator_of(node) in COMPUTE_INTENSIVE


def is_recomputable(node: StepNode) -> bool:
    return is_view(node) or operator_of(node) in ALLOWED


def is_fusible(node: StepNode) -> bool:
    return is_view(node) or operator_of(node) in FUSED_BY_CODE or operator_of(node) in RANDOM


def fusible(a: StepNode, b: StepNode) -> bool:
    """May b read a inside one kernel? Concatenation takes in whatever computes its parts."""
    return (is_fusible(a) and is_fusible(b)) or (operator_of(b) == "cat" and not is_compute_intensive(a) and a.phase != "input")
