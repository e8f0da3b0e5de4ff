"""The halo of a worker's nodes for any torch module: rows of other workers forward, their gradients back, each at its planned bits.

    halo = HaloExchange(plan, share)
    every_row = halo(h, layer)              # [own + copies, dim], or, so that computing goes on meanwhile:
    ticket = halo.start(h, layer); ...; copies = halo.finish(ticket, layer)

Backward, what `finish` gave sends its gradients to the owners, and `start` adds what came; autograd puts what was computed between the two there
again. All workers call the same layers in the same order. An exchange that the plan does not state goes in full precision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...codec.rows import FULL
from ...errors import GroupFailed, PlanMismatch, RunTimeout, Unsupported
from ...graph.halo import Halo
from ...plan.halo import HaloJob, widths_of_text
from .messages import RowMessage, spreads

__all__ = ["HaloExchange"]

TAG = 7  # messages of two workers are in the order of their layers, so one tag does


class HaloExchange:
    """`plan`: a plan of kind halo, or its `HaloJob`; None: full precision. `share`: this worker's, of the plan's graph and parts. `seed`: of the
    rounding. `timeout_s`: longest wait for a row.

    `sent`: bytes of each (exchange, source, destination), this worker's, added up. Raises: PlanMismatch for a share of other rows.
    """

    def __init__(self, plan: Any, share: Halo, *, group: Any = None, seed: int = 0, timeout_s: float = 300.0) -> None:
        self.share, self.seed, self.limit = share, seed, timedelta(seconds=timeout_s)
        group = group or dist.group.WORLD
        self.port: Any = getattr(group, "builtin", group)  # of a "meshwright" group
        self.workers = len(share.send)
        self.widths: dict[tuple[str, int, int], np.ndarray[Any, Any]] = {}
        self.sent: Counter[tuple[str, int, int]] = Counter()
        self.tracing: dict[tuple[str, int, int], np.ndarray[Any, Any]] | None = None
        self.traced = 0
        self.full = False
        self.step = 0
        self._codecs: dict[tuple[str, int, int, int], RowMessage] = {}
        self._waiting: dict[str, tuple[list[Any], list[tuple[int, Any, RowMessage, Any]], list[Any], int]] = {}
        if plan is not None:
            self.assign(plan if isinstance(plan, HaloJob) else _job(plan))

    def assign(self, job: HaloJob) -> None:
        """Other widths from here on, on all workers at the same call."""
        widths = {}
        for s in job.steps:
            for m in s.messages:
                widths[s.name, m.src, m.dst] = np.array(widths_of_text(m.widths), np.int64)
        for (name, src, dst), bits in widths.items():
            if self.share.rank in (src, dst) and len(bits) != self._rows(name, src, dst):
                has = self._rows(name, src, dst)
                text = f"{name}, {src} to {dst}: the plan states {len(bits)} rows, this share has {has}"
                raise PlanMismatch(text, where=f"worker {self.share.rank}", hint="plan for this graph and these parts")
        self.widths = widths
        self._codecs.clear()

    def _rows(self, name: str, src: int, dst: int) -> int:
        """Backward, a message's rows are those of the forward one the other way."""
        other = dst if src == self.share.rank else src
        first, end = self.share.receive[other]
        sends = (src == self.share.rank) == name.startswith("forward")
        return len(self.share.send[other]) if sends else end - first

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Full precision inside, for evaluation; nothing is counted or traced."""
        before, self.full = self.full, True
        try:
            yield
        finally:
            self.full = before

    def trace(self) -> None:
        """Adds up each row's squared range from here on, until `ranges`."""
        self.tracing, self.traced = {}, 0

    def ranges(self) -> dict[tuple[str, int, int], np.ndarray[Any, Any]]:
        """Mean squared range of each row that this worker sent since `trace`, and an end of tracing."""
        found, steps, self.tracing = self.tracing or {}, max(1, self.traced), None
        return {key: total / steps for key, total in found.items()}

    def __call__(self, h: torch.Tensor, layer: int) -> torch.Tensor:
        return torch.cat([h, self.finish(self.start(h, layer), layer)])

    def start(self, h: torch.Tensor, layer: int) -> torch.Tensor:
        """Sends what others need of h [own, dim] float32. Returns a ticket for `finish`. Raises: Unsupported, NotFinite."""
        self.checked(h, layer)
        return _Start.apply(h, self, layer)

    def checked(self, h: torch.Tensor, layer: int) -> np.ndarray[Any, Any]:
        """The rows as an array. Raises: Unsupported."""
        if h.dtype != torch.float32 or h.dim() != 2 or h.shape[0] != self.share.own or h.device.type != "cpu":
            what = f"{tuple(h.shape)} of {h.dtype} on {h.device.type}"
            raise Unsupported(what, where=f"layer {layer}", hint=f"float32 rows in host memory, {self.share.own} of them: one for each own node")
        found: np.ndarray[Any, Any] = h.detach().contiguous().numpy()
        return found

    def finish(self, ticket: torch.Tensor, layer: int) -> torch.Tensor:
        """[copies, dim]: the rows of others, by owner. Raises: GroupFailed, RunTimeout."""
        return _Finish.apply(ticket, self, layer)

    def next_step(self) -> None:
        """A new epoch: other random numbers."""
        self.step += 1
        self.traced += self.tracing is not None

    # ---- messages --------------------------------------------------------------------------------------------------
    def _codec(self, name: str, src: int, dst: int, rows: int, dim: int) -> RowMessage:
        key = name if not self.full else "", src, dst, dim * (1 if not self.full else -1 - rows)
        if key not in self._codecs:
            stated = None if self.full else self.widths.get((name, src, dst))
            self._codecs[key] = RowMessage(np.full(rows, FULL, np.int64) if stated is None else stated, dim)
        return self._codecs[key]

    def _post(self, name: str, x: np.ndarray[Any, Any], send: list[np.ndarray[Any, Any]], receive: list[int], layer: int) -> None:
        me, dim, works, coming, kept = self.share.rank, x.shape[1], [], [], []
        with _named(name, me):
            for turn in range(1, self.workers):
                peer = (me - turn) % self.workers
                if receive[peer]:
                    codec = self._codec(name, peer, me, receive[peer], dim)
                    wire = torch.empty(codec.size_bytes, dtype=torch.uint8)
                    coming.append((peer, wire, codec, self.port.recv([wire], peer, TAG)))
            for turn in range(1, self.workers):
                peer = (me + turn) % self.workers
                if not len(send[peer]):
                    continue
                key = name, me, peer
                if self.tracing is not None and not self.full:
                    self.tracing[key] = self.tracing.get(key, 0.0) + spreads(x, send[peer])
                codec = self._codec(name, me, peer, len(send[peer]), dim)
                place = (self.seed, self.step, layer, int(name.startswith("forward")), me, peer)
                wire = torch.from_numpy(codec.encode(x, send[peer], place, f"{name}, worker {me} to {peer}"))
                works.append(self.port.send([wire], peer, TAG))
                kept.append(wire)
                if not self.full:
                    self.sent[key] += codec.size_bytes
        self._waiting[name] = works, coming, kept, dim

    def _collect(self, name: str) -> tuple[dict[int, np.ndarray[Any, Any]], int]:
        """(rows by peer, dim) of what was posted under this name."""
        works, coming, _, dim = self._waiting.pop(name)
        found = {}
        with _named(name, self.share.rank):
            for peer, wire, codec, work in coming:
                work.wait(self.limit)
                found[peer] = np.empty((codec.rows, dim), np.float32)
                codec.decode(wire.numpy(), found[peer])
            for work in works:
                work.wait(self.limit)
        return found, dim

    # ---- what autograd does ------------------------------------------------------------------------------------------
    def post_rows(self, h: np.ndarray[Any, Any], layer: int) -> None:
        """Sends what others need of the own rows; their rows are expected."""
        self._post(f"forward{layer}", h, list(self.share.send), [end - first for first, end in self.share.receive], layer)

    def take_rows(self, layer: int) -> np.ndarray[Any, Any]:
        """[copies, dim]: what was expected."""
        came, dim = self._collect(f"forward{layer}")
        out = np.empty((self.share.copies, dim), np.float32)
        for peer, rows in came.items():
            first, end = (x - self.share.own for x in self.share.receive[peer])
            out[first:end] = rows
        return out

    def post_gradients(self, of_copies: np.ndarray[Any, Any], layer: int) -> None:
        """Sends the gradients [copies, dim] of others' rows to them."""
        own = self.share.own
        send = [np.arange(first - own, end - own) for first, end in self.share.receive]
        self._post(f"backward{layer}", of_copies, send, [len(rows) for rows in self.share.send], layer)

    def add_gradients(self, total: np.ndarray[Any, Any], layer: int) -> None:
        """Adds what came to the own rows [own, dim] that it is of, in the order of workers: the sum is the same every time."""
        came, _ = self._collect(f"backward{layer}")
        for peer in sorted(came):
            total[self.share.send[peer]] += came[peer]  # a row goes to a peer once


