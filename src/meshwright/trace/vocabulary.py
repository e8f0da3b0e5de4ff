"""The categories and names that the profilers of PyTorch write, in one place: readers translate into them, everything else reads them.

Kineto of torch 1.8 to 1.12 wrote other words (`Operator`, `Runtime`, `Kernel`, arrows `async` and `forward_backward`): `category_of` and `arrow_of`
translate them when a file is read, so that nobody else has to know. Of those, `Operator` was also the word for ranges (`ProfilerStep#5`,
`Optimizer.step#SGD.step`), and there is no slice of the autograd engine around a node: the node itself is outermost there.
"""

from __future__ import annotations

import re

__all__ = ["DEVICE", "EVALUATE", "KERNEL", "LOADING", "NODE", "OPERATOR_NAME", "RUNTIME", "STEP", "arrow_of", "category_of"]

KERNEL = ("kernel", "concurrent_kernel")
DEVICE = (*KERNEL, "gpu_memcpy", "gpu_memset")
RUNTIME = ("cuda_runtime", "cuda_driver", "xpu_runtime", "hip_runtime", "privateuse1_runtime")
STEP = re.compile(r"^ProfilerStep#(\d{1,9})$")
EVALUATE = "autograd::engine::evaluate_function: "  # the engine runs a node of the autograd graph
NODE = re.compile(r"Backward\d*$|AccumulateGrad$")
OPERATOR_NAME = re.compile(r"::|Backward\d*$|^## Call CompiledFxGraph|(cpp|triton(_[a-z0-9]+)?)_fused_")
LOADING = re.compile(
    r"^enumerate\(DataLoader\)|^\W*(load|get|fetch)?[ _-]?(data|batch)\w*\W*$|DataLoader.*__next__|^\[pl\].*(train_dataloader_next|_next)",
    re.IGNORECASE,
)

_CATEGORIES = {"Kernel": "kernel", "Runtime": "cuda_runtime", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset", "User": "gpu_user_annotation"}
_ARROWS = {"async_gpu": "ac2g", "async_cpu_to_gpu": "ac2g", "forward_backward": "fwdbwd", "fwd_bwd": "fwdbwd"}


def category_of(category: str, name: str) -> str:
    """The category of a slice in today's words."""
    if category == "Operator":
        return "cpu_op" if OPERATOR_NAME.search(name) else "user_annotation"
    return _CATEGORIES.get(category, category)


def arrow_of(category: str, name: str) -> str:
    """The kind of an arrow in today's words; an arrow without a category is of the kind that its name says."""
    if category == "async" and name == "launch":
        return "ac2g"
    return _ARROWS.get(category or name, category or name)
