"""The table of commands. `meshwright --help` and shell completion read it; a command's module is imported only when it is used.

A row is `(noun, verb)` or `(word,)` -> (module in this package, help line). A module has

    HELP: str                                             one line, shown by `meshwright <noun> <verb> --help`
    def arguments(parser: argparse.ArgumentParser) -> None
    def run(args: argparse.Namespace) -> Result           `Result` is in `meshwright.cli.frame`
"""

from __future__ import annotations

__all__ = ["COMMANDS", "NOUNS"]

NOUNS: dict[str, str] = {
    "fabric": "devices, switches and links",
    "train": "training jobs: capture, plan, run, compare",
    "profile": "measured layer tables: what they hold, and what a layout would take",
    "layout": "how operators and tensors are split: AutoDDL and templates",
    "collective": "bounds and schedules of collectives",
    "program": "what a plan executes",
    "pipeline": "in which order micro-batches run through stages",
    "memory": "what a training step keeps, what it computes again, and where it lies",
    "traffic": "gradients in data-parallel training: what is sent together, and how small",
    "run": "any program, as it is",
    "trace": "traces of real runs: which module, stage and rank the time went to",
    "lab": "rehearsal: a fabric as shaped network namespaces on this machine",
}

COMMANDS: dict[tuple[str, ...], tuple[str, str]] = {
    ("fabric", "list"): ("fabric_list", "list the fabrics that ship with meshwright"),
    ("fabric", "show"): ("fabric_show", "show a fabric as a matrix of connections, or as SVG"),
    ("fabric", "subset"): ("fabric_subset", "write the part of a fabric that some devices form"),
    ("fabric", "import"): ("fabric_import", "read a cluster from NCCL, nvidia-smi, DCGM, matrix or edge files"),
    ("fabric", "probe"): ("fabric_probe", "measure latencies, ports and shared trunks between hosts, and write the fabric"),
    ("fabric", "lint"): ("fabric_lint", "look for what is wrong or unlikely in a fabric or a topology file"),
    ("train", "capture"): ("train_capture", "capture a PyTorch model as an operator graph"),
    ("train", "plan"): ("train_plan", "decide how to train a model on a fabric, and prove it"),
    ("train", "replan"): ("train_replan", "plan a job again after devices are lost or added, reusing what the others hold"),
    ("train", "explain"): ("train_explain", "where a plan's time and memory go, why others lost, what would change it; or size a transformer"),
    ("train", "run"): ("train_run", "train for real, as the plan says"),
    ("train", "compare"): ("train_compare", "lay prediction and measurement over each other"),
    ("train", "export"): ("train_export", "hand a training plan's layout to torchtitan, Megatron or DeepSpeed"),
    ("profile", "show"): ("profile_show", "what a layer profile holds, lacks, and what in it looks wrong"),
    ("profile", "predict"): ("profile_predict", "iteration time and memory of a layout from a layer profile"),
    ("profile", "plan"): ("profile_plan", "rank the layouts of some GPUs by simulation from a layer profile"),
    ("profile", "fit"): ("profile_fit", "fit a runtime's overheads and constant memory to measured runs"),
    ("layout", "plan"): ("layout_plan", "split every operator of a model over devices"),
    ("layout", "search"): ("layout_search", "stages, degrees, recomputation and sharding on a fabric of any size and mix, with bounds"),
    ("layout", "run"): ("layout_run", "train as a layout plan says, and count every byte"),
    ("layout", "compare"): ("layout_compare", "AutoDDL beside the templates, predicted and measured"),
    ("collective", "bound"): ("collective_bound", "the least time a collective can take on a fabric, with its proof"),
    ("collective", "plan"): ("collective_plan", "a schedule for a collective on a fabric"),
    ("collective", "groups"): ("collective_groups", "several collectives at once on one fabric, planned together"),
    ("collective", "replan"): ("collective_replan", "a new schedule when a NIC, GPU or link is down or slow, and what is lost"),
    ("collective", "compare"): ("collective_compare", "all strategies at all sizes: time, algbw, busbw, the bound and the winner"),
    ("collective", "sparse"): ("collective_sparse", "which sparse all-reduce pays for a gradient of which k elements are sent, or none"),
    ("collective", "bench"): ("collective_bench", "measure collectives on real processes, in nccl-tests' columns"),
    ("collective", "order"): ("collective_order", "which host should play which rank, from probed or stated costs"),
    ("collective", "nccl"): ("collective_nccl", "what NCCL would choose for a collective, by its own model"),
    ("collective", "check"): ("collective_check", "prove a schedule right, or show where it is wrong; ours, MSCCL XML or MSCCL++ JSON"),
    ("collective", "export"): ("collective_export", "hand a schedule to MSCCL, MSCCL++ or NCCL"),
    ("collective", "import"): ("collective_import", "turn a foreign schedule into a plan"),
    ("pipeline", "compare"): ("pipeline_compare", "every pipeline schedule that applies: time, bubble, memory, bounds, and which are best"),
    ("pipeline", "plan"): ("pipeline_plan", "one schedule, or the fastest that fits in memory, as a checked plan"),
    ("pipeline", "run"): ("pipeline_run", "walk a pipeline plan on real processes: measured beside simulated"),
    ("pipeline", "fill"): ("pipeline_fill", "put K-FAC or other work that can wait into a pipeline's idle time, and prove that no step gets longer"),
    ("pipeline", "export"): ("pipeline_export", "hand a pipeline plan to torch.distributed.pipelining, or show it as a trace"),
    ("memory", "plan"): ("memory_plan", "which operators to compute again so that a training step fits"),
    ("memory", "compare"): ("memory_compare", "time beyond keeping everything, by budget, of all strategies and PyTorch's own"),
    ("memory", "explain"): ("memory_explain", "the ten tensors alive at the peak of a training step, who made them and until when"),
    ("memory", "pack"): ("memory_pack", "place storages with lifetimes in one arena, as small as can be, beside a bound"),
    ("traffic", "plan"): ("traffic_plan", "which gradients to send together, and how small, beside the best step without compression"),
    ("traffic", "compare"): ("traffic_compare", "every codec and grouping beside each other: predicted step, bytes, error"),
    ("run", "doctor"): ("run_doctor", "read the flight recorders of all ranks and name the first divergence"),
    ("run", "ordered"): ("run_ordered", "start any program with the ranks of an order"),
    ("trace", "annotate"): ("trace_annotate", "say which stage, module and operator every slice of a PyTorch trace belongs to"),
    ("trace", "breakdown"): ("trace_breakdown", "where the time of measured steps went, per rank and stage, and what to do about it"),
    ("trace", "diff"): ("trace_diff", "what changed most between two runs, or between a plan and a run of it"),
    ("lab", "up"): ("lab_up", "build a rehearsal lab after a fabric"),
    ("lab", "run"): ("lab_run", "run a command once per device of a lab"),
    ("lab", "show"): ("lab_show", "show a lab, its links and what went over them; or list the labs"),
    ("lab", "fault"): ("lab_fault", "cut, slow down or restore a link of a running lab"),
    ("lab", "down"): ("lab_down", "end a lab with everything in it"),
    ("lab", "gc"): ("lab_gc", "remove what killed labs left behind"),
    ("program", "show"): ("program_show", "print the lanes and steps of a program"),
    ("program", "export"): ("program_export", "hand a plan to a simulator: Chakra execution traces, one per rank"),
    ("program", "import"): ("program_import", "read Chakra execution traces: what they say, and a checked plan of it on a fabric"),
    ("program", "stats"): ("program_stats", "critical path, smallest channel depth, worst-order memory of a program"),
    ("program", "diff"): ("program_diff", "compare two programs step by step"),
    ("report",): ("report", "explain a plan, and its run, on one self-contained page (HTML)"),
    ("cite",): ("cite", "the publications a plan rests on"),
    ("completion",): ("completion", "print a completion script for bash, zsh or fish"),
}