@contextmanager
def _named(name: str, rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        late = "timed out" in str(error).lower()
        what = "no answer within the group's timeout" if late else "a connection was closed"
        raise (RunTimeout if late else GroupFailed)(
            f"{name} on worker {rank}: {what}", where="halo exchange", hint="another worker ended, or calls other layers; the group is unusable",
            data={"rank": rank, "exchange": name, "error": str(error)[:300]},
        ) from error  # fmt: skip


def _job(plan: Any) -> HaloJob:
    import msgspec

    if getattr(plan, "kind", "") != "halo":
        what = f"a plan of kind {getattr(plan, 'kind', type(plan).__name__)}"
        raise PlanMismatch(what, where="HaloExchange", hint="meshwright graph plan makes one")
    return msgspec.convert(plan.job["halo"], HaloJob)


class _Start(torch.autograd.Function):  # type: ignore[misc]
    """Forward: posts rows. Backward: adds the gradients that came to the own rows they are of."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, halo: HaloExchange, layer: int) -> torch.Tensor:
        ctx.halo, ctx.layer, ctx.shape = halo, layer, h.shape
        halo.post_rows(h.detach().contiguous().numpy(), layer)
        return h.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        total = torch.zeros(ctx.shape)
        ctx.halo.add_gradients(total.numpy(), ctx.layer)
        return total, None, None


class _Finish(torch.autograd.Function):  # type: ignore[misc]
    """Forward: waits for rows. Backward: posts their gradients."""

    @staticmethod
    def forward(ctx: Any, ticket: torch.Tensor, halo: HaloExchange, layer: int) -> torch.Tensor:
        ctx.halo, ctx.layer = halo, layer
        return torch.from_numpy(halo.take_rows(layer))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.halo.post_gradients(grads[0].contiguous().numpy(), ctx.layer)
        return grads[0].new_zeros(1), None, None
