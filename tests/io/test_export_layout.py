"""Layouts in other systems' words: read back, compared field by field; what cannot be said is named."""

import json
import shlex
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cli import main
from meshwright.errors import Unsupported, UsageError
from meshwright.io.export.exported import TARGETS
from meshwright.io.export.layout import export_layout, layer_split
from meshwright.plan.plan import ParamShard, Plan, Stage, TrainingLayout


def layout_of(counts=(2, 1), data=2, tensor=2, microbatches=4, torn=False, **more):
    """`embed`, blocks `h.0` ..., `norm` and `head`, cut by counts."""
    stages, first = [], 0
    for i, n in enumerate(counts):
        params = [f"h.{b}.{p}" for b in range(first, first + n) for p in ("attn.weight", "mlp.weight")]
        params = (["embed.weight"] if i == 0 else []) + params + (["norm.weight", "head.weight"] if i == len(counts) - 1 else [])
        stages.append(Stage(index=i, segments=(), params=tuple(params)))
        first += n
    if torn:
        stages[1] = msgspec.structs.replace(stages[1], params=(*stages[1].params, "h.0.late.weight"))
    fields = {
        "data": data, "tensor": tensor, "pipeline": len(counts), "microbatch_size": 3, "microbatches": microbatches,
        "global_batch": 3 * microbatches * data, "stages": tuple(stages),
    }  # fmt: skip
    return TrainingLayout(**{**fields, **more})


def plan_of(layout, decisions=None, **job):
    training = {"model": "m.py:f", "loss": "cross-entropy", "optimizer": "adamw", "learning_rate": 0.01, "dtype": "bfloat16", "seed": 7}
    return Plan(
        kind="training", job={"training": {**training, **job}}, target_fabric={}, placement=(), programs={}, cycle=(), decisions=decisions or {},
        layout=layout,
    )  # fmt: skip


def flags(text):
    words = shlex.split(text.replace("\\\n", " "))
    found, name = {}, ""
    for word in words:
        if word.startswith("--"):
            name = word
            found[name] = ""
        else:
            found[name] = word
    return found


def test_unequal_micro_batches_are_not_expressed():
    layout = layout_of(data=2, replica_microbatches=(4, 2))
    for target in ("torchtitan", "megatron", "deepspeed"):
        missing = export_layout(plan_of(layout), target).not_expressed
        assert "unequal numbers of micro-batches (4 + 2): the target gives every replica as many" in missing


# ---- what carries over -------------------------------------------------------------------------------------------------
@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.integers(1, 4), tensor=st.integers(1, 4), microbatches=st.integers(1, 6),
    zero=st.sampled_from([0, 1, 3]),
)  # fmt: skip
def test_degrees_and_batches_survive(counts, data, tensor, microbatches, zero):
    layout = layout_of(tuple(counts), data, tensor, microbatches, zero_level=zero)
    titan = tomllib.loads(export_layout(plan_of(layout), "torchtitan").text)
    p, t = titan["parallelism"], titan["training"]
    assert p["tensor_parallel_degree"] == tensor and p["pipeline_parallel_degree"] == len(counts)
    assert p["data_parallel_replicate_degree"] * p["data_parallel_shard_degree"] == data and (p["data_parallel_shard_degree"] == data or zero == 0)
    steps = t["global_batch_size"] // (t["local_batch_size"] * data)
    assert t["global_batch_size"] == layout.global_batch and steps * t["local_batch_size"] * data == layout.global_batch
    if len(counts) > 1:
        assert t["local_batch_size"] // p["pipeline_parallel_microbatch_size"] == microbatches and steps == 1
        assert [sum(m.startswith("h.") for m in part) for part in p["module_fqns_per_model_part"]] == counts
    else:
        assert steps == microbatches  # accumulation
    megatron = flags(export_layout(plan_of(layout), "megatron").text)
    assert [megatron[f"--{x}-model-parallel-size"] for x in ("tensor", "pipeline")] == [str(tensor), str(len(counts))]
    sizes = [megatron[f"--{x}"] for x in ("micro-batch-size", "global-batch-size", "num-layers")]
    assert sizes == ["3", str(layout.global_batch), str(sum(counts))]
    uneven = megatron.get("--pipeline-model-parallel-layout")
    assert (uneven is None) == (len(set(counts)) == 1) and (uneven is None or [part.count("t") for part in uneven.split("|")] == counts)
    if not (len(counts) > 1 and zero > 1):
        deep = json.loads(export_layout(plan_of(layout), "deepspeed").text)
        batch = deep["train_micro_batch_size_per_gpu"] * deep["gradient_accumulation_steps"] * data
        assert batch == deep["train_batch_size"] == layout.global_batch and deep["zero_optimization"]["stage"] == zero


