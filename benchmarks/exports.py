"""Every export of `train export`, read again by the tool that it is for: `python benchmarks/exports.py [--TOOL PLACE ...]`.

Seven plans: replicas, level 3 with autocast and clipping, stages, split layers, divided sequences, divided experts, 16 GPUs of two rented machines.
A tool whose place is not given is not tried, which the output says.

    --deepspeed PYTHON        an interpreter with DeepSpeed: `DeepSpeedConfig` reads the JSON
    --torchtitan FOLDER       a checkout at b5bcd76: the module sets fields of its configuration classes
    --torchtitan-toml FOLDER  a checkout of v0.2.2: its `ConfigManager` reads the file
    --reader PYTHON           the interpreter for both (default: this one)
    --megatron FOLDER         a checkout: every argument is one of its parser's
    --nemo FOLDER             sources of NeMo 2.7.3 and of megatron-core: every parameter is one of theirs
    --skypilot PYTHON         an interpreter with SkyPilot: `Task.from_yaml`
    --jobset FILE             the JobSet's CRD (YAML): the object fits its schema; needs PyYAML and jsonschema in --reader
    --nccl FOLDER             a checkout: variables are read by its source, the tuner file by its example plugin, compiled here
torch's script runs on two processes; Slurm's is read by bash, and its options by `sbatch --help` where there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import record

from meshwright.cli import main as meshwright
from meshwright.drive.plans import read_plan
from meshwright.io.export.layout import TARGETS
from meshwright.io.export.shared import subject_of

ROOT = Path(__file__).parents[1]
SMALL = "--model examples/gpt.py:tiny --fabric laptop:2 --global-batch 8"
PLANS = {
    "replicas": f"{SMALL} --dp 2 --tp 1 --pp 1 --zero 0",
    "level 3, autocast, clipping": f"{SMALL} --dp 2 --tp 1 --pp 1 --zero 3 --precision bf16-autocast --clip-norm 0.5",
    "stages": f"{SMALL} --dp 1 --tp 1 --pp 2",
    "split layers": f"{SMALL} --dp 1 --tp 2 --pp 1",
    "divided sequences": "--model examples/llama.py:tiny --fabric laptop:2 --global-batch 4 --context 2 --dp 1 --tp 1 --pp 1",
    "divided experts": "--model examples/experts.py:tiny --fabric laptop:2 --global-batch 8 --ep 2 --dp 2 --tp 1 --pp 1",
    "two rented machines": "--model examples/gpt.py:tiny --fabric p5.48xlarge:2 --global-batch 32 --dp 16 --tp 1 --pp 1 --zero 0",
}
DEEPSPEED = """
import json, sys
from deepspeed.runtime import config
from deepspeed.runtime.config import DeepSpeedConfig
config.dist.get_rank = lambda *a: 0  # there are no processes here
class Mpu:
    def get_data_parallel_world_size(self): return int(sys.argv[2])
c = DeepSpeedConfig(sys.argv[1], mpu=Mpu())
print(json.dumps({"batch": c.train_batch_size, "micro": c.train_micro_batch_size_per_gpu, "accumulation": c.gradient_accumulation_steps,
    "zero": c.zero_config.stage, "clip": c.gradient_clipping, "autocast": str(c.torch_autocast_dtype) if c.torch_autocast_enabled else "no"}))
"""
TITAN = """
import importlib.util, json, sys
import types
from torchtitan.config import ParallelismConfig, TrainingConfig, DebugConfig
# Its models and its trainer read data by packages of their own: a configuration of the real classes stands for theirs.
def base(): return types.SimpleNamespace(training=TrainingConfig(), parallelism=ParallelismConfig(), debug=DebugConfig(), optimizer=None)
for name, fields in (("models.llama3.config_registry", {"llama3_debugmodel": base}), ("trainer", {"Trainer": types.SimpleNamespace(Config=object)})):
    made = types.ModuleType("torchtitan." + name); made.__dict__.update(fields); sys.modules["torchtitan." + name] = made
