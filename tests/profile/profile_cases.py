"""Made-up profiles in exactly the public formats."""

from __future__ import annotations

from meshwright.profile.layer_profile import Entry, LayerProfile, LayerSize, LayerTime
from meshwright.profile.network import NetworkProfile, RateCurve

LAYERS = 6


def sailor_times(model="OPT-X", device="A100", microbatches=(1, 2, 4), tensors=(1, 2), layers=LAYERS):
    """forward 1 ms, backward 2 ms per sample over the degree, plus 0.1 ms times the degree; the embedding takes a tenth, the update is repeated."""

    def row(i, m, t):
        part = 0.1 if i == 0 else 1.0
        return [part * 0.001 * m / t + 0.0001 * t, part * 0.002 * m / t + 0.0001 * t, 0.0005]

    return {model: {device: {str(m): {str(t): {str(i): row(i, m, t) for i in range(layers)} for t in tensors} for m in microbatches}}}


def sailor_memory(model="OPT-X", tensors=(1, 2), layers=LAYERS):
    def row(i, t):
        return {"params_floats": 1e7 / t, "act_mem_floats": 4e6 / t, "act_output_floats": 1e6, "act_input_floats": 1e6, "params_bytes": 4e7 / t}

    return {model: {str(t): {str(i): row(i, t) for i in range(layers)} for t in tensors}}


def network_inside(device="A100", gpus=4):
    return {device: {str(gpus): [[0.0, 0.0, 100.0], 1e11]}}


def network_between(device="A100", gpus=4, zone="z"):
    return {zone: {device: {str(gpus): {zone: {device: {str(gpus): [[-0.1, 2.0, 3.0], 1.2e10]}}}}}}


def metis(layers=LAYERS, scale=1.0):
    return {
        "model": {
            "model_name": "GPT3", "num_layers": layers,
            "parameters": {"total_parameters_bytes": 60, "parameters_per_layer_bytes": [10] * layers},
        },
        "execution_time": {
            "total_time_ms": 99.0, "forward_backward_time_ms": 90.0, "batch_generator_time_ms": 0.9, "optimizer_time_ms": 12.0,
            "layernorm_grads_all_reduce_time_ms": 0.6, "layer_compute_total_ms": [scale * (3.0 + i) for i in range(layers)],
        },
        "execution_memory": {"total_memory": 4000, "layer_memory_total_mb": [100 + i for i in range(layers)]},
    }  # fmt: skip


def profile(layers=LAYERS, microbatches=(1, 2, 4), tensors=(1, 2, 4), devices=("A100",), forward_s=0.001, backward_s=0.002, update_s=0.0005):
    times = {
        Entry(d, m, t): tuple(LayerTime(forward_s * m / t * (1 + i), backward_s * m / t * (1 + i), update_s) for _ in range(layers))
        for i, d in enumerate(devices) for m in microbatches for t in tensors
    }  # fmt: skip
    sizes = {t: tuple(LayerSize(1e7 / t, 4e6 / t, 1e6) for _ in range(layers)) for t in tensors}
    return LayerProfile(model="made-up", layers=layers, times=times, sizes=sizes)


def network(inside_Bps=1e11, between_Bps=1e10, gpus=4, device="A100"):
    flat = lambda rate: RateCurve(c2=0.0, c1=0.0, c0=rate / 1e9, peak_Bps=rate)  # noqa: E731
    return NetworkProfile(inside={(device, gpus): flat(inside_Bps)}, between={("", device, gpus, "", device, gpus): flat(between_Bps)})
