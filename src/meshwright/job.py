"""The job: what must happen. Training here; collectives, services and queues have their own records beside it."""

from __future__ import annotations

import msgspec

__all__ = ["Training"]


class Training(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A training job. `model` names `FILE.py:function`, `module:function` or a captured graph file; `loss` and `optimizer` likewise.

    The model function returns `(module, example_inputs)`, inputs with the batch as leading dimension and the training target last.
    """

    model: str
    global_batch: int
    loss: str = "cross-entropy"  # "cross-entropy" | "mse" | "output" (the module returns its loss) | "module:function"
    optimizer: str = "adamw"  # "adamw" | "sgd" | "module:function"
    learning_rate: float = 1e-3
    dtype: str = "float32"
    seed: int = 0
