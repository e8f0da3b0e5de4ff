"""Models and losses that leave a tensor for their next run, and some that only seem to. Line numbers are asserted by the text of the line."""

from __future__ import annotations

import functools
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

BANK: dict[str, torch.Tensor] = {}
LAST = None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.begin()

    def begin(self):
        pass

    def between(self, y):
        return y

    def forward(self, x):
        return self.b(self.between(self.a(x)))


class Attribute(Net):
    def begin(self):
        self.h = None

    def between(self, y):
        if self.h is not None:
            y = y + self.h  # read: attribute
        z = y * 2
        self.h = z.detach()  # left: attribute
        return z


class Plain(Net):
    def begin(self):
        self.h = torch.zeros(3, 4)

    def between(self, y):
        y = y + self.h.mean(0)  # read: in place
        self.h[0] = y.detach().mean(0)  # left: in place
        return y


class Data(Net):
    def begin(self):
        self.h = torch.zeros(4)

    def between(self, y):
        y = y + self.h  # read: data
        self.h.data = y.detach().mean(0)  # left: data
        return y


class Listed(Net):
    def begin(self):
        self.h = []

    def between(self, y):
        if self.h:
            y = y + self.h[-1]  # read: list
        self.h.append(y.detach().mean(0))  # left: list
        return y


class Queued(Net):
    """The one before the last is read."""

    def begin(self):
        self.h = deque(maxlen=2)

    def between(self, y):
        if len(self.h) == 2:
            y = y + self.h[0]  # read: deque
        self.h.append(y.detach().mean(0))  # left: deque
        return y


class OfBuffer(Net):
    """Not a tensor from the start, so that no plan holds it."""

    def begin(self):
        self.register_buffer("h", None)

    def between(self, y):
        if self.h is not None:
            y = y + self.h  # read: buffer
        self.h = y.detach().mean(0)  # left: buffer
        return y


class OfFile(Net):
    def between(self, y):
        global LAST
        if LAST is not None:
            y = y + LAST  # read: global
        LAST = y.detach().mean(0)  # left: global
        return y


class Bank(Net):
    def between(self, y):
        if "last" in BANK:
            y = y + BANK["last"]  # read: global dict
        BANK["last"] = y.detach().mean(0)  # left: global dict
        return y


class OfClass(Net):
    last = torch.zeros(4)

    def between(self, y):
        y = y + type(self).last  # read: class
        type(self).last = y.detach().mean(0)  # left: class
        return y


class Around(Net):
    def begin(self):
        h = None

        def between(y):
            nonlocal h
            if h is not None:
                y = y + h  # read: variable
            h = y.detach().mean(0)  # left: variable
            return y

        self.between = between


class Memory:
    def __init__(self):
        self.h = torch.zeros(4)


class OfObject(Net):
    def begin(self):
        self.memory = Memory()

    def between(self, y):
        y = y + self.memory.h  # read: object
        self.memory.h = y.detach().mean(0)  # left: object
        return y


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = torch.zeros(4)

    def forward(self, y):
        return y + self.h  # read: inner


class SetFromOutside(Net):
    def begin(self):
        self.inner = Inner()

    def between(self, y):
        y = self.inner(y)
        self.inner.h = y.detach().mean(0)  # left: inner
        return y


class FirstBatch(Net):
    def begin(self):
        self.mean = None

    def between(self, y):
        if self.mean is None:
            self.mean = y.detach().mean(0)  # left: first batch
        return y - self.mean  # read: first batch


class FirstWeights(Net):
    def begin(self):
        self.w = None

    def between(self, y):
        if self.w is None:
            self.w = self.a.weight.detach().clone()  # left: first weights
        return y @ self.w  # read: first weights


class DrawnOnce(Net):
    def begin(self):
        self.mask = None

    def between(self, y):
        if self.mask is None:
            self.mask = torch.rand(4) > 0.5  # left: drawn
        return y * self.mask  # read: drawn


class OtherwiseFirst(Net):
    def begin(self):
        self.first = True

    def between(self, y):
        if not self.first:
            y = y * 2  # otherwise
        self.first = False
        return y


class Scalar(nn.Module):
    """Cannot be traced: it runs as the whole model, on real tensors."""

    def __init__(self):
        super().__init__()
        self.a, self.h = nn.Linear(4, 4), [torch.zeros(4)]

    def forward(self, x):
        y = self.a(x)
        if y.sum() > 1e9:
            y = y * 2
        y = y + self.h[0]  # read: whole
        self.h[0] = y.detach().mean(0)  # left: whole
        return y


class Smoothed(nn.Module):
    """Cannot be traced; what it leaves is a number."""

    def __init__(self):
        super().__init__()
        self.a, self.scale = nn.Linear(4, 4), 1.0

    def forward(self, x):
        y = self.a(x)
        self.scale = 0.5 * self.scale + y.abs().mean().item()  # left: number
        return y / self.scale


