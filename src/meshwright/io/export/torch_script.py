"""A script of plain PyTorch calls that trains as the plan lays it out: torch.distributed.pipelining for stages, DDP or fully_shard for replicas,
DTensor for split layers. It runs as it stands, under torchrun, on the plan's own model function, with its sample as data.

What differs from the plan is listed. A split layer's output is gathered right behind it (the plan keeps it split as far as it can), so tensor
parallelism costs more messages here. Stages and split layers together have no words here: the traced stages of `pipeline()` hold no layers to split.
"""

from __future__ import annotations

import re
from typing import Any

from ...errors import Unsupported
from .exported import Exporter, Subject, Written
from .shared import clip_norm, optimizer_name, optimizer_numbers, precision

__all__ = ["EXPORTER"]

_TEXT = '''"""Layout of {model}, planned by meshwright, in plain PyTorch. Start it where the model's file lies:

    torchrun --nproc-per-node={ranks} this_file.py                  (several servers: --nnodes and a rendezvous)
"""

import importlib.util
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

MODEL = {model!r}  # file.py:function, returns (module, (input, target))
PIPELINE, DATA, TENSOR = {pipeline}, {data}, {tensor}
MICROBATCH, MICROBATCHES = {microbatch}, {microbatches}  # per replica and step
AUTOCAST = {autocast}
STEPS = int(os.environ.get("STEPS", "4"))


def model_and_sample():
    file, _, function = MODEL.partition(":")
    spec = importlib.util.spec_from_file_location("planned_model", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)()


def batch(sample, count):
    """`count` samples; put your data here."""
    return [x.repeat(-(-count // len(x)), *[1] * (x.dim() - 1))[:count] for x in sample]


def loss_of(output, target):
    {loss}


def main():
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    mesh = init_device_mesh(device.type, (PIPELINE, DATA, TENSOR), mesh_dim_names=("pipeline", "data", "tensor"))
    torch.manual_seed({seed})
    model, sample = model_and_sample()
    sample = [x.to(device) for x in sample]
    model = model.to(device)
{body}

if __name__ == "__main__":
    main()
    if not torch.cuda.is_available():  # gloo's threads may still let go tensors, which aborts an interpreter that ends in the ordinary way
        sys.stdout.flush()
        os._exit(0)
'''
_PLAIN = '''{split}{replicas}    optimizer = {optimizer}
    for step in range(STEPS):
        for _ in range(MICROBATCHES):
            *inputs, target = batch(sample, MICROBATCH)
            with torch.autocast(device.type, dtype=AUTOCAST, enabled=AUTOCAST is not None):
                loss = loss_of(model(*inputs), target)
            (loss / MICROBATCHES).backward()
{clip}        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {{step}}: loss {{loss.item():.6f}}", flush=True)
    dist.destroy_process_group()
'''
_STAGED = '''    from torch.distributed.pipelining import {schedule}, SplitPoint, pipeline

    *inputs, _ = batch(sample, MICROBATCH)
    cuts = {cuts!r}  # the first module of every later stage
    pipe = pipeline(model, mb_args=tuple(inputs), split_spec={{name: SplitPoint.BEGINNING for name in cuts}})
    index = mesh["pipeline"].get_local_rank()
    stage = pipe.build_stage(index, device, mesh.get_group("pipeline"))
    if DATA > 1:
        stage.submod = torch.nn.parallel.DistributedDataParallel(stage.submod, process_group=mesh.get_group("data"))
    schedule = {schedule}(stage, MICROBATCHES, loss_fn=loss_of)
    optimizer = {optimizer_staged}
    *inputs, target = batch(sample, MICROBATCH * MICROBATCHES)
    for step in range(STEPS):
        losses = []
        if index == 0:
            schedule.step(*inputs, target=target, losses=losses) if PIPELINE == 1 else schedule.step(*inputs)
        elif index == PIPELINE - 1:
            schedule.step(target=target, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        if losses and mesh["data"].get_local_rank() == 0:
            print(f"step {{step}}: loss {{torch.stack(losses).mean().item():.6f}}", flush=True)
    dist.destroy_process_group()
'''
_SPLIT = '''    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = ColwiseParallel(output_layouts=Replicate())
    rows = RowwiseParallel(input_layouts=Replicate())
    layers = {layers}
    parallelize_module(model, mesh["tensor"], {{name: columns if how == "columns" else rows for name, how in layers.items()}})
'''
_DDP = '    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device] if cuda else None, process_group=mesh.get_group("data"))\n'
_FSDP = '''    from torch.distributed.fsdp import fully_shard

    for block in {blocks!r}:
        fully_shard(model.get_submodule(block), mesh=mesh["data"], reshard_after_forward={reshard})
    fully_shard(model, mesh=mesh["data"], reshard_after_forward={reshard})
'''
_CLIP = "        torch.nn.utils.clip_grad_norm_(model.parameters(), {!r})\n"
_LOSSES = {
    "cross-entropy": "return F.cross_entropy(output.flatten(0, -2), target.flatten())",
    "mse": "return F.mse_loss(output, target)",
    "output": "return output",
}


