"""torchtitan's configuration in Python: a module with a function that returns a Trainer.Config, for `--module` and `--config`.

The function takes a configuration of torchtitan's own and changes what the plan decides: degrees, micro-batches (counted in tokens there), optimizer,
seed, recomputation. So the model, its data and the length of its sequences stay torchtitan's.
"""

from __future__ import annotations

import math

from .exported import Exporter, Subject, Written
from .shared import optimizer_name, optimizer_numbers
from .torchtitan_toml import SAYS, parallelism, sharding_notes, training_numbers

__all__ = ["EXPORTER"]

_TEXT = '''"""Layout of {model}, planned by meshwright, for torchtitan at b5bcd76 (2026-08-21).

    NGPU={ranks} MODULE=this_file CONFIG=planned ./run_train.sh
"""

from torchtitan.components.optimizer import default_adamw
from torchtitan.config import ParallelismConfig
{imports}from torchtitan.models.llama3.config_registry import llama3_debugmodel as base  # your model's configuration here
from torchtitan.trainer import Trainer


def planned() -> Trainer.Config:
    config = base()
    tokens = config.training.max_context_length
    config.training.num_tokens_per_microbatch_per_dp_rank = {microbatch} * tokens
    config.training.num_tokens_per_train_step = {global_batch} * tokens
    config.parallelism = ParallelismConfig(
{fields}
    )
{rest}
    return config
'''


def write(subject: Subject) -> Written:
    layout, job = subject.layout, subject.job
    missing = sharding_notes(subject)
    fields = parallelism(subject, "lm_head", missing)
    if layout.pipeline > 1:
        fields["num_pp_microbatches"] = layout.microbatches
    rest = [f"config.debug.seed = {int(job.get('seed', 0))}"]
    for name, value in training_numbers(subject, missing).items():
        rest.append(f"config.training.{name} = {value!r}" if value != math.inf else f'config.training.{name} = float("inf")  # no clipping')
    if optimizer_name(job, 0, missing):
        numbers = {"lr": float(job.get("learning_rate", 1e-3)), **optimizer_numbers(job)}
        rest.append(f"config.optimizer = default_adamw({', '.join(f'{k}={v!r}' for k, v in numbers.items())})")
    rule, calls = subject.again
    if calls:
        rest.append("config.activation_checkpoint = FullAC.Config()")
        if rule != "full":
            missing.append(f"which {calls} calls run again in backward, by stage: written as full, which keeps no more")
    text = _TEXT.format(
        model=str(job.get("model", "a model")).replace("\\", "/").replace('"', "'"), ranks=layout.ranks, microbatch=layout.microbatch_size,
        global_batch=layout.global_batch, fields="\n".join(f"        {k}={v!r}," for k, v in fields.items()),
        rest="\n".join(f"    {line}" for line in rest),
        imports="from torchtitan.distributed.activation_checkpoint import FullAC\n" if calls else "",
    )  # fmt: skip
    return text, missing, ["the model: import its configuration as `base`; its max_context_length is the length of a sample", "steps and data"]


EXPORTER = Exporter(name="torchtitan", version="torchtitan b5bcd76 of 2026-08-21, its configuration classes", write=write, own_models=True, says=SAYS)
