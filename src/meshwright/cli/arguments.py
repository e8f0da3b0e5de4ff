"""Arguments that several commands take, so that they are named, explained and refused alike."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..graph.graph import OpGraph
    from ..plan.routing import Routing

TIME_LIMIT = "most seconds, by the clock; where it cuts, the best so far is given and the exit code is 5 (default {})"
MODELS = "FILE.py:function or module:function that returns (module, example inputs), or hf:CONFIG.json[:Class], or a folder with config.json"
LOSSES = "cross-entropy (default), mse, output, or module:function"


def whole_number(text: str, *, least: int = 0) -> int:
    """An option's whole number; no number of anything is negative."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"must be >= {least}, got {number}")
    return number


def at_least_one(text: str) -> int:
    """An option's whole number, of at least 1."""
    return whole_number(text, least=1)


def fabric_arguments(parser: argparse.ArgumentParser, *, devices: str = "use only these devices, e.g. 0-3,8") -> None:
    parser.add_argument("--fabric", required=True, help="FILE.toml or PRESET:n, see `meshwright fabric list`")
    parser.add_argument("--devices", help=devices)


def training_arguments(parser: argparse.ArgumentParser) -> None:
    """What is trained, on which fabric, with how many samples a step."""
    model_arguments(parser)
    parser.add_argument("--graph", type=Path, help="a captured graph (`train capture`) instead of --model")
    fabric_arguments(parser)
    parser.add_argument("--global-batch", type=at_least_one, required=True, help="samples per step, over all replicas")
    parser.add_argument("--loss", default=None, help=LOSSES)


def model_arguments(parser: argparse.ArgumentParser, *short: str, required: bool = False) -> None:
    parser.add_argument("--model", *short, required=required, help=MODELS)
    parser.add_argument(
        "--dtype", default="", choices=["", "float32", "bfloat16", "float16", "float64"],
        help="hf: models: data type of the weights (default: that of the configuration where the folder has weights, else float32)",
    )  # fmt: skip
    parser.add_argument("--seq-len", type=at_least_one, metavar="N", help="hf: models: tokens in an example row")


def model_given(args: argparse.Namespace) -> str | None:
    """The model's name as a job carries it, with --seq-len and --dtype in it. What can be refused without torch, whose import takes seconds, is.

    Raises: UsageError where they do not fit; UnknownName for a configuration that is not there; MissingExtra without what it needs.
    """
    from ..graph.model_names import hf_name, require_transformers, with_dtype, with_length

    name = with_dtype(with_length(args.model, args.seq_len), args.dtype)
    if name is not None and hf_name(name) is not None:
        require_transformers()
    return name


def named_options(texts: list[str], *, where: str) -> dict[str, str]:
    """`NAME=VALUE` as given several times. Raises: UsageError naming `where`."""
    from ..errors import UsageError

    options = {}
    for text in texts:
        name, sep, value = text.partition("=")
        if not sep:
            raise UsageError(f"{text!r} is not NAME=VALUE", where=where, hint=f"e.g. {where} chunks=4")
        options[name] = value
    return options


def graph_given(args: argparse.Namespace) -> OpGraph | None:
    """The graph of --graph, nothing with --model. Raises: UsageError when neither or both are given."""
    from ..errors import UsageError

    if (args.model is None) == (args.graph is None):
        raise UsageError("give either --model or --graph", hint="e.g. --model examples/gpt.py:small")
    args.model = model_given(args)
    if args.graph is None:
        return None
    from ..io.model.graph import read_graph

    return read_graph(args.graph)


def require_directory(out: Path, *, where: str = "--out") -> None:
    """Before long work: raises UsageError, naming the option `where`, when no file can be written there."""
    import os

    from ..errors import UsageError

    folder = Path(os.path.abspath(out)).parent  # noqa: PTH100  Path.resolve fails on links that lead in a circle
    if not folder.is_dir():
        raise UsageError(f"no directory {out.parent}", where=where, hint="make it first")
    if out.is_dir():
        raise UsageError(f"{out} is a folder, not a file", where=where, hint="name a file in it")
    if not out.exists() and not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"you may not write into {folder}", where=where, hint="name another place")


def routing_of(text: str) -> Routing:
    """What `--routing` says. Raises: UsageError, FormatError."""
    from ..errors import UsageError
    from ..io.costs.expert_loads import read_expert_loads
    from ..plan.routing import UNIFORM, Routing

    kind, colon, number = text.partition(":")
    if text == "uniform":
        return UNIFORM
    if kind != "zipf" or not colon:
        return read_expert_loads(text)
    try:
        return Routing(zipf=float(number))
    except ValueError:
        raise UsageError(f"the exponent must be a number, got {number!r}", where="--routing", hint="e.g. zipf:1.2") from None
