import torch
from torch import nn

module = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
x, target = torch.randn(16, 8), torch.randint(0, 4, (16,))
