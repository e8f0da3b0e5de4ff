"""Modules and their operators from a real module, compared with torch's own names and with the autograd graph."""

import pytest
import torch
from torch import nn

from meshwright.capture.modules import capture_modules, module_tree, named_capture
from meshwright.errors import CaptureError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.unused = nn.Linear(4, 4)
        self.again = self.first[0]

    def forward(self, x):
        return torch.relu(self.again(self.first(x))) + x


def test_tree_and_operators():
    net, x = Net(), torch.randn(3, 4)
    before, state = {k: v.clone() for k, v in net.state_dict().items()}, torch.random.get_rng_state()
    tree = capture_modules(net, (x,))
    assert [m.path for m in tree.modules] == [path for path, _ in net.named_modules()]
    assert all(tree.modules[m.parent].path == m.path.rpartition(".")[0] for m in tree.modules[1:])
    ran = [(o.name, tree.modules[o.module].path) for o in tree.operators]
    assert [r for r in ran if r[0] != "aten::add_"] == [
        ("aten::linear", "first.0"), ("aten::batch_norm", "first.1"), ("aten::dropout", "first.2"), ("aten::linear", "first.0"),
        ("aten::relu", ""), ("aten::add", ""),
    ]  # fmt: skip
    owned = {(name, tree.modules[i].path) for o in tree.operators for name, owners in o.owners for i in owners}
    assert owned == {("AddmmBackward0", "first.0"), ("TBackward0", "first.0"), ("NativeBatchNormBackward0", "first.1")}
    assert "aten::addmm" in tree.operators[0].inner
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items()) and torch.equal(torch.random.get_rng_state(), state)
    assert not net._forward_hooks and not net._forward_pre_hooks
    assert module_tree(net).operators == ()


def test_named_on_meta(tmp_path):
    source = "import torch\nfrom torch import nn\n\ndef build():\n    return nn.Linear(4, 2), (torch.zeros(3, 4), torch.zeros(3))\n"
    (tmp_path / "model.py").write_text(source)
    for device in ("cpu", "meta"):
        tree = named_capture(f"{tmp_path}/model.py:build", device=device)
        assert [(o.name, o.module) for o in tree.operators] == [("aten::linear", 0)]


def test_a_forward_that_fails():
    with pytest.raises(CaptureError, match="the forward pass failed"):
        capture_modules(nn.Linear(4, 2), (torch.zeros(3, 5),))
