import numpy as np
import torch
from torch import nn

from meshwright.capture.step import capture_step
from meshwright.decide.memory.monet.strategy import Monet
from meshwright.decide.memory.step import keep_everything
from meshwright.probe.steps.costs import StepCosts
from meshwright.probe.steps.priced import priced_graphs
from meshwright.run.steps.step import runner_of, step_tensors

__all__ = ["Monet", "costs_file", "np", "runner_of", "step_tensors"]  # what the page goes on with


def costs_file() -> None:
    """Measured anew: a page leaves nothing in the user's folder."""


module = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())), nn.Flatten(), nn.Linear(1024, 4))
images, classes = torch.randn(16, 4, 16, 16), torch.randint(0, 4, (16,))
found = capture_step(module, (images, classes))
budget_bytes = keep_everything(priced_graphs(found, StepCosts(None), kinds=("exact",))[0]).peak_bytes * 8 // 10
