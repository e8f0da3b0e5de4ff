"""GiPH's net in torch: two sweeps over the graph, forward and backward, and a score for every node (paper, section 4.3; card, 3.3 and 3.4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ....cost_models.moves import LAYERS, MoveNet
from ....kernels.sweeps import sweep, sweep_gradient
from .episodes import GpNet

__all__ = ["ScoringNet", "log_chances"]


class ScoringNet(nn.Module):  # type: ignore[misc]
    """Its layers have the names and sizes of `LAYERS`."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleDict()
        for name, (outputs, inputs) in LAYERS.items():
            layer = self.layers[name.replace(".", "_")] = nn.Linear(inputs, outputs)
            with torch.no_grad():
                for p in (layer.weight, layer.bias):
                    p.uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)

    @staticmethod
    def of(net: MoveNet) -> ScoringNet:
        made = ScoringNet()
        made.load_state_dict({f"layers.{n.rpartition('.')[0].replace('.', '_')}.{n.rpartition('.')[2]}": torch.from_numpy(np.array(w))
                              for n, w in net.weights.items()})  # fmt: skip
        return made

    def weights(self) -> dict[str, NDArray[np.float32]]:
        found: dict[str, NDArray[np.float32]] = {}
        for name in LAYERS:
            layer = self.layers[name.replace(".", "_")]
            found |= {f"{name}.{part}": getattr(layer, part).detach().numpy().copy() for part in ("weight", "bias")}
        return found

    def forward(self, graph: GpNet) -> torch.Tensor:
        """A score for every node."""
        at = self.layers
        y0 = at["node_1"](torch.relu(at["node_0"](torch.from_numpy(graph.x_node))))
        ends = (graph.src, graph.dst, graph.node_ptr, graph.into_ptr)
        there = self._swept("forward", y0, graph.x_edge, ends)
        begins = (graph.dst[graph.back], graph.src[graph.back], graph.node_ptr, graph.out_ptr)
        again = self._swept("backward", y0, graph.x_edge[graph.back], begins)
        scores: torch.Tensor = at["score_1"](torch.relu(at["score_0"](torch.cat([there, again], 1))))
        return scores[:, 0]

    def _swept(self, way: str, y0: torch.Tensor, x_edge: NDArray[np.float32], edges: tuple[NDArray[np.int64], ...]) -> torch.Tensor:
        message, update = self.layers[f"{way}_message"], self.layers[f"{way}_update"]
        states = y0.shape[1]
        of_edge = torch.addmm(message.bias, torch.from_numpy(x_edge), message.weight[:, states:].t())
        found: torch.Tensor = _Sweep.apply(y0, of_edge, message.weight[:, :states], update.weight, update.bias, edges, way == "backward")
        return found


class _Sweep(torch.autograd.Function):  # type: ignore[misc]
    """`kernels.sweeps` as an operation of torch."""

    @staticmethod
    def forward(
        ctx: Any, y0: torch.Tensor, of_edge: torch.Tensor, to_message: torch.Tensor, to_state: torch.Tensor, bias: torch.Tensor,
        edges: tuple[NDArray[np.int64], ...], back: bool,
    ) -> torch.Tensor:  # fmt: skip
        arrays = [x.detach().contiguous().numpy() for x in (y0, of_edge, to_message, to_state, bias)]
        y, z, count = np.empty_like(arrays[0]), np.zeros((len(y0), of_edge.shape[1]), arrays[0].dtype), np.zeros(len(y0), np.int64)
        sweep(arrays[0], arrays[1], *edges, *arrays[2:], back, y, z, count)
        ctx.kept = (arrays, edges, back, y, z, count)
        return torch.from_numpy(y)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (y0, of_edge, to_message, to_state, bias), edges, back, y, z, count = ctx.kept
        g_y, found = g.numpy().copy(), [np.empty_like(of_edge), *(np.zeros_like(x) for x in (to_message, to_state, bias))]
        sweep_gradient(y, y0, z, count, of_edge, *edges, to_message, to_state, back, g_y, *found)
        return (torch.from_numpy(g_y), *map(torch.from_numpy, found), None, None)


def log_chances(scores: torch.Tensor, allowed: NDArray[np.bool_], owner: NDArray[np.int64], problems: int) -> torch.Tensor:
    """Log of the softmax over the allowed nodes of each problem; minus infinity for the others."""
    of = torch.from_numpy(owner)
    masked = scores.masked_fill(~torch.from_numpy(allowed), -torch.inf)
    top = torch.full((problems,), -torch.inf).scatter_reduce(0, of, masked.detach(), "amax")
    shifted = masked - top[of]
    return shifted - torch.log(torch.zeros(problems).index_add(0, of, shifted.exp()))[of]
