"""Models of the GPU benchmark at sizes that fill a device: a GPT-2 small and a Llama of 1.2 B parameters."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import gpt
import llama

__all__ = ["gpt2_small", "llama_1b", "quick"]


def gpt2_small() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """163 M parameters (the head is not tied), 8 samples of 1,024 tokens."""
    return gpt.build(vocabulary=50257, sequence=1024, layers=12, width=768, heads=12, batch=8)


def llama_1b() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Shaped as Llama 3.2 1B: 16 layers of 2,048, 32 heads, 8 of keys, 8,192 hidden; 2 samples of 2,048 tokens."""
    return llama.build(vocabulary=128256, sequence=2048, layers=16, width=2048, heads=32, kv_heads=8, hidden=8192, batch=2)


def quick() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """For a rehearsal without a GPU."""
    return gpt.build(vocabulary=512, sequence=128, layers=2, width=64, heads=4, batch=4)
