"""Models that are trained for real under the profiler, with marks in the trace that say whose work everything is.

The marks are independent of how `meshwright trace annotate` finds out: forward hooks of every module, and for backward a hook on every
node of the autograd graph, labelled with the module that was running when the node was made, and on every AccumulateGrad, labelled
with the module that owns the parameter. They are slices named `truth-...`, taken out before anything is annotated.

    python benchmarks/trace_models.py NAME FOLDER       writes FOLDER/NAME.json (or NAME-RANK.json) and FOLDER/NAME.tree.json
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

FORWARD, BACKWARD, OWNER = "truth-forward:", "truth-backward:", "truth-owner:"
NAMES = ("cnn", "transformer", "lstm", "ddp", "fsdp2")
STEPS = 3


class Block(nn.Module):
    """A residual block whose one ReLU is called twice."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)) if stride > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class Cnn(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Block(width, width, 1), Block(width, width, 1))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1))
        self.fc = nn.Linear(2 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer2(self.layer1(self.maxpool(F.relu(self.conv1(x)))))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Translator(nn.Module):
    """An encoder-decoder transformer."""

    def __init__(self, vocabulary: int = 500, width: int = 128) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(64, width))
        self.transformer = nn.Transformer(width, 4, 3, 3, 4 * width, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        s = self.source(source) + self.position[: source.shape[1]]
        t = self.target(target) + self.position[: target.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.transformer(s, t, tgt_mask=mask)).transpose(1, 2)


class Lstm(nn.Module):
    def __init__(self, vocabulary: int = 500, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.drop = nn.Dropout(0.1)
        self.first = nn.LSTM(width, width, batch_first=True)
        self.second = nn.LSTM(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.first(self.drop(self.embedding(x)))
        y, _ = self.second(x)
        return self.head(self.norm(x + y)).transpose(1, 2)


def build(name: str) -> tuple[nn.Module, list[torch.Tensor], torch.Tensor]:
    """Model, inputs of one batch, target."""
    torch.manual_seed(0)
    if name in ("cnn", "ddp"):
        return Cnn(), [torch.randn(16, 3, 32, 32)], torch.randint(0, 10, (16,))
    if name == "lstm":
        return Lstm(), [torch.randint(0, 500, (16, 32))], torch.randint(0, 500, (16, 32))
    return Translator(), [torch.randint(0, 500, (8, 32)), torch.randint(0, 500, (8, 24))], torch.randint(0, 500, (8, 24))


def _mark(text: str) -> None:
    with record_function(text):
        pass


@contextlib.contextmanager
def truth(model: nn.Module) -> Iterator[None]:
    """Marks in the trace for every forward call, every autograd node and every gradient accumulated, while it lasts."""
    running: list[str] = []
    labelled: set[Any] = set()
    spans: list[Any] = []

    def label(value: Any, path: str) -> None:
        owner: dict[int, str] = {}
        for where, m in model.named_modules():
            for p in m.parameters(recurse=False):
                owner.setdefault(id(p), where)
        waiting = [x.grad_fn for x in _tensors(value) if x.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if node in labelled:
                continue
            labelled.add(node)
            if hasattr(node, "variable"):
                mine = owner.get(id(node.variable))
                if mine is not None:
                    node.register_prehook(lambda *_, mine=mine: _mark(OWNER + mine))
                continue
            node.register_prehook(lambda *_: _mark(BACKWARD + path))
            waiting += [n for n, _ in node.next_functions if n is not None]

    def before(path: str) -> Any:
        def hook(_: nn.Module, inputs: Any) -> None:
            if running:
                label(inputs, running[-1])
            running.append(path)
            spans.append(record_function(FORWARD + path))
            spans[-1].__enter__()

        return hook

    def after(path: str) -> Any:
        def hook(_: nn.Module, inputs: Any, output: Any) -> None:
            label(output, path)  # None, if the call was given up
            spans.pop().__exit__(None, None, None)
            running.pop()

        return hook

    handles = []
    for path, module in model.named_modules():
        # Outermost of the hooks, so that what other hooks do for the module (FSDP's gathering) counts as within it.
        handles += [module.register_forward_pre_hook(before(path), prepend=True), module.register_forward_hook(after(path), always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def train(name: str, folder: Path, rank: int, world: int) -> None:
    from meshwright.capture.modules import capture_modules
    from meshwright.io.trace.module_tree import write_module_tree

    torch.set_num_threads(1)
    model, inputs, target = build(name)
    if rank == 0:
        write_module_tree(folder / f"{name}.tree.json", capture_modules(model, tuple(inputs), model=name))
    runs: nn.Module = model
    if name == "ddp":
        runs = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.2)
    elif name == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in (*model.transformer.encoder.layers, *model.transformer.decoder.layers):  # type: ignore[union-attr]
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(runs.parameters(), lr=1e-3) if name != "cnn" else torch.optim.SGD(runs.parameters(), lr=0.01, momentum=0.9)
    where = folder / (f"{name}-{rank}.json" if world > 1 else f"{name}.json")
    plan = schedule(wait=1, warmup=1, active=STEPS, repeat=1)
    profiling = profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=lambda p: p.export_chrome_trace(str(where)))
    with truth(model), profiling as profiler:
        for _ in range(STEPS + 2):
            optimizer.zero_grad()
            loss = F.cross_entropy(runs(*inputs), target)
            loss.backward()
            optimizer.step()
            profiler.step()


def run(name: str, folder: Path) -> list[Path]:
    """Train in processes of their own; the traces."""
    world = 2 if name in ("ddp", "fsdp2") else 1
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": str(world)}
    command = [sys.executable, __file__, name, str(folder)]
    ranks = [subprocess.Popen(command, env={**environment, "RANK": str(r)}, stderr=subprocess.PIPE, text=True) for r in range(world)]
    for process in ranks:
        _, said = process.communicate(timeout=300)
        if process.returncode:
            raise RuntimeError(said[-2000:])
    return [folder / (f"{name}-{r}.json" if world > 1 else f"{name}.json") for r in range(world)]


if __name__ == "__main__":
    number, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = Path(sys.argv[2])
    if count > 1:
        dist.init_process_group("gloo", init_method=f"file://{place.resolve()}/{sys.argv[1]}.rendezvous", rank=number, world_size=count)
    train(sys.argv[1], place, number, count)
    if count > 1:
        dist.destroy_process_group()
