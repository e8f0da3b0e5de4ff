import torch

module, x, target = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)), torch.randn(16, 8), torch.randint(0, 4, (16,))