def write(subject: Subject) -> Written:
    """Raises: Unsupported for stages together with split layers, and for divided sequences or experts."""
    layout, split, job = subject.layout, subject.split, subject.job
    if layout.pipeline > 1 and layout.tensor > 1:
        raise Unsupported(
            "pipeline() traces stages, whose layers cannot be split further", hint="plan with --tensor 1 or --pipeline 1; `train run` runs both",
        )  # fmt: skip
    for name, option, degree in (("context", "--context", layout.context), ("expert", "--ep", layout.expert)):
        if degree > 1:
            raise Unsupported(f"{name} parallelism", hint=f"plan with {option} 1; `train run` runs it")
    missing: list[str] = []
    found = optimizer_name(job, 2, missing) or "AdamW"
    numbers = {"lr": float(job.get("learning_rate", 1e-3)), **optimizer_numbers(job)}
    made = f"torch.optim.{found}({{}}.parameters(), {', '.join(f'{k}={v!r}' for k, v in numbers.items())})"
    computes, weights = precision(job)
    autocast = "None" if computes == "float32" or weights else f"torch.{computes}"
    loss = str(job.get("loss", "cross-entropy"))
    if loss not in _LOSSES:
        loss = "cross-entropy"
    if layout.pipeline > 1:
        body = _staged(subject, missing, made.format("stage.submod"))
        if autocast != "None":
            missing.append(f"autocast in {computes} within stages: torch.autocast in your model's forward")
        if clip_norm(job):
            missing.append("clipping by the norm of all stages' gradients: pipelining has no words for it")
    else:
        if layout.zero_level in (1, 2):
            missing.append(f"sharding level {layout.zero_level}: fully_shard shards weights too, kept gathered until backward is done")
        replicas = ""
        if layout.data > 1 and layout.zero_level:
            blocks = [f"{split.prefix}.{b}" for blocks in split.blocks for b in blocks] if not split.torn else []
            replicas = _FSDP.format(blocks=blocks, reshard=layout.zero_level == 3)
        elif layout.data > 1:
            replicas = _DDP
        clip = _CLIP.format(clip_norm(job)) if clip_norm(job) else ""
        body = _PLAIN.format(split=_layers(subject, missing), replicas=replicas, optimizer=made.format("model"), clip=clip)
        if computes == "float16":
            missing.append("dynamic loss scaling: torch.amp.GradScaler in your loop")
    rule, calls = subject.again
    if calls:
        missing.append(f"which {calls} calls run again in backward ({rule}): torch.utils.checkpoint around your blocks does it in your code")
    if weights:
        missing.append(f"weights in {job['dtype']}: model.to(torch.{job['dtype']}) in your code")
    text = _TEXT.format(
        model=str(job.get("model", "")), ranks=layout.ranks, pipeline=layout.pipeline, data=layout.data, tensor=layout.tensor,
        microbatch=layout.microbatch_size, microbatches=layout.microbatches, loss=_LOSSES[loss], seed=int(job.get("seed", 0)), body=body,
        autocast=autocast,
    )  # fmt: skip
    return text, missing, ["your data in batch()"]


def _staged(subject: Subject, missing: list[str], optimizer: str) -> str:
    layout, split = subject.layout, subject.split
    if not split.prefix or split.torn or not all(split.blocks[1:]):
        raise Unsupported("stages that do not begin with a block", hint="`train run` runs them as they are")
    if layout.zero_level:
        missing.append(f"sharding level {layout.zero_level} beside stages: written as DistributedDataParallel")
    before = [name for names in split.others[1:-1] for name in names]
    if before:
        missing.append(f"modules of middle stages ({', '.join(before[:4])}): they go where forward calls them first")
    schedule = "ScheduleGPipe" if layout.schedule == "gpipe" else "Schedule1F1B"
    cuts = [f"{split.prefix}.{blocks[0]}" for blocks in split.blocks[1:]]
    return _STAGED.format(schedule=schedule, cuts=cuts, optimizer_staged=optimizer)


def _layers(subject: Subject, missing: list[str]) -> str:
    """Linear layers by which side of their weights the plan splits; what else it splits is said."""
    layout = subject.layout
    if layout.tensor == 1:
        return ""
    layers: dict[str, Any] = {}
    for shard in layout.shards:
        module, _, field = shard.param.rpartition(".")
        if field == "weight" and shard.axis in (0, 1):
            layers[module] = "columns" if shard.axis == 0 else "rows"
    missing.append("outputs that stay split between layers: each split layer's output is gathered right behind it")
    if not layers:
        missing.append(f"tensor parallelism of degree {layout.tensor}: the plan splits no weight of a layer by itself")
    lines = "".join(f"        {re.sub(r'[^A-Za-z0-9_.]', '', name)!r}: {how!r},\n" for name, how in layers.items())
    return _SPLIT.format(layers="{\n" + lines + "    }")


EXPORTER = Exporter(name="torch", version="PyTorch 2.13, run", write=write, says=frozenset({"precision", "clip_norm"}))
