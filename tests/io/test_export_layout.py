"""Layouts in other systems' words: read back, compared field by field; what cannot be said is named."""

import json
import os
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cli import main
from meshwright.errors import Unsupported, UsageError
from meshwright.io.export.layout import EXPORTERS, TARGETS, export_layout, layer_split
from meshwright.io.fabric.document import fabric_document
from meshwright.io.fabric.name import load_fabric
from meshwright.plan.copies import ExpertCopies
from meshwright.plan.plan import ContextExchange, ParamShard, Plan, Stage, TrainingLayout
from ports import free_port

LAYOUTS = tuple(e.name for e in EXPORTERS if not e.launches)
LAUNCHERS = tuple(e.name for e in EXPORTERS if e.launches)


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
    for target in (t for t in LAYOUTS if t != "torch"):
        missing = export_layout(plan_of(layout), target).not_expressed
        assert "unequal numbers of micro-batches (4 + 2): the target gives every replica as many" in missing


# ---- what carries over -------------------------------------------------------------------------------------------------
@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.integers(1, 4), tensor=st.integers(1, 4), microbatches=st.integers(1, 6),
    zero=st.sampled_from([0, 1, 3]),
)  # fmt: skip
def test_degrees_and_batches_survive(counts, data, tensor, microbatches, zero):
    layout = layout_of(tuple(counts), data, tensor, microbatches, zero_level=zero)
    titan = tomllib.loads(export_layout(plan_of(layout), "torchtitan-toml").text)
    p, t = titan["parallelism"], titan["training"]
    assert p["tensor_parallel_degree"] == tensor and p["pipeline_parallel_degree"] == len(counts)
    assert p["data_parallel_replicate_degree"] * p["data_parallel_shard_degree"] == data and (p["data_parallel_shard_degree"] == data or zero == 0)
    steps = t["global_batch_size"] // (t["local_batch_size"] * data)
    assert t["global_batch_size"] == layout.global_batch and steps * t["local_batch_size"] * data == layout.global_batch
    if len(counts) > 1:
        assert t["local_batch_size"] // p["pipeline_parallel_microbatch_size"] == microbatches and steps == 1
        assert [sum(m.startswith("layers.") for m in part) for part in p["module_fqns_per_model_part"]] == counts
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
    made = export_layout(plan_of(layout_of(), decisions={"collective:gradient": {}}), "torchtitan-toml")
    titan = tomllib.loads(made.text)
    assert titan["parallelism"]["module_fqns_per_model_part"] == [["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "norm", "output"]]
    assert titan["optimizer"]["name"] == "AdamW" and titan["optimizer"]["lr"] == 0.01 and titan["debug"]["seed"] == 7
    assert any("collective:gradient" in x for x in made.not_expressed)
    megatron = flags(export_layout(plan_of(layout_of(sequence=True, expert=2, zero_level=1)), "megatron").text)
    assert megatron["--pipeline-model-parallel-layout"] == "Ett|tL"
    assert {"--sequence-parallel", "--bf16", "--use-distributed-optimizer"} <= megatron.keys()
    assert megatron["--expert-model-parallel-size"] == "2" and megatron["--optimizer"] == "adam"
    fully = flags(export_layout(plan_of(layout_of(zero_level=3)), "megatron").text)
    assert fully["--data-parallel-sharding-strategy"] == "optim_grads_params"
    deep = export_layout(plan_of(layout_of()), "deepspeed")
    assert json.loads(deep.text)["tensor_parallel"] == {"autotp_size": 2} and json.loads(deep.text)["bf16"] == {"enabled": True}  # weights
    assert any("PipelineModule(num_stages=2, topology=PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2))" in x for x in deep.to_add)
    assert any("stages of 2, 1 blocks" in x for x in deep.not_expressed) and any("seed 7" in x for x in deep.not_expressed)


@pytest.mark.parametrize("target", [t for t in LAYOUTS if t != "torch"])  # which refuses stages together with split layers
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
    with pytest.raises(Unsupported, match="layers cannot be split further"):
        export_layout(plan_of(layout_of()), "torch")
    with pytest.raises(Unsupported, match="do not begin with a block"):
        export_layout(plan_of(layout_of(tensor=1, torn=True)), "torch")
    with pytest.raises(UsageError, match="only training plans"):
        export_layout(plan_of(None), "megatron")


def test_command(tmp_path, capsys, monkeypatch):
    from meshwright.drive import plans as drive

    monkeypatch.setattr(drive, "read_plan", lambda path: plan_of(layout_of()))
    out = tmp_path / "layout.toml"
    assert main(["train", "export", "plan.json", "--to", "torchtitan-toml", "-o", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "meshwright.train-export" and document["not_expressed"] and tomllib.loads(out.read_text())["training"]
    assert main(["train", "export", "plan.json", "--to", "megatron", "-o", str(out)]) == 0 and "to add: " in capsys.readouterr().out
    assert main(["train", "export", "plan.json", "--to", "deepspeed", "-o", str(tmp_path / "x"), "--strict"]) == 2
    assert "deepspeed cannot express 2 pipeline stages" in capsys.readouterr().err and not (tmp_path / "x").exists()


@pytest.mark.parametrize("target", [t for t in TARGETS if t != "torch"])
def test_command_on_a_recorded_plan(tmp_path, capsys, target):
    saved = Path(__file__).parent.parent / "data/plan-v1.json"
    assert main(["train", "export", str(saved), "--to", target, "-o", str(tmp_path / "x"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["to"] == target and (tmp_path / "x").stat().st_size > 50


def test_command_on_a_plan_file_that_is_none(tmp_path, capsys):
    assert main(["train", "export", str(tmp_path / "none.json"), "--to", "megatron", "-o", str(tmp_path / "x")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_what_a_recipe_asks_is_named():
    made = plan_of(layout_of(), optimizer="AdamW:amsgrad=true", recipe={"ema": 0.99})
    for target in (t for t in LAYOUTS if t != "torch"):
        missing = export_layout(made, target).not_expressed
        assert "the optimizer's amsgrad=True" in missing and "the recipe's ema, 0.99" in missing
        assert not [m for m in missing if m.startswith("the optimizer AdamW")]


@pytest.mark.parametrize(("recipe", "clip", "kind"), [({}, 0.0, "float32"), ({"clip_norm": 0.5, "precision": "bf16-autocast"}, 0.5, "bfloat16")])
def test_what_a_tool_would_assume_is_said(recipe, clip, kind):
    """torchtitan, Megatron and DeepSpeed clip at 1 unasked, torchtitan computes in bfloat16, and each has its own numbers for AdamW."""
    made = plan_of(layout_of((3,), 2, 1, zero_level=3), dtype="float32", optimizer="adamw:betas=0.9,0.99", recipe=recipe)
    said = {t: export_layout(made, t) for t in LAYOUTS}
    assert not [m for e in said.values() for m in e.not_expressed if "recipe" in m or "betas" in m]
    titan, config = tomllib.loads(said["torchtitan-toml"].text), _torchtitan_config(said["torchtitan"].text)
    assert (titan["training"]["max_norm"], titan["training"]["mixed_precision_param"]) == (clip or float("inf"), kind)
    assert (config.training.max_norm, config.training.mixed_precision_param, config.training.dtype) == (clip or float("inf"), kind, "float32")
    assert titan["optimizer"] == {"name": "AdamW", "lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.01}
    assert config.optimizer == ("adamw", 0.01, {"weight_decay": 0.01, "betas": (0.9, 0.99), "eps": 1e-8})
    megatron = flags(said["megatron"].text)
    assert (float(megatron["--clip-grad"]), "--bf16" in megatron, megatron["--adam-beta2"]) == (clip, kind == "bfloat16", "0.99")
    deep = json.loads(said["deepspeed"].text)
    assert deep["gradient_clipping"] == clip and deep.get("torch_autocast", {}).get("dtype", "float32") == kind and "bf16" not in deep
    assert deep["optimizer"]["params"] == {"lr": 0.01, "weight_decay": 0.01, "betas": [0.9, 0.99], "eps": 1e-8}
    assert f"clip_grad={clip}" in said["nemo"].text and ("bf16-mixed" in said["nemo"].text) == bool(recipe)
    script = said["torch"].text
    assert f"AUTOCAST = {'torch.bfloat16' if recipe else 'None'}\n" in script and ("clip_grad_norm_" in script) == bool(recipe)


def test_divided_sequences_experts_and_further_shapes_are_told_or_refused():
    for name, layout in (("context", layout_of((3,), 2, 1, context=2)), ("expert", layout_of((3,), 2, 1, expert=2))):
        with pytest.raises(Unsupported, match=f"{name} parallelism"):
            export_layout(plan_of(layout), "torch")
    with pytest.raises(Unsupported, match="no divided sequences"):
        export_layout(plan_of(layout_of(context=2)), "deepspeed")
    heads = plan_of(layout_of(context=2), decisions={"context": {"strategy": "ulysses"}})
    assert flags(export_layout(heads, "megatron").text)["--cp-comm-type"] == "a2a"
    assert any("exchange of heads" in m for m in export_layout(heads, "torchtitan").not_expressed)
    experts, of_models = plan_of(layout_of(expert=2)), ("torchtitan", "torchtitan-toml", "megatron", "nemo")
    assert all(any("experts have" in m for m in export_layout(experts, t).not_expressed) for t in of_models)
    copies = ExpertCopies(members=2, experts=2, copies=((0, 1),), rows=((0, ((0, 1), (1, 1))),), busiest_rows=1, before_rows=2, bound_rows=1)
    exchange = ContextExchange(kind="copies", source="m/given", target="m/copies", copies=copies)
    copied = plan_of(msgspec.structs.replace(layout_of(expert=2), exchanges=(exchange,)))
    assert all(any("copies of hot experts in 1 layers" in m for m in export_layout(copied, t).not_expressed) for t in of_models)
    shards = (ParamShard(param="h.0.mlp.weight", axis=0),)
    folded = plan_of(layout_of(expert=2, shards=shards, expert_shards=shards))  # and two tensor ranks
    wanted = {"--expert-model-parallel-size": "4", "--expert-tensor-parallel-size": "1"}
    assert flags(export_layout(folded, "megatron").text).items() >= wanted.items()
    assert "expert_tensor_parallel_size=1" in export_layout(folded, "nemo").text
    assert "expert_parallel_degree = 4" in export_layout(folded, "torchtitan-toml").text
    shaped = replace(plan_of(layout_of((3,), 2, 1)), shapes=(object(),))
    assert all(any("1 other shape of" in m for m in export_layout(shaped, t).not_expressed) for t in LAYOUTS)
    half = plan_of(layout_of((3,)), dtype="float32", recipe={"precision": "fp16-autocast"})
    assert any("float16" in m for m in export_layout(half, "torchtitan").not_expressed)
    stages = plan_of(layout_of((2, 1), tensor=1), dtype="float32", recipe={"precision": "bf16-autocast", "clip_norm": 1.0})
    told = export_layout(stages, "torch").not_expressed
    assert any("within stages" in m for m in told) and any("clipping by the norm" in m for m in told)


def test_a_model_of_ones_own_does_not_carry_over_to_tools_with_models_of_theirs():
    for exporter in EXPORTERS:
        if exporter.name == "torch":
            continue
        missing = export_layout(plan_of(layout_of()), exporter.name).not_expressed
        said = [x for x in missing if x.startswith("the model m.py:f with modules embed, norm, head")]
        assert bool(said) == exporter.own_models, exporter.name
    assert all(e.version for e in EXPORTERS) and len(set(TARGETS)) == len(TARGETS)


# ---- torchtitan in Python ------------------------------------------------------------------------------------------------
# Fields of ParallelismConfig and TrainingConfig, pytorch/torchtitan b5bcd76, torchtitan/config/configs.py (names only)
PARALLELISM = {
    "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward", "enable_fsdp_symm_mem", "tensor_parallel_degree",
    "enable_sequence_parallel", "spmd_backend", "pipeline_parallel_degree", "module_fqns_per_model_part", "pipeline_parallel_first_stage_less_layers",
    "pipeline_parallel_last_stage_less_layers", "pipeline_parallel_layers_per_stage", "pipeline_parallel_schedule", "pipeline_parallel_schedule_csv",
    "num_pp_microbatches", "context_parallel_degree", "context_parallel_load_balancer", "context_parallel_ptrr_mask_key", "expert_parallel_degree",
}  # fmt: skip
# Sections and keys of JobConfig, pytorch/torchtitan v0.2.2, torchtitan/config/job_config.py, of those that an export may use
TOML_KEYS = {
    "training": {"local_batch_size", "global_batch_size", "dtype", "mixed_precision_param", "max_norm"},
    "optimizer": {"name", "lr", "beta1", "beta2", "eps", "weight_decay"}, "debug": {"seed"}, "activation_checkpoint": {"mode"},
    "parallelism": PARALLELISM - {"num_pp_microbatches", "enable_sequence_parallel", "spmd_backend", "enable_fsdp_symm_mem"}
    | {"pipeline_parallel_microbatch_size"},
}  # fmt: skip


class _Recorder:
    """Stands for a module of torchtitan's: whatever is called is kept with its arguments."""

    def __init__(self, **given):
        self.__dict__.update(given)


def _torchtitan_config(text):
    """What `planned` makes of a base configuration with samples of 512 tokens."""
    base = _Recorder(training=_Recorder(max_context_length=512), debug=_Recorder(), parallelism=None)
    names = {"ParallelismConfig": lambda **k: k, "default_adamw": lambda lr, **more: ("adamw", lr, more), "base": lambda: base,
             "FullAC": _Recorder(Config=lambda: "full"), "Trainer": _Recorder(Config=object)}  # fmt: skip
    code = "\n".join(line for line in text.splitlines() if not line.startswith("from torchtitan"))
    exec(compile(code, "planned.py", "exec"), names)  # our own text
    return names["planned"]()


@given(counts=st.lists(st.integers(1, 3), min_size=1, max_size=3), data=st.integers(1, 3), microbatches=st.integers(1, 4),
       zero=st.sampled_from([0, 1, 3]))
def test_torchtitans_python_configuration_says_the_plan(counts, data, microbatches, zero):
    layout = layout_of(tuple(counts), data, 2, microbatches, zero_level=zero)
    config = _torchtitan_config(export_layout(plan_of(layout), "torchtitan").text)
    degrees, training = config.parallelism, config.training
    assert set(degrees) <= PARALLELISM
    assert degrees["tensor_parallel_degree"] == 2 and degrees["pipeline_parallel_degree"] == len(counts)
    assert degrees["data_parallel_replicate_degree"] * degrees["data_parallel_shard_degree"] == data
    per_step = training.num_tokens_per_microbatch_per_dp_rank * data * microbatches
    assert training.num_tokens_per_train_step == per_step == layout.global_batch * 512
    assert degrees.get("num_pp_microbatches", microbatches) == microbatches and config.debug.seed == 7 and config.optimizer[:2] == ("adamw", 0.01)
    if len(counts) > 1:
        assert [sum(m.startswith("layers.") for m in part) for part in degrees["module_fqns_per_model_part"]] == counts


def test_the_toml_has_only_keys_that_022_reads():
    for layout in (layout_of(), layout_of((3,), zero_level=3), layout_of((1, 1, 1), zero_level=1)):
        for section, fields in tomllib.loads(export_layout(plan_of(layout), "torchtitan-toml").text).items():
            assert set(fields) <= TOML_KEYS[section]


# ---- files that start a job ----------------------------------------------------------------------------------------------
def cluster_plan(spec="p5.48xlarge:2"):
    fabric = load_fabric(spec)
    layout = layout_of((2, 1), data=len(fabric.devices) // 4, tensor=2)
    return replace(plan_of(layout), target_fabric=fabric_document(fabric), placement=tuple(d.name for d in fabric.devices))


@pytest.mark.parametrize("target", [*LAUNCHERS, "nemo"])
def test_launchers_start_as_many_processes_as_the_plan_has(target):
    text = export_layout(cluster_plan(), target).text
    if target == "nccl":
        assert "NCCL_TUNER_CONFIG_FILE=tuner.csv" in text and all("=" in x or x.startswith("#") for x in text.splitlines())
        assert "NCCL_CROSS_NIC=0" in export_layout(cluster_plan("dgx-h100:2?net=rails"), "nccl").text and "CROSS_NIC=0" not in text
        return
    if target == "nemo":
        assert "devices=8, num_nodes=2" in text and compile(text, "nemo.py", "exec")
        return
    assert "--nnodes=2 --nproc-per-node=8" in text
    if target == "slurm":
        assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-node=8"} <= set(text.splitlines())
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    elif target == "skypilot":
        assert "num_nodes: 2\n" in text and "  accelerators: H100:8\n" in text
    else:
        assert "parallelism: 2\n" in text and "nvidia.com/gpu: 8" in text and 'instance-type: "p5.48xlarge"' in text
        assert ("suspend: true" in text) == ("queue-name" in text) == (target == "kueue")


def test_the_batch_script_starts_torchrun_with_the_nodes_number(tmp_path):
    """The script is run with programs of Slurm's names that answer as Slurm does, node by node."""
    for name, body in {
        "scontrol": "for i in $(seq 20000); do echo a$i; done", "torchrun": 'echo "$@"',  # more names than a pipe holds
        "srun": 'for i in 0 1; do shift $((i==0)); SLURM_NODEID=$i "${@}"; done',
    }.items():  # fmt: skip
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "a[1-2]"}
    text = export_layout(cluster_plan(), "slurm").text
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, env=env, check=True)
    assert [line.split()[:4] for line in done.stdout.splitlines()] == [
        ["--nnodes=2", "--nproc-per-node=8", f"--node-rank={i}", "--master-addr=a1"] for i in range(2)
    ]


SKY = os.environ.get("MESHWRIGHT_SKYPILOT", "")
READ_TASK = """
import json, sys, sky
task = sky.Task.from_yaml(sys.argv[1])
found = [r.accelerators for r in task.resources]
print(json.dumps({"name": task.name, "nodes": task.num_nodes, "accelerators": found, "run": task.run, "version": sky.__version__}))
"""


@pytest.mark.skipif(not SKY, reason="no SkyPilot here (MESHWRIGHT_SKYPILOT names a Python that has it)")
def test_skypilot_reads_the_task_as_it_was_meant(tmp_path):
    (tmp_path / "task.yaml").write_text(export_layout(cluster_plan(), "skypilot").text)
    done = subprocess.run([SKY, "-c", READ_TASK, "task.yaml"], capture_output=True, text=True, check=False, cwd=tmp_path, env={"HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-2000:]
    task = json.loads(done.stdout.splitlines()[-1])
    assert (task["nodes"], task["accelerators"]) == (2, [{"H100": 8}]) and "--nnodes=2 --nproc-per-node=8" in task["run"]


def test_what_launchers_have_no_words_for():
    plan = cluster_plan()
    mixed = replace(plan, placement=(*plan.placement[:8], *plan.placement[8:12]))
    for target in ("slurm", "jobset", "kueue", "skypilot"):
        assert any("unlike numbers of processes (8, 4)" in x for x in export_layout(mixed, target).not_expressed)
        there_and_back = replace(plan, placement=(plan.placement[8], *plan.placement[:8], *plan.placement[9:]))
        assert any("ranks that change between servers" in x for x in export_layout(there_and_back, target).not_expressed)
        bare = replace(plan, target_fabric={**plan.target_fabric, "name": "mine"})
        assert any("is no preset with" in x for x in export_layout(bare, target).not_expressed)
    assert any("say nothing of a job" in x for x in export_layout(plan, "nccl").not_expressed)


# ---- plain PyTorch -------------------------------------------------------------------------------------------------------
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("counts", "data", "tensor", "zero"),
    [((3,), 1, 2, 0), ((3,), 2, 1, 0), ((3,), 2, 1, 3), ((2, 1), 1, 1, 0)], ids=["tensor", "ddp", "fsdp", "stages"],
)  # fmt: skip
def test_the_torch_script_trains_like_one_process(counts, data, tensor, zero, tmp_path):
    """Losses of the first replica's last micro-batch equal those of the owner's loop on one process, as every replica has the same sample."""
    (tmp_path / "m.py").write_text(MODEL)
    shards = tuple(ParamShard(param=f"h.{b}.{p}", axis=a) for b in range(3) for p, a in (("up.weight", 0), ("down.weight", 1))) if tensor > 1 else ()
    params = [f"h.{b}.{p}.weight" for b in range(3) for p in ("up", "down")]
    stages = layout_of(counts).stages if len(counts) > 1 else (Stage(index=0, segments=(), params=("embed.weight", *params, "head.weight")),)
    layout = layout_of(counts, data, tensor, microbatches=2, zero_level=zero, shards=shards, stages=stages)
    made = export_layout(plan_of(layout, dtype="float32", optimizer="sgd", learning_rate=0.5), "torch")
    (tmp_path / "script.py").write_text(made.text)
    env = {**os.environ, "STEPS": "3", "OMP_NUM_THREADS": "1"}
    ranks = str(layout.ranks)
    port = str(free_port())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks, "--master-port", port, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("step")]
    alone = subprocess.run([sys.executable, "-c", ALONE], cwd=tmp_path, capture_output=True, text=True, env=env, timeout=120, check=True)
    assert losses == pytest.approx([float(x) for x in alone.stdout.split()], rel=1e-4) and losses[0] > losses[-1]


MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.h, self.head = nn.Embedding(11, 8), nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 11)
    def forward(self, x):
        x = self.embed(x)
        for block in self.h:
            x = block(x)
        return self.head(x)

def f():
    tokens = torch.arange(12).reshape(3, 4) % 11
    return Net(), (tokens, (tokens + 1) % 11)
"""
ALONE = """
import torch, torch.nn.functional as F
from m import f
torch.manual_seed(7)
net, (x, y) = f()
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
for _ in range(3):
    loss = F.cross_entropy(net(x).flatten(0, -2), y.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""