def test_the_whole_of_one_layout():
    made = export_layout(plan_of(layout_of(), decisions={"collective:gradient": {}}), "torchtitan")
    titan = tomllib.loads(made.text)
    assert titan["parallelism"]["module_fqns_per_model_part"] == [["embed", "h.0", "h.1"], ["h.2", "norm", "head"]]
    assert titan["optimizer"] == {"name": "AdamW", "lr": 0.01} and titan["training"]["seed"] == 7
    assert any("collective:gradient" in x for x in made.not_expressed)
    megatron = flags(export_layout(plan_of(layout_of(sequence=True, expert=2, zero_level=1)), "megatron").text)
    assert megatron["--pipeline-model-parallel-layout"] == "Ett|tL"
    assert {"--sequence-parallel", "--bf16", "--use-distributed-optimizer"} <= megatron.keys()
    assert megatron["--expert-model-parallel-size"] == "2" and megatron["--optimizer"] == "adam"
    fully = flags(export_layout(plan_of(layout_of(zero_level=3)), "megatron").text)
    assert fully["--data-parallel-sharding-strategy"] == "optim_grads_params"
    deep = export_layout(plan_of(layout_of()), "deepspeed")
    assert json.loads(deep.text)["tensor_parallel"] == {"autotp_size": 2} and json.loads(deep.text)["bf16"] == {"enabled": True}
    assert any("PipelineModule(num_stages=2, topology=PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2))" in x for x in deep.to_add)
    assert any("stages of 2, 1 blocks" in x for x in deep.not_expressed) and any("seed 7" in x for x in deep.not_expressed)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("layout", "job", "part"),
    [
        (layout_of(torn=True), {}, "stage borders inside h.0"),
        (layout_of(shards=(ParamShard(param="h.0.mlp.weight", axis=0),)), {}, "the split of 1 single parameters"),
        (layout_of(), {"loss": "m.py:loss"}, "the loss m.py:loss"),
        (layout_of(), {"optimizer": "m.py:opt"}, "the optimizer m.py:opt"),
        (layout_of(schedule="zb"), {}, "schedule 'zb'"),
    ],
)  # fmt: skip
def test_what_nobody_can_say(target, layout, job, part):
    assert any(part in x for x in export_layout(plan_of(layout, **job), target).not_expressed)


@pytest.mark.parametrize(
    ("target", "layout", "job", "part"),
    [
        ("torchtitan", layout_of(zero_level=2), {}, "sharding level 2"),
        ("torchtitan", layout_of(), {}, "without sequence parallelism"),
        ("torchtitan", layout_of(), {"optimizer": "sgd"}, "the optimizer sgd"),
        ("torchtitan", layout_of(torn=True), {}, "which modules form a stage"),
        ("megatron", layout_of(schedule="gpipe"), {}, "schedule gpipe"),
        ("deepspeed", layout_of(context=2), {}, "context parallelism of degree 2"),
        ("deepspeed", layout_of(expert=4), {}, "expert parallelism of degree 4"),
        ("deepspeed", layout_of(sequence=True), {}, "sequence parallelism"),
    ],
)  # fmt: skip
def test_what_one_target_cannot_say(target, layout, job, part):
    assert any(part in x for x in export_layout(plan_of(layout, **job), target).not_expressed)


def test_models_without_numbered_blocks():
    bare = layout_of((1,), stages=(Stage(index=0, segments=(), params=("weight", "a.bias")),))
    split = layer_split(bare)
    assert (split.prefix, split.counts, split.others) == ("", (0,), (("weight", "a"),))
    assert any("no numbered blocks" in x for x in export_layout(plan_of(bare), "megatron").not_expressed)


# ---- refusals and the command ------------------------------------------------------------------------------------------
def test_refusals():
    with pytest.raises(Unsupported, match="no pipeline with sharding level 3"):
        export_layout(plan_of(layout_of(zero_level=3)), "deepspeed")
    with pytest.raises(UsageError, match="cannot export to 'nanotron'"):
        export_layout(plan_of(layout_of()), "nanotron")
    with pytest.raises(UsageError, match="only training plans"):
        export_layout(plan_of(None), "megatron")


def test_command(tmp_path, capsys, monkeypatch):
    from meshwright.drive import plans as drive

    monkeypatch.setattr(drive, "read_plan", lambda path: plan_of(layout_of()))
    out = tmp_path / "layout.toml"
    assert main(["train", "export", "plan.json", "--to", "torchtitan", "-o", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "meshwright.train-export" and document["not_expressed"] and tomllib.loads(out.read_text())["training"]
    assert main(["train", "export", "plan.json", "--to", "megatron", "-o", str(out)]) == 0 and "to add: " in capsys.readouterr().out
    assert main(["train", "export", "plan.json", "--to", "deepspeed", "-o", str(tmp_path / "x"), "--strict"]) == 2
    assert "deepspeed cannot express 2 pipeline stages" in capsys.readouterr().err and not (tmp_path / "x").exists()


@pytest.mark.parametrize("target", TARGETS)
def test_command_on_a_recorded_plan(tmp_path, capsys, target):
    saved = Path(__file__).parent.parent / "data/plan-v1.json"
    assert main(["train", "export", str(saved), "--to", target, "-o", str(tmp_path / "x"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["to"] == target and (tmp_path / "x").stat().st_size > 100


def test_command_on_a_plan_file_that_is_none(tmp_path, capsys):
    assert main(["train", "export", str(tmp_path / "none.json"), "--to", "megatron", "-o", str(tmp_path / "x")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_what_a_recipe_asks_is_named():
    made = plan_of(layout_of(), optimizer="AdamW:weight_decay=0.1", recipe={"clip_norm": 1.0})
    for target in TARGETS:
        missing = export_layout(made, target).not_expressed
        assert "the optimizer's weight_decay=0.1" in missing and "the recipe's clip_norm, 1.0" in missing
        assert not [m for m in missing if m.startswith("the optimizer AdamW")]
