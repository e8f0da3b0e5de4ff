import torch
from torch import nn

module = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())), nn.Linear(64, 4))
x, target = torch.randn(1024, 64), torch.randint(0, 4, (1024,))
