"""What the names and categories in a PyTorch trace say a slice is."""

from __future__ import annotations

import re

__all__ = [
    "COLLECTIVE_KERNEL", "COPY_OPERATOR", "DATA_RANGE", "DEVICE", "HOST", "MEETING_RANGE", "MODULE_RANGE", "MODULE_SLICE", "ONE_WAY",
    "OPTIMIZER_RANGE", "RUNTIME", "STEP", "SYNC", "TRANSFER",
]  # fmt: skip

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
HOST = ("cpu_op", "user_annotation", "python_function", "cuda_runtime", "cuda_driver")
RUNTIME = ("cuda_runtime", "cuda_driver")
STEP = re.compile(r"^ProfilerStep#(\d+)$")
COLLECTIVE_KERNEL = re.compile(r"^nccl.*Kernel|^ncclDevKernel|^ncclKernel|^mscclKernel|^rcclKernel")
TRANSFER = re.compile(r"^(Memcpy|Memset|dma)")
MEETING_RANGE = re.compile(r"^(gloo|nccl|mpi|ucc|xccl):(\w+)")
ONE_WAY = re.compile(r"broadcast|scatter$|send|recv|^reduce$|gather$")  # some may leave before all have arrived
DATA_RANGE = re.compile(r"^enumerate\(DataLoader\)|^load data$|DataLoader.*__next__|^\[pl\].*(train_dataloader_next|_next)", re.IGNORECASE)
OPTIMIZER_RANGE = re.compile(r"^Optimizer\.(step|zero_grad)#")
MODULE_RANGE = re.compile(r"^module: ?(.*)$")
MODULE_SLICE = re.compile(r"^nn\.Module: (.*)$")
COPY_OPERATOR = re.compile(r"^aten::(copy_|clone|contiguous|_to_copy|to|_copy_from|_reshape_copy|_foreach_copy_)$")
SYNC = re.compile(r"^cu(da)?(Device|Stream|Event|Ctx)Synchronize|^cudaMemcpy$|^aten::(item|_local_scalar_dense)$")
