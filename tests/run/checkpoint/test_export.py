"""Weights of a checkpoint of any layout, for others: what safetensors and torch.distributed.checkpoint read is the whole model, in its own names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from levels_rig import rank_of
from recipe_rig import job_of, plan_of
from safetensors.torch import load_file
from tensor_rig import plan_case, whole_case

from meshwright.cli.frame import main
from meshwright.decide.layout.data_sharding import DataSharding
from meshwright.errors import FormatError, UsageError
from meshwright.run.checkpoint.checkpoint import commit_index, make_index, save_rank
from meshwright.run.checkpoint.export import export_checkpoint

NAMES = "tests/run/tensor_models.py:"
LAYOUTS = [((1, 1, 1), 0), ((1, 2, 2), 0), ((2, 2, 1), 3), ((3, 1, 1), 1)]


def saved(folder: Path, degrees, level, name="odd_tied", average=0.0):
    """A run's folder with a checkpoint of step 3, in which averages are `average` times the weights."""
    case = plan_case(name, degrees, microbatch=1, global_batch=2 * degrees[0], sharding=DataSharding(level, level > 0, 1500))
    at, parts = folder / "checkpoint" / "step-00000003", []
    for rank in range(case.layout.ranks):
        module, optimizer, _, _ = rank_of(case, rank, "adamw")
        for _, tensor, _ in module.updated():
            optimizer.state[tensor].update(step=torch.tensor(3.0), exp_avg=2 * tensor.detach())
            if average:
                optimizer.state[tensor]["weight_average"] = average * tensor.detach()
        parts.append(save_rank(at, rank, module, optimizer, case.layout, []))
    commit_index(at, make_index(plan_of(case, job_of(case, "adamw")), 3, "d", [], parts))
    return whole_case(name, 4, "cross-entropy")[0]


@pytest.mark.parametrize(("degrees", "level"), LAYOUTS)
def test_a_file_is_the_modules_state(degrees, level, tmp_path):
    module = saved(tmp_path, degrees, level)
    made = export_checkpoint(tmp_path, tmp_path / "model.safetensors", model=NAMES + "odd_tied")
    found = load_file(tmp_path / "model.safetensors")
    state = module.state_dict()
    assert set(found) == set(state) == set(made.names) and not made.notes and made.step == 3
    assert all(torch.equal(found[n], state[n]) for n in state)
    module.load_state_dict(found, strict=True)


def test_dcp_reads_it_into_the_module(tmp_path):
    module = saved(tmp_path, (2, 1, 2), 2)
    export_checkpoint(tmp_path, tmp_path / "dcp", to="dcp", model=NAMES + "odd_tied")
    state = {n: torch.zeros_like(t) for n, t in module.state_dict().items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert all(torch.equal(state[n], t) for n, t in module.state_dict().items())
    with pytest.raises(UsageError, match="exists already"):
        export_checkpoint(tmp_path, tmp_path / "dcp", to="dcp")


def test_averages_take_the_place_of_weights(tmp_path):
    module = saved(tmp_path / "with", (2, 1, 1), 1, average=0.5)
    export_checkpoint(tmp_path / "with", tmp_path / "a.safetensors", average=True)
    found = load_file(tmp_path / "a.safetensors")
    assert all(torch.equal(found[n], 0.5 * p) for n, p in module.named_parameters())
    saved(tmp_path / "without", (1, 1, 1), 0)
    with pytest.raises(UsageError, match="no average"):
        export_checkpoint(tmp_path / "without", tmp_path / "b.safetensors", average=True)


def test_models_that_are_gone_and_damaged_files_are_told(tmp_path):
    saved(tmp_path, (1, 2, 1), 0)
    made = export_checkpoint(tmp_path, tmp_path / "a.safetensors", model="gone.py:model")
    assert "cannot be built here" in made.notes[0] and "head.weight" not in made.names
    index = tmp_path / "checkpoint" / "step-00000003" / "index.json"
    document = json.loads(index.read_text())
    lost = next(n for n in document["parts"] if n.startswith("param:") and all(p["axis"] >= 0 for p in document["parts"][n].values()))
    del document["parts"][lost]["rank-001.safetensors"]
    index.write_text(json.dumps(document))
    with pytest.raises(FormatError, match="no file of the checkpoint holds all of"):
        export_checkpoint(tmp_path, tmp_path / "b.safetensors")
    assert not (tmp_path / "b.safetensors").exists()
    (tmp_path / "checkpoint" / "step-00000003" / "rank-000.safetensors").write_bytes(b"")
    with pytest.raises(FormatError, match="digest differs"):
        export_checkpoint(tmp_path, tmp_path / "b.safetensors")


def test_the_command(tmp_path, capsys):
    saved(tmp_path, (1, 1, 1), 0)
    out = tmp_path / "m.safetensors"
    assert main(["train", "export", str(tmp_path), "--to", "safetensors", "-o", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["step"] == 3 and set(document["tensors"]) == set(load_file(out)) and "names no model" in document["notes"][0]
    assert main(["train", "export", str(tmp_path / "nothing"), "--to", "dcp", "-o", str(tmp_path / "x")]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    assert main(["train", "export", str(tmp_path), "--to", "megatron", "--average", "-o", str(out)]) == 2
    assert "applies only to exports of weights" in capsys.readouterr().err
