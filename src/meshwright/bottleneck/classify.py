"""What the names and categories in a PyTorch trace say a slice is."""

from __future__ import annotations

import re

from ..trace.vocabulary import RUNTIME

__all__ = [
    "COLLECTIVE_KERNEL", "COPY_OPERATOR", "HOST", "MEETING_RANGE", "MODULE_RANGE", "MODULE_SLICE", "ONE_WAY", "OPTIMIZER_RANGE", "SYNC", "TRANSFER",
]  # fmt: skip

HOST = ("cpu_op", "user_annotation", "python_function", *RUNTIME)
COLLECTIVE_KERNEL = re.compile(r"^nccl.*Kernel|^ncclDevKernel|^ncclKernel|^mscclKernel|^rcclKernel")
TRANSFER = re.compile(r"^(Memcpy|Memset|dma)")
MEETING_RANGE = re.compile(r"^(gloo|nccl|mpi|ucc|xccl):(\w+)")
ONE_WAY = re.compile(r"broadcast|scatter$|send|recv|^reduce$|gather$")  # some may leave before all have arrived
OPTIMIZER_RANGE = re.compile(r"^Optimizer\.(step|zero_grad)#")
MODULE_RANGE = re.compile(r"^module: ?(.*)$")
MODULE_SLICE = re.compile(r"^nn\.Module: (.*)$")
COPY_OPERATOR = re.compile(r"^aten::(copy_|clone|contiguous|_to_copy|to|_copy_from|_reshape_copy|_foreach_copy_)$")
SYNC = re.compile(r"^(cu(da)?|hip)(Device|Stream|Event|Ctx)Synchronize|^(cuda|hip)Memcpy$|^aten::(item|_local_scalar_dense)$")