spec = importlib.util.spec_from_file_location("planned", sys.argv[1]); m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m)
c = m.planned(); p, t = c.parallelism, c.training
print(json.dumps({"tensor": p.tensor_parallel_degree, "pipeline": p.pipeline_parallel_degree, "context": p.context_parallel_degree,
    "expert": p.expert_parallel_degree, "data": p.data_parallel_replicate_degree * p.data_parallel_shard_degree, "clip": t.max_norm,
    "autocast": t.mixed_precision_param, "samples": t.num_tokens_per_train_step // t.max_context_length}))
"""
TITAN_TOML = """
import json, sys
from torchtitan.config import ConfigManager
c = ConfigManager().parse_args(["--job.config_file", sys.argv[1]]); p, t = c.parallelism, c.training
print(json.dumps({"tensor": p.tensor_parallel_degree, "pipeline": p.pipeline_parallel_degree, "context": p.context_parallel_degree,
    "expert": p.expert_parallel_degree, "data": p.data_parallel_replicate_degree * p.data_parallel_shard_degree, "clip": t.max_norm,
    "autocast": t.mixed_precision_param, "samples": t.global_batch_size}))
"""
SKY = """
import json, sys, sky
task = sky.Task.from_yaml(sys.argv[1])
print(json.dumps({"nodes": task.num_nodes, "gpus": [list(r.accelerators.values())[0] for r in task.resources if r.accelerators]}))
"""
JOBSET = """
import json, sys, yaml, jsonschema
crd = yaml.safe_load(open(sys.argv[2])); schema = crd["spec"]["versions"][-1]["schema"]["openAPIV3Schema"]
def closed(s):
    if isinstance(s, dict):
        open_ended = s.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in s
        if "properties" in s and not open_ended: s["additionalProperties"] = False
        s.pop("format", None); [closed(v) for v in s.values()]
    elif isinstance(s, list): [closed(v) for v in s]
closed(schema["properties"]["spec"])
for document in yaml.safe_load_all(open(sys.argv[1])):
    jsonschema.validate(document, schema)
    job = document["spec"]["replicatedJobs"][0]["template"]["spec"]
print(json.dumps({"nodes": job["parallelism"]}))
"""
TUNER = """
#include <stdio.h>
#include "plugin.c"
int main(int argc, char** argv) {
  void* context; if (pluginInit(&context, 0, atoi(argv[1]), atoi(argv[2]), NULL, NULL, NULL) != ncclSuccess) return 1;
  for (size_t size = 1024; size <= (size_t)1 << 30; size *= 2) {
    float table[NCCL_NUM_ALGORITHMS][NCCL_NUM_PROTOCOLS]; int channels;
    for (int a = 0; a < NCCL_NUM_ALGORITHMS; a++) for (int p = 0; p < NCCL_NUM_PROTOCOLS; p++) table[a][p] = 1e9f;
    pluginGetCollInfo(context, ncclFuncAllReduce, size, 1, (float**)table, NCCL_NUM_ALGORITHMS, NCCL_NUM_PROTOCOLS, 0, &channels);
    for (int a = 0; a < NCCL_NUM_ALGORITHMS; a++) for (int p = 0; p < NCCL_NUM_PROTOCOLS; p++)
      if (table[a][p] < 1e8f) printf("%zu %s %s\\n", size, algorithmToString(a), protocolToString(p));
  }
  return 0;
}
"""


def said(*words: str) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = meshwright(list(words))
    return code, out.getvalue()


def read_by(python: str, code: str, *words: str, **environment: str) -> dict[str, Any]:
    """What the tool says of a file. Raises: RuntimeError with its last line."""
    done = subprocess.run([python, "-c", code, *words], capture_output=True, text=True, env={**os.environ, **environment}, check=False, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1][:300] if done.stderr.strip() else f"exit code {done.returncode}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def wanted(plan: Any) -> dict[str, Any]:
    """What every tool with a layout must have understood."""
    layout, recipe = plan.layout, dict(plan.job["training"].get("recipe", {}))
    narrow = "bfloat16" if recipe.get("precision") == "bf16-autocast" else "float32"
    return {
        "tensor": layout.tensor, "pipeline": layout.pipeline, "context": layout.context, "expert": layout.expert,
        "data": layout.data // layout.context, "clip": recipe.get("clip_norm", 0.0), "autocast": narrow, "samples": layout.global_batch,
    }  # fmt: skip


def differences(found: dict[str, Any], want: dict[str, Any]) -> list[str]:
    same = {"clip": lambda x: 0.0 if x in (0, float("inf")) else x, "autocast": lambda x: "float32" if x == "no" else str(x).removeprefix("torch.")}
    return [f"{k}: {v}, planned {want[k]}" for k, v in found.items() if k in want and same.get(k, lambda x: x)(v) != want[k]]


def of_deepspeed(args: argparse.Namespace, file: Path, plan: Any) -> list[str]:
    layout, want = plan.layout, wanted(plan)
    found = read_by(args.deepspeed, DEEPSPEED, str(file), str(layout.data))
    want |= {"batch": layout.global_batch, "micro": layout.microbatch_size, "accumulation": layout.microbatches, "zero": layout.zero_level}
    return differences(found, want)


def of_megatron(args: argparse.Namespace, file: Path, plan: Any) -> list[str]:
    """An argument is written out in the parser's source, or is a field of a class from which arguments are made."""
    sources = [p.read_text(encoding="utf-8") for folder in ("megatron/training", "megatron/core") for p in Path(args.megatron, folder).rglob("*.py")]
    known = {m for text in sources for m in re.findall(r"[\"'](--[a-z0-9-]+)[\"']", text)}
    fields = {m for text in sources for m in re.findall(r"^    ([a-z_0-9]+): [A-Z\[\]a-z, |._]+ =", text, re.MULTILINE)}
    words = [w for w in shlex.split(file.read_text().replace("\\\n", " ")) if w.startswith("--")]
    return [f"{w} is no argument" for w in words if w not in known and w[2:].replace("-", "_") not in fields]


def of_nemo(args: argparse.Namespace, file: Path, plan: Any) -> list[str]:
    sources = [p.read_text(encoding="utf-8") for p in Path(args.nemo).rglob("*.py")]
    known = {m for text in sources for m in re.findall(r"^ {4,8}([a-z_0-9]+):? [^\n]*[=,]", text, re.MULTILINE)}
    known |= {m for text in sources for m in re.findall(r"^ +([a-z_0-9]+)(?::[^=\n]+)?=", text, re.MULTILINE)}
    text = file.read_text()
    compile(text, "nemo.py", "exec")
    used = set(re.findall(r"[( ]([a-z_0-9]+)=", text.partition("data_settings")[0]))
    return [f"{w} is no parameter" for w in sorted(used - known - {"devices", "num_nodes", "accelerator", "strategy", "plugins", "config"})]


def of_torch(args: argparse.Namespace, file: Path, plan: Any) -> list[str]:
    """It trains: two processes, three steps, the loss falls."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(plan.layout.ranks), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "STEPS": "3", "OMP_NUM_THREADS": "1"}, timeout=300, check=False)
    losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("step")]
    return [] if done.returncode == 0 and len(losses) == 3 and losses[-1] < losses[0] else [done.stderr.strip().splitlines()[-1][:200]]


def of_slurm(args: argparse.Namespace, file: Path, plan: Any) -> list[str]:
    text = file.read_text()
    found = [] if subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0 else ["bash does not read it"]
    if sbatch := shutil.which("sbatch"):
        known = subprocess.run([sbatch, "--help"], capture_output=True, text=True, check=False).stdout
        found += [f"{w} is no option" for w in re.findall(r"^#SBATCH (--[a-z-]+)", text, re.MULTILINE) if w not in known]
    return found


def of_jobset(args: argparse.Namespace, file: Path, plan: Any) -> list[str]:
    return differences(read_by(args.reader, JOBSET, str(file), args.jobset), {"nodes": servers(plan)})


def servers(plan: Any) -> int:
    return len(subject_of(plan).nodes)


def of_nccl(args: argparse.Namespace, file: Path, plan: Any) -> list[str]:
    """Every variable is one that NCCL's source asks for, or that it documents for plugins."""
    sources = [p.read_text(errors="replace") for p in Path(args.nccl).rglob("*.c*")]
    known = {m for text in sources for m in re.findall(r"NCCL_PARAM\([^\"\n]*\"([A-Z_]+)\"", text)}
    known |= {m for text in sources for m in re.findall(r"\"NCCL_([A-Z_]+)\"", text)}
    used = [line.partition("=")[0].removeprefix("NCCL_") for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return [f"NCCL_{w} is not asked for" for w in used if w not in known]


def tuner_read(nccl: str, folder: Path) -> dict[str, Any]:
    """The tuner file of an all-reduce on two servers, read by NCCL's example plugin: its choice at every size against the file's first match."""
    from meshwright.io.nccl.tuner import first_match, read_tuner

    code, text = said(*shlex.split(f"collective export all-reduce --format nccl-tuner --fabric dgx-h100:2 --out {folder}/tuner.csv"))
    if code:
        return {"error": text.strip()}
    source = Path(nccl, "plugins", "tuner", "example")
    (folder / "read.c").write_text(TUNER)
    binary = folder / "read"
    subprocess.run(["cc", "-w", "-I", str(source), "-I", str(source / "nccl"), "-o", str(binary), str(folder / "read.c")], check=True)
    environment = {**os.environ, "NCCL_TUNER_CONFIG_FILE": str(folder / "tuner.csv")}
    lines = subprocess.run([str(binary), "16", "2"], capture_output=True, text=True, env=environment, check=True).stdout.splitlines()
    chosen = {int(size): (a, p) for size, a, p in (line.split() for line in lines)}
    rows = read_tuner(folder / "tuner.csv")
    want = {s: first_match(rows, "all-reduce", s, nodes=2, ranks=16) for s in (1024 << k for k in range(21))}
    wrong = [s for s, row in want.items() if chosen.get(s) != (None if row is None else (row.algorithm, row.protocol))]
    return {"sizes": len(want), "rows": len(rows), "different": wrong}


READERS = {
    "torchtitan": ("torchtitan", lambda a, f, p: differences(read_by(a.reader, TITAN, str(f), PYTHONPATH=a.torchtitan), wanted(p))),
    "torchtitan-toml": (
        "torchtitan_toml", lambda a, f, p: differences(read_by(a.reader, TITAN_TOML, str(f), PYTHONPATH=a.torchtitan_toml), wanted(p))),
    "megatron": ("megatron", of_megatron), "nemo": ("nemo", of_nemo), "deepspeed": ("deepspeed", of_deepspeed), "torch": ("reader", of_torch),
    "slurm": ("reader", of_slurm), "jobset": ("jobset", of_jobset), "kueue": ("jobset", of_jobset),
    "skypilot": ("skypilot", lambda a, f, p: differences(read_by(a.skypilot, SKY, str(f)), {"nodes": servers(p)})),
    "nccl": ("nccl", of_nccl),
}  # fmt: skip


def tried(args: argparse.Namespace, folder: Path, target: str, name: str, planned: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"target": target, "plan": name}
    file = folder / f"{target}-{name.replace(' ', '-').replace(',', '')}{'.py' if target in ('torch', 'torchtitan', 'nemo') else '.txt'}"
    code, text = said("train", "export", str(planned), "--to", target, "-o", str(file), "--json")
    if code:
        return row | {"refused": json.loads(text.strip().splitlines()[-1])["message"]}
    row["not_expressed"] = json.loads(text)["not_expressed"]
    place, reader = READERS[target]
    if not getattr(args, place) or (target == "torch" and read_plan(planned).layout.ranks > 2):
        return row | {"not tried": f"--{place.replace('_', '-')}" if target != "torch" else "more than two processes"}
    try:
        return row | {"differences": reader(args, file, read_plan(planned))}
    except (RuntimeError, OSError, SyntaxError, subprocess.SubprocessError) as error:
        return row | {"not read": str(error)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Exports, read again by the tools that they are for.")
    for tool in ("deepspeed", "torchtitan", "torchtitan-toml", "megatron", "nemo", "skypilot", "jobset", "nccl"):
        parser.add_argument(f"--{tool}", default="")
    parser.add_argument("--reader", default=sys.executable)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="exports-") as name:
        folder = Path(name)
        (folder / "examples").symlink_to(ROOT / "examples")
        os.chdir(folder)
        for what, words in PLANS.items():
            planned = folder / f"{len(rows)}.json"
            code, text = said("train", "plan", *shlex.split(words), "--out", str(planned))
            if code:
                raise SystemExit(f"{what}: {text}")
            rows += [tried(args, folder, target, what, planned) for target in TARGETS]
        tuner = tuner_read(args.nccl, folder) if args.nccl else {"not tried": "--nccl"}
        os.chdir(ROOT)
    for row in rows:
        end = row.get("refused") or row.get("not read") or row.get("not tried") or row.get("differences") or "as planned"
        sys.stdout.write(f"{row['target']:<16} {row['plan']:<28} {end}\n")
    read = [r for r in rows if "differences" in r]
    wrong = [r for r in rows if r.get("differences") or "not read" in r]
    summary = [{"what": "exports read again", "value": len(read), "unit": ""}, {"what": "different or not read", "value": len(wrong), "unit": ""}]
    record("exports", summary, exports=rows, tuner=tuner)
    sys.stdout.write(f"{len(read)} read, {len(wrong)} wrong; tuner: {tuner}\n")
    return 1 if wrong or tuner.get("different") else 0


if __name__ == "__main__":
    sys.exit(main())
