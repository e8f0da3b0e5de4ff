"""Capture of a PyTorch module's operator graph, on fake tensors. Needs the extra `torch`; `meshwright` itself does not load it.

- `capture(model, ...)`: the `OpGraph` for planning, without the model's memory;
- `trace_forward(model, ...)`: the same forward graph as an `fx.GraphModule`, runnable on real tensors.
"""

from meshwright.errors import MissingExtra

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise MissingExtra("torch", extra="torch", needed_for="capturing a model") from error
