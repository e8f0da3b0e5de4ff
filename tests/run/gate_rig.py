"""Plans with exactly these degrees for the tests of the gate, without a search."""

from __future__ import annotations

from typing import Any

import msgspec
from tensor_rig import _lowered

from meshwright.cost import Cost
from meshwright.decide.layout.data_sharding import PLAIN, DataSharding
from meshwright.decide.layout.tensor_shares import TensorOptions
from meshwright.decide.layout.unlike_devices import EVEN
from meshwright.io.fabric.document import fabric_document
from meshwright.job import Recipe, Training
from meshwright.plan.optimizers import may_be_cut
from meshwright.plan.plan import CycleEntry, Plan, StepEnd
from meshwright.program.hash import program_hash
from meshwright.run.calibrate.transport import laptop_shape
from meshwright.run.gate.gate import GateReport, Stated, gate

MODELS = "tests/run/gate_models.py:"


def plan_of(
    model: str, degrees: tuple[int, int, int] = (1, 1, 1), *, loss: str = "mse", optimizer: str = "sgd", microbatch: int = 2, global_batch: int = 8,
    zero: int = 0, recompute: str = "none", schedule: tuple[str, dict[str, Any]] | None = None, seed: int = 0, rate: float = 0.1,
    models: str = MODELS, shared: bool = False, recipe: Recipe | None = None,
) -> Plan:  # fmt: skip
    """(data, tensor, pipeline) degrees of a model of `gate_models`; losses and optimizers without ":" of their names there too."""
    loss = loss if ":" in loss or loss in ("mse", "cross-entropy", "output") else MODELS + loss
    optimizer = optimizer if optimizer.partition(":")[0] in ("sgd", "adamw") else MODELS + optimizer
    end = StepEnd(norm=True) if recipe is not None and recipe.clip_norm else None
    sharding = DataSharding(zero, whole=not may_be_cut(optimizer)) if zero else PLAIN
    layout, _, program = _lowered(
        models + model, degrees, microbatch, global_batch, loss, TensorOptions(), None, recompute, sharding, schedule, EVEN, end=end, shared=shared,
        precision=recipe.precision if recipe is not None else "fp32",
    )  # fmt: skip
    main, fabric = program_hash(program), laptop_shape(max(2, layout.ranks))
    job = Training(model=models + model, global_batch=global_batch, loss=loss, optimizer=optimizer, learning_rate=rate, seed=seed)
    job = msgspec.structs.replace(job, recipe=recipe) if recipe is not None else job
    return Plan(
        kind="training", job={"training": msgspec.to_builtins(job), "graph_fingerprint": "", "cost": msgspec.to_builtins(Cost()), "works": {}},
        target_fabric=fabric_document(fabric), placement=tuple(d.name for d in fabric.devices[: layout.ranks]), programs={main: program},
        cycle=(CycleEntry(program=main),), decisions={}, layout=layout, seed=seed,
    )  # fmt: skip


def gated(model: str, degrees: tuple[int, int, int] = (1, 1, 1), *, stated: Stated = Stated(), **how: Any) -> GateReport:
    return gate(plan_of(model, degrees, **how), data="synthetic", stated=stated)
