"""Do measured operator costs add up to a step? Sums of operators timed in place, and timed alone and hot, against eager execution.

CPU time of one thread, one forward and backward pass. In place: `meshwright.run.calibrate.operators`. Alone and hot: every distinct call repeated by
itself
on its own operands, as kernel micro-benchmarks do. Rounds of the three alternate, so that a slow minute of the machine hits all alike.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine

ROOT = Path(__file__).resolve().parents[1]
MODELS = (
    ("gpt.py:tiny", "cross-entropy", 8), ("gpt.py:small", "cross-entropy", 8), ("convnet.py:small", "cross-entropy", 16),
    ("encoder_decoder.py:small", "cross-entropy", 8), ("dlrm.py:small", f"{ROOT}/examples/dlrm.py:click_loss", 128),
)  # fmt: skip
ROUNDS, HOT_REPEATS = 5, 7


def eager(traced: Any) -> tuple[float, float]:
    """CPU seconds of one forward and one backward pass of the module itself."""
    import torch

    from meshwright.run.calibrate.operators import quiet_single_thread

    leaves = [p for p in traced.parameters.values() if p.requires_grad]
    forward, backward = [], []
    with quiet_single_thread():
        for repeat in range(5):
            begin = time.thread_time()
            loss = traced.objective(*traced.inputs)
            middle = time.thread_time()
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
            end = time.thread_time()
            del gradients
            if repeat:
                forward.append(middle - begin)
                backward.append(end - middle)
    return statistics.median(forward), statistics.median(backward)


def hot(traced: Any) -> tuple[float, float]:
    """Sum over all calls of their time alone and hot, by distinct call."""
    import torch
    from torch import fx

    from meshwright.run.calibrate.operator_times import call_key
    from meshwright.run.calibrate.operators import quiet_single_thread

    known: dict[str, tuple[float, float]] = {}
    total_forward = total_backward = 0.0
    values: dict[Any, Any] = {}
    names = iter(traced.placeholders)
    with quiet_single_thread():
        for node in traced.graph_module.graph.nodes:
            if node.op == "placeholder":
                values[node] = traced.value(next(names))
            elif node.op == "call_function":
                args = fx.node.map_arg(node.args, values.__getitem__)
                kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
                key = call_key(str(node.target), args, kwargs)
                values[node] = node.target(*args, **kwargs)
                if key not in known:
                    known[key] = alone(node.target, args, kwargs, torch)
                total_forward += known[key][0]
                total_backward += known[key][1]
    return total_forward, total_backward


def alone(target: Callable[..., Any], args: Any, kwargs: Any, torch: Any) -> tuple[float, float]:
    leaves: list[Any] = []

    def leaf(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(leaf(y) for y in x)
        if isinstance(x, torch.Tensor) and x.requires_grad:
            x = x.detach().requires_grad_()
            leaves.append(x)
        return x

    args, kwargs = leaf(args), {k: leaf(v) for k, v in kwargs.items()}
    forward, backward = [], []
    for _ in range(HOT_REPEATS):
        begin = time.thread_time()
        out = target(*args, **kwargs)
        forward.append(time.thread_time() - begin)
        several = out if isinstance(out, (list, tuple)) else [out]
        results = [y for y in several if isinstance(y, torch.Tensor) and y.requires_grad and y.grad_fn is not None]
        if results and leaves:
            seeds = [torch.ones_like(y) for y in results]
            begin = time.thread_time()
            torch.autograd.grad(results, leaves, seeds, allow_unused=True)
            backward.append(time.thread_time() - begin)
    return statistics.median(forward), statistics.median(backward) if backward else 0.0


def measure(model: str, loss: str, batch: int) -> dict[str, Any]:
    from meshwright.capture.forward import trace_forward
    from meshwright.run.calibrate.operators import measure_graph, measured_total_s

    traced = trace_forward(str(ROOT / "examples" / model), batch_size=batch, device="cpu", loss=loss)
    samples: dict[str, list[tuple[float, float]]] = {"eager": [], "place": [], "hot": []}
    for _ in range(ROUNDS):
        samples["eager"].append(eager(traced))
        samples["place"].append(measured_total_s(measure_graph(traced, repeats=3, warmup=1)))
        samples["hot"].append(hot(traced))
    middle = {k: [statistics.median(column) for column in zip(*v, strict=True)] for k, v in samples.items()}
    whole = sum(middle["eager"])
    return {
        "what": f"{model}, batch {batch}, {len(traced.nodes)} calls: sum of operators in place", "value": sum(middle["place"]), "unit": "s of CPU",
        "peer": whole, "ratio": round(sum(middle["place"]) / whole, 4), "ratio_alone_and_hot": round(sum(middle["hot"]) / whole, 4),
        "eager_s": middle["eager"], "in_place_s": middle["place"], "alone_and_hot_s": middle["hot"], "rounds": samples,
    }  # fmt: skip


def main() -> None:
    from meshwright.run.calibrate.operators import dispatch_overhead
    from meshwright.run.machine.cpu_use import MachineUseRecorder

    with MachineUseRecorder() as recorder:
        rows = [measure(*model) for model in MODELS]
    overhead = dispatch_overhead()
    machine.record(
        "op_cost", rows, machine_use=recorder.result.to_json(),
        dispatch_overhead_s={"forward": overhead.forward_s, "backward": overhead.backward_s}, protocol="peer: eager forward + backward",
    )  # fmt: skip
    for r in rows:
        print(f"{r['what']:75s} eager {r['peer'] * 1e3:8.2f} ms  in place {r['ratio']:.3f}  alone and hot {r['ratio_alone_and_hot']:.3f}")
    print(f"others used {recorder.result.others:.1%} of the machine")


if __name__ == "__main__":
    main()
