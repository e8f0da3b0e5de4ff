"""Optimizers named in a text: what it says, which there are, what they keep."""

from __future__ import annotations

import pytest

from meshwright.errors import UnknownName, Unsupported, UsageError
from meshwright.plan.optimizers import may_be_cut, named, optimizer_kind, state_copies, state_names, undecayed


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("adamw", "adamw", {}),
        ("adamw:weight_decay=0.1,betas=0.9,0.95,amsgrad=true", "adamw", {"weight_decay": 0.1, "betas": (0.9, 0.95), "amsgrad": True}),
        ("my.optimizers:make", "my.optimizers:make", {}),
        ("some dir/own.py:make:depth=3,kind=slow,limit=none,x=1e-3", "some dir/own.py:make", {"depth": 3, "kind": "slow", "limit": None, "x": 1e-3}),
    ],
)
def test_a_text_is_a_name_with_options(text, name, options):
    found = named(text, where="--optimizer")
    assert (found.name, dict(found.options)) == (name, options)
    assert found.is_function == (":" in name)


@pytest.mark.parametrize("text", ["adamw:3,lr=4", "adamw:lr=1,lr=2", "adamw:a b=3"])
def test_what_is_no_option_is_refused(text):
    with pytest.raises(UsageError, match="is not option=value"):
        named(text, where="--optimizer")


def test_which_there_are():
    assert may_be_cut("AdamW:weight_decay=0") and not may_be_cut("muon") and not may_be_cut("own.py:make")
    with pytest.raises(UnknownName, match="no optimizer 'adamz'"):
        optimizer_kind("adamz:lr=3")
    for text, why in (("lbfgs", "several times in one step"), ("SparseAdam", "sparse gradients")):
        with pytest.raises(Unsupported, match=why):
            optimizer_kind(text)


def test_what_is_kept_beside_a_parameter():
    assert [state_copies(t) for t in ("adamw", "sgd", "adam:amsgrad=true", "rmsprop", "own.py:make")] == [2, 2, 3, 3, 2]
    assert state_copies("adamw", 0.99) == 3
    assert state_names("adamw:amsgrad=true", 0.9) == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "weight_average")
    assert state_names("sgd") == () and state_names("sgd:momentum=0.9") == ("momentum_buffer",) and state_names("own.py:make") is None


def test_parameters_without_decay():
    shapes = {"a.weight": (3, 2), "a.bias": (3,), "norm.weight": (3,), "scale": ()}
    assert undecayed(shapes, ["bias", "norm"]) == {"a.bias", "norm.weight"}
    assert undecayed(shapes, ["1d"]) == {"a.bias", "norm.weight", "scale"}
    assert undecayed(shapes, ["*.weight"]) == {"a.weight", "norm.weight"}
    with pytest.raises(UsageError, match="no parameter fits 'layernorm'"):
        undecayed(shapes, ["layernorm"])
