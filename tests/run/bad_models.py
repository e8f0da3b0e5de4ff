"""Models, data and optimizers that a job cannot be made of as they are. Line numbers are asserted by the text of the line."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

CALLS, SCALE = 0, 1.0
STATE = {"seen": 0}
CACHED = 0
COLLECTED: list[int] = []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.calls, self.length = nn.Linear(4, 4), nn.Linear(4, 4), 0, 0

    def forward(self, x):
        return self.b(self.a(x))


class Global(Net):
    def forward(self, x):
        global CALLS
        CALLS += 1  # changed: global
        return super().forward(x) * CALLS


class Entry(Net):
    def forward(self, x):
        STATE["seen"] += 1  # changed: entry
        return super().forward(x) * STATE["seen"]


class Attribute(Net):
    def forward(self, x):
        self.calls += 1  # changed: attribute
        return super().forward(x) * self.calls


class Appended(Net):
    def __init__(self):
        super().__init__()
        self.part = Remembers()

    def forward(self, x):
        return self.part(super().forward(x))


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen, self.counts = [], {}

    def forward(self, x):
        self.seen.append(x.shape[0])  # changed: list
        return x * len(self.seen)


class Counted(Net):
    def __init__(self):
        super().__init__()
        self.counts = {}

    def forward(self, x):
        self.counts["n"] = self.counts.get("n", 0) + 1  # changed: dict
        return super().forward(x) * self.counts["n"]


class Collected(Net):
    def forward(self, x):
        COLLECTED.append(0)  # changed: global list
        return super().forward(x) * len(COLLECTED)


class LossesByName(Net):
    def forward(self, x, y):  # by name
        return {"generator": F.mse_loss(self.a(x), y), "critic": F.mse_loss(self.b(x), y)}


class Detached(Net):
    def forward(self, x):
        return super().forward(x).detach()


class Cache(Net):
    """Changes once."""

    def forward(self, x):
        global CACHED
        CACHED = self.length = x.shape[1]
        return super().forward(x)


class File(nn.Module):
    def forward(self, x):
        return x * len(Path(__file__).read_text())  # read


class Reads(Net):
    def __init__(self):
        super().__init__()
        self.file = File()

    def forward(self, x):
        return super().forward(self.file(x))


class Prints(Net):
    def forward(self, x):
        print("forward")  # noqa: T201  # printed
        return super().forward(x)


class Nothing(Net):
    def forward(self, x):  # nothing
        self.a(x)


class TwoLosses(Net):
    def forward(self, x, y):  # two
        return F.mse_loss(self.a(x), y), F.mse_loss(self.b(x), y)


class Looked(Net):
    """One loss, and a number to look at."""

    def forward(self, x, y):
        loss = F.mse_loss(super().forward(x), y)
        return loss, (x.detach() ** 2).mean()


class NotFinite(Net):
    def forward(self, x):
        return super().forward(x).log()


def batch():
    torch.manual_seed(0)
    return torch.randn(4, 4), torch.randn(4, 4)


def _made(kind):
    def function():
        torch.manual_seed(0)
        return kind(), batch()

    return function


changing_global, changing_entry, changing_attribute, cache = map(_made, (Global, Entry, Attribute, Cache))
changing_list, changing_dictionary, changing_global_list = map(_made, (Appended, Counted, Collected))
reads, prints, nothing, two_losses, looked, not_finite = map(_made, (Reads, Prints, Nothing, TwoLosses, Looked, NotFinite))
losses_by_name, detached = map(_made, (LossesByName, Detached))


def frozen():
    torch.manual_seed(0)
    return Net().requires_grad_(False), batch()


def nothing_as_loss():
    module, (x, _) = nothing()
    return module, {"x": x}


def two_nets():
    return (Net(), Net()), batch()


class Unlike(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):  # unlike
        return torch.zeros(4 + i % 2), torch.zeros(4)


def unlike():
    return Unlike()


def unlike_loader():
    return DataLoader(Unlike(), batch_size=4)


def two_optimizers(named, lr):
    named = [p for _, p in named]
    return torch.optim.SGD(named[:1], lr), torch.optim.SGD(named[1:], lr)


class Again(torch.optim.SGD):
    def step(self, closure):  # again
        closure()
        super().step()


def with_closure(named, lr):
    return Again([p for _, p in named], lr)


def lbfgs(named, lr):
    return torch.optim.LBFGS([p for _, p in named], lr)


def only_parameters(parameters):
    return torch.optim.SGD(parameters, 0.1)


def broken(named, lr):
    return torch.optim.SGD(named, lr=-1.0)  # broken


class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.randn(4), torch.full((4,), random.random() + float(np.random.rand()))


def augmented():
    return Augmented()


# ---- losses that are functions ----
def rows():
    return nn.Linear(4, 4), (torch.randn(4, 4), torch.randint(4, (4,)))


def counted_loss(output, target):
    global CALLS
    CALLS += 1  # loss: global
    return nn.functional.cross_entropy(output, target) * CALLS


def _around():
    calls = 0

    def loss(output, target):
        nonlocal calls
        calls += 1  # loss: variable around it
        return nn.functional.cross_entropy(output, target) * calls

    return loss


loss_with_variable = _around()


class Counted:
    def __init__(self):
        self.seen = []

    def __call__(self, output, target):
        self.seen.append(1)  # loss: attribute
        return nn.functional.cross_entropy(output, target) * len(self.seen)


loss_of_an_object = Counted()


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, output, target):  # loss: parameter
        return nn.functional.cross_entropy(output * self.temperature, target)


trained_loss = Tempered()
frozen_loss = Tempered().requires_grad_(False)


def rows_loss(output, target):  # loss: rows
    return nn.functional.cross_entropy(output, target, reduction="none")


loss_of_rows = functools.partial(rows_loss)


def picking_loss(output, target):
    kept = output.max(-1).values > output.mean()
    return nn.functional.cross_entropy(output[kept], target[kept])  # loss: picks


class Returns(nn.Linear):
    """Logits and what else is asked for: nanoGPT's form."""

    def __init__(self, form):
        super().__init__(4, 4)
        self.form = form

    def forward(self, x, targets=None):  # forward of forms
        logits = super().forward(x)
        loss = None if targets is None else nn.functional.cross_entropy(logits, targets)
        other = None if loss is None else loss.detach() * 2
        return {
            "logits, loss": (logits, loss), "loss, logits": (loss, logits), "by another name": {"logits": logits, "objective": loss},
            "logits, other, loss": (logits, other, loss), "logits alone": (logits, None), "names": {"a": other, "b": loss, "logits": logits},
        }[self.form]  # fmt: skip


for _name, _form in {
    "logits_first": "logits, loss", "loss_first": "loss, logits", "other_name": "by another name", "which_loss": "logits, other, loss",
    "no_loss": "logits alone", "which_name": "names",
}.items():  # fmt: skip
    globals()[_name] = functools.partial(lambda form: (Returns(form), (torch.randn(4, 4), torch.randint(4, (4,)))), _form)