class Kept(nn.Module):
    """Cannot be traced: it is kept whole, and runs on samples."""

    def __init__(self):
        super().__init__()
        self.a, self.h, self.calls, self.table = nn.Linear(4, 4), torch.zeros(4), 0, None
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, y):
        y = self.a(y)
        return self.after(y * 2 if y.sum() > 1e9 else y)


class Keeps(Kept):
    def after(self, y):
        y = y + self.h  # read: kept
        self.h = y.detach().mean(0)  # left: kept
        return y


class Counts(Kept):
    def after(self, y):
        self.calls += 1  # left: kept number
        return y * self.calls


class Writes(Kept):
    """Looked at afterwards; a table that is the same in every run; a buffer."""

    def after(self, y):
        self.h, self.calls = y.detach().mean(0), self.calls + 1
        if self.table is None:
            self.table = torch.arange(4.0)
        self.mean = 0.9 * self.mean + y.detach().mean(0)
        return y * self.table - self.mean


class OfKept(Net):
    kind = Keeps

    def begin(self):
        self.kept = self.kind()

    def between(self, y):
        return self.kept(y)


class OfCounts(OfKept):
    kind = Counts


class TwiceCounts(OfCounts):
    def between(self, y):
        return self.kept(self.kept(y))


class TwiceWrites(TwiceCounts):
    kind = Writes


# ---- what is taken -----------------------------------------------------------------------------------------------------


class OnlyWritten(Net):
    """As those do that show attention, or a mean of it, afterwards."""

    def begin(self):
        self.seen, self.mean = None, torch.zeros(4)

    def between(self, y):
        self.seen, self.mean = y.detach(), 0.9 * self.mean + y.detach().mean(0)
        return y


class Within(Net):
    def begin(self):
        self.h = None

    def between(self, y):
        self.h = y * 2
        return self.h + 1


class Table(Net):
    """A cache of what is the same in every run."""

    def begin(self):
        self.mask, self.turns = None, {}

    def between(self, y):
        if self.mask is None:
            self.mask = torch.ones(4, 4).tril()
        if 4 not in self.turns:
            self.turns[4] = torch.arange(4.0)
        return y @ self.mask * self.turns[4] + cached(4)


@functools.lru_cache
def cached(size):
    return torch.linspace(0, 1, size)


class Scratch(Net):
    """Room that is written before it is read."""

    def begin(self):
        self.room = torch.zeros(4, 4)

    def between(self, y):
        self.room.copy_(y.detach())
        return y + self.room.mean(0)


class Running(Net):
    def begin(self):
        self.register_buffer("h", torch.zeros(4))

    def between(self, y):
        self.h = 0.9 * self.h + 0.1 * y.detach().mean(0)
        return y - self.h


# ---- losses --------------------------------------------------------------------------------------------------------------


class Centred:
    def __init__(self):
        self.c = torch.zeros(4)

    def __call__(self, output, target):
        loss = F.mse_loss(output, target) + (output - self.c).square().mean()  # read: loss
        self.c = 0.9 * self.c + 0.1 * output.detach().mean(0)  # left: loss
        return loss


class CentredInPlace(Centred):
    def __call__(self, output, target):
        loss = F.mse_loss(output, target) + (output - self.c).square().mean()  # read: loss in place
        self.c.mul_(0.9).add_(0.1 * output.detach().mean(0))  # left: loss in place
        return loss


class CentredModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = torch.zeros(4)

    def forward(self, output, target):
        loss = F.mse_loss(output, target) + (output - self.c).square().mean()  # read: loss module
        self.c = 0.9 * self.c + 0.1 * output.detach().mean(0)  # left: loss module
        return loss


class Registered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("c", torch.zeros(4))

    def forward(self, output, target):
        loss = F.mse_loss(output, target) + (output - self.c).square().mean()
        self.c = 0.9 * self.c + 0.1 * output.detach().mean(0)
        return loss


class Recording(nn.Module):
    """Gives its layers hooks when it first runs, as transformers' classes do, and notes that it has."""

    def __init__(self):
        super().__init__()
        self.layers, self.heads = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), nn.ModuleList([nn.Linear(3, 4), nn.Linear(2, 4)])

    def forward(self, x):
        if not getattr(self, "recording", False):
            for layer in self.layers:
                layer.register_forward_hook(lambda module, given, made: self.made.append(made))
            self.recording = True
        self.made = []
        self.layers(x)
        return sum(head(made) for head, made in zip(self.heads, self.made))


centred, centred_in_place, centred_module, registered = Centred(), CentredInPlace(), CentredModule(), Registered()


def batch():
    torch.manual_seed(0)
    return torch.randn(4, 4), torch.randn(4, 4)


def _made(kind):
    return lambda: (kind(), batch())


_PARTS = (Inner, Kept, Keeps, Counts, Writes, CentredModule, Registered)
for _kind in [k for k in list(globals().values()) if isinstance(k, type) and issubclass(k, nn.Module) and k not in _PARTS]:
    globals()[_kind.__name__.lower()] = _made(_kind)
