"""Nets whose outermost forward asks values of its batch: checks of the owner's, and choices."""

import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 5


class Net(nn.Module):
    def __init__(self, check) -> None:
        super().__init__()
        self.table, self.layers, self.check = nn.Embedding(9, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)), check

    def forward(self, tokens, labels):
        scale = self.check(tokens, labels)
        return F.cross_entropy(self.layers(self.table(tokens).mean(1)) * (1.0 if scale is None else scale), labels)


def _with(check):
    return Net(check), (torch.randint(0, 8, (4, 6)), torch.randint(0, CLASSES, (4,)))


def _in_range(tokens, labels):
    if labels.max() >= CLASSES:  # asked
        raise ValueError(f"labels go up to {labels.max().item()}")


def in_range():
    return _with(_in_range)


def _asserted(tokens, labels):
    assert (labels >= 0).all() and not torch.equal(labels, labels + 1), "labels are numbers of classes"


def asserted():
    return _with(_asserted)


def _counted(tokens, labels):
    count = (tokens == 8).sum()
    right = count * tokens.shape[1] == 0
    if torch.compiler.is_exporting():  # as transformers does
        torch._check_tensor_all(right)
    else:
        torch._check_tensor_all(right, lambda: f"{count} pictures")


def counted():
    return _with(_counted)


def _chosen(tokens, labels):
    return 2.0 if labels.max() >= 3 else 1.0


def chosen():
    return _with(_chosen)


class OfWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, CLASSES)

    def forward(self, x, labels):
        y = self.layer(x)
        if not torch.isfinite(y).all():  # asked of what is computed
            raise ValueError("overflow")
        return F.cross_entropy(y, labels)


def of_weights():
    return OfWeights(), (torch.randn(4, 4), torch.randint(0, CLASSES, (4,)))


class Speech(nn.Module):
    """As transformers' classes of speech: labels in a row without padding, made in the outermost forward."""

    def __init__(self, reduction, cut) -> None:
        super().__init__()
        self.cut = cut
        self.layers, self.reduction = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)), reduction

    def forward(self, x, labels):
        if labels.max() >= CLASSES:
            raise ValueError("no such label")
        scores = self.layers(x).log_softmax(-1).transpose(0, 1)
        kept = labels > 0
        if self.cut:
            kept[:, 1:] = False  # what was known of it no longer holds
        lengths = torch.ones_like(x[..., 0], dtype=torch.long).sum(-1)
        return F.ctc_loss(scores, labels.masked_select(kept), lengths, kept.sum(-1), reduction=self.reduction, zero_infinity=True)


def _speech(reduction, cut=False):
    return Speech(reduction, cut), (torch.randn(4, 9, 3), torch.tensor([[1, 2, 0], [3, 4, 1], [2, -100, -100], [1, -100, -100]]))


def speech():
    return _speech("mean")


def speech_cut():
    return _speech("mean", cut=True)


def speech_sum():
    return _speech("sum")


class Picked(nn.Module):
    """The loss of chosen positions, taken in the outermost forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, x, labels):
        scores, chosen = self.layers(x), (labels >= 0) & (torch.arange(6) % 2 == 0)
        return F.cross_entropy(scores[chosen], labels[chosen])


def picked():
    return Picked(), (torch.randn(4, 6, 4), torch.randint(0, CLASSES, (4, 6)))
