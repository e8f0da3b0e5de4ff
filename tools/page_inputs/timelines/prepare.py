"""The reader's execution trace of PyTorch."""

import os

os.environ["KINETO_LOG_LEVEL"] = "6"
import torch

net = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
observer = torch.profiler.ExecutionTraceObserver().register_callback("et.json")
observer.start()
for _ in range(2):
    net.zero_grad(set_to_none=False)
    net(torch.randn(16, 3)).sum().backward()
observer.stop()
observer.unregister_callback()
