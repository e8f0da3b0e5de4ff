"""Finds a user's function by name, calls it and checks what it returns.

A model is named `FILE.py:function` or `module:function` (or by a configuration of transformers': `hf`); `@PLAN.json` behind it places its embedding
tables as a table plan says (`placed_tables`). The function takes no argument and returns `(nn.Module, example_inputs)`. Every example input is a
tensor with the batch as leading dimension; the last one is the training target. They may come as keyword arguments (`calling`). Nothing is evaluated
from text: a file is imported from its path, its folder being importable only while user code runs here.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from meshwright.errors import CaptureError, MeshwrightError, UnknownName, UsageError
from meshwright.graph.model_names import HfName, hf_name, hub_hint

from .calling import Calling, flat_inputs
from .drawn import DrawnWeights, made_lazily
from .hf import build_hf
from .live import stands_for
from .placed_tables import place_tables, read_placed, split_name
from .weight_files import WeightFiles, has_weights

__all__ = ["ModelSource", "build_model", "match_hint", "place_of", "resized", "resolve_function", "shown", "unwrapped", "user_code"]

IN_A_WORKER = "Original Traceback (most recent call last)"  # what torch puts into the message of an error of a DataLoader's worker

NAME_HINT = "name a model as FILE.py:function or module:function, e.g. examples/gpt.py:small"


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A built model: the module, its example inputs (target last) and notes on how it was built.

    `examples`: the inputs as its function gave them, whatever batch size was asked for. `calling`: how they become the module's arguments; None: in
    order, the target last. `weights`: where the values of its parameters, of which some or all are on the meta device then, come from.
    """

    name: str
    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    notes: tuple[str, ...] = ()
    examples: tuple[torch.Tensor, ...] = ()
    calling: Calling | None = None
    weights: WeightFiles | DrawnWeights | None = None
    real: bool = False  # built with memory

    @property
    def batch_size(self) -> int:
        return int(self.inputs[0].shape[0])


def resolve_function(name: str, *, what: str = "model") -> Callable[..., Any]:
    """The function called `name`. Raises UsageError or UnknownName with close matches; CaptureError if importing it fails."""
    if (live := stands_for(name)) is not None:
        return live
    place, separator, function = name.rpartition(":")
    if not separator or not place or not function:
        raise UsageError(f"{what} {name!r} does not name a function", where=name, hint=_name_hint(name.rstrip(":"), what))
    if not function.isidentifier():
        raise UsageError(f"{function!r} is not a function name", where=name, hint=NAME_HINT)
    if place.endswith(".py"):
        module = _import_file(place, name)
    else:
        module = _import_module(place, name, what)
    found = getattr(module, function, None)
    if found is None:
        raise UnknownName(f"{place} has no function {function!r}", where=name, hint=match_hint(function, _public_callables(module)))
    if not callable(found):
        hint = match_hint(function, _public_callables(module))
        raise UsageError(f"{name} is a {type(found).__name__}, not a function", where=name, hint=hint)
    return found  # type: ignore[no-any-return]


def build_model(
    name: str, *, device: str, seed: int = 0, batch_size: int | None = None, lazy: bool = False, sizes: Sequence[Sequence[int]] = (),
    dtype: str = "float32",
) -> ModelSource:
    """Calls the model function on `device` after seeding torch, checks the contract and brings the inputs to `batch_size` rows.

    `lazy`: weights that lie in files need not be loaded, others need not be drawn, on the processor (`ModelSource.weights`).
    `sizes`: of one sample of every input (`Training.sizes`); none: as the function gives them. `dtype`: of its floating-point weights, buffers and
    inputs where it is not float32 (`Training.dtype`), which leaves them as they are.
    The global random state is put back afterwards. Raises UsageError (contract broken) or CaptureError (user code failed).
    """
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"batch size must be >= 1, got {batch_size}", where=name)
    asked, (name, placed) = name, split_name(name)
    by_config = hf_name(name)
    files: list[WeightFiles] = []
    function = partial(build_hf, by_config, lazy=files if lazy else None) if by_config is not None else resolve_function(name)
    with torch.random.fork_rng(devices=[]), torch.device(device), user_code(name, "" if by_config is not None else _place(name)):
        torch.manual_seed(seed)
        result, drawn = made_lazily(function) if lazy and device == "cpu" and not _in_files(by_config) and not placed else (function(), None)
        module, given, calling = _checked(name, result)
        inputs = _apart(given)
        if placed:
            place_tables(module, *read_placed(placed))
        if dtype != "float32":
            module.to(getattr(torch, dtype))
            inputs = tuple(x.to(getattr(torch, dtype)) if x.dtype == torch.float32 else x for x in inputs)
    if sizes:
        if [x.dim() - 1 for x in inputs] != [len(s) for s in sizes]:
            shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
            raise UsageError(f"the model's inputs are {shapes}, the job has samples of {list(map(tuple, sizes))}", where=name, hint="plan again")
        inputs = tuple(resized(x, size) for x, size in zip(inputs, sizes, strict=True))
    of_batch = inputs if batch_size is None else tuple(resize_batch(x, batch_size) for x in inputs)
    return ModelSource(name=asked, module=module, inputs=of_batch, examples=inputs, calling=calling, weights=files[0] if files else drawn)


def _apart(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Copies of those that share a storage with one before: of a tensor that is given twice (`labels=input_ids`), tracing would read only one."""
    known: set[int] = set()
    found = []
    for x in inputs:
        storage = x.untyped_storage()._cdata if x.layout == torch.strided else id(x)
        found.append(x.clone() if storage in known else x)
        known.add(storage)
    return tuple(found)


def resized(x: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """`x` with samples of this size: every dimension is cut, or repeated from its start."""
    for dim, (old, new) in enumerate(zip(x.shape[1:], size, strict=True), start=1):
        if old != new:
            x = torch.cat([x] * -(-new // int(old)), dim).narrow(dim, 0, new).clone()
    return x


def _in_files(by_config: HfName | None) -> bool:
    return by_config is not None and has_weights(by_config.folder)


def resize_batch(x: torch.Tensor, batch_size: int) -> torch.Tensor:
    """`x` with `batch_size` rows: rows are repeated from the start, or cut."""
    rows = int(x.shape[0])
    if rows == batch_size:
        return x
    repeats = -(-batch_size // rows)
    # A copy, not a view: what is saved for backward is counted by storage.
    return (torch.cat([x] * repeats) if repeats > 1 else x)[:batch_size].clone()


@contextlib.contextmanager
def user_code(name: str, place: str = "") -> Iterator[None]:
    """Runs user code: its folder is importable meanwhile; what it raises becomes a CaptureError that names its file and line.

    What it prints goes to stderr: stdout is for results.
    """
    with _importable(place), contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        except MeshwrightError:
            raise
        except Exception as error:
            where = user_location(error, place)
            message = f"{type(error).__name__}: {_first_line(error)}"
            hint = f"the failure is in the code behind {name}"
            if isinstance(error, TypeError) and "forward() missing" in message:  # also the target is among what the function returns
                hint += "; the last example input is the target, and the module is called without it (with it: train plan --loss output)"
            raise CaptureError(message, where=where or name, hint=hint, data={"model": name}) from error


def user_location(error: BaseException, place: str = "") -> str:
    """`file:line` of the innermost frame that is the user's: in `place` if there is one, else outside torch and this package."""
    frames = [*traceback.extract_tb(error.__traceback__), *_frames_of_a_worker(error)]
    file = str(Path(place).resolve()) if place.endswith(".py") else ""
    own = [f for f in frames if file and f.filename == file]
    package, library = str(Path(__file__).resolve().parents[1]), str(Path(torch.__file__).resolve().parent)
    outside = [f for f in frames if not f.filename.startswith((package, library, "<"))]
    if isinstance(error, SyntaxError) and error.filename:
        return f"{shown(error.filename)}:{error.lineno}"
    for candidates in (own, outside):
        if candidates:
            return f"{shown(candidates[-1].filename)}:{candidates[-1].lineno}"
    return ""


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    if IN_A_WORKER in str(error):
        return f"{lines[-1].partition(': ')[2]} (in a worker of the loader)"
    return lines[0] if lines else "no message"


def _frames_of_a_worker(error: BaseException) -> list[traceback.FrameSummary]:
    """Of a DataLoader's worker, which hands on its traceback as text."""
    found = re.findall(r'^\s*File "(.+)", line (\d+)', str(error), re.MULTILINE) if IN_A_WORKER in str(error) else []
    return [traceback.FrameSummary(file, int(line), "") for file, line in found]


def shown(filename: str) -> str:
    """A file's name as a message has it: below the current folder without that."""
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


def unwrapped(code: Any) -> Any:
    """The function behind a partial, a decorator, a method, a module, or what is called like a function; what has none (a builtin) as it is."""
    while hasattr(code, "func"):  # functools.partial
        code = code.func
    code = inspect.unwrap(type(code).forward if isinstance(code, nn.Module) else code)
    code = getattr(code, "__func__", code)
    return code if hasattr(code, "__code__") or inspect.isclass(code) or inspect.isbuiltin(code) or not callable(code) else type(code).__call__


def place_of(code: Any) -> str:
    """`file:line` of a function, a method, a class, or what is called like one."""
    code = unwrapped(code)
    with contextlib.suppress(TypeError, OSError):
        if inspect.isclass(code):
            return f"{shown(inspect.getsourcefile(code) or '')}:{inspect.getsourcelines(code)[1]}"
        if (found := getattr(code, "__code__", None)) is not None:
            return f"{shown(found.co_filename)}:{found.co_firstlineno}"
    return type(code).__module__


def _place(name: str) -> str:
    return name.rpartition(":")[0]


@contextlib.contextmanager
def _importable(place: str) -> Iterator[None]:
    folder = str(Path(place).resolve().parent) if place.endswith(".py") else str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def _import_file(place: str, name: str) -> ModuleType:
    path = Path(place)
    if not path.is_file():
        siblings = sorted(str(p) for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise UnknownName(f"there is no file {place!r}", where=name, hint=match_hint(place, siblings) or NAME_HINT)
    path = path.resolve()
    # One module object per file content place: asking twice gives the same classes, two files of one name do not collide.
    key = f"meshwright_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{place!r} is not a Python source file", where=name, hint=NAME_HINT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    try:
        with user_code(name, place):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(key, None)
        raise
    return module


def _import_module(place: str, name: str, what: str) -> ModuleType:
    if not all(part.isidentifier() for part in place.split(".")):
        raise UnknownName(f"{place!r} is neither a Python file nor a module", where=name, hint=NAME_HINT)
    with user_code(name):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
                hint = f"is it installed here, or is {place}.py meant?" if what == "model" else NAME_HINT
                raise UnknownName(f"there is no module {place!r}", where=name, hint=hint) from error
            raise


def _public_callables(module: ModuleType) -> list[str]:
    own = {k for k, v in vars(module).items() if callable(v) and not k.startswith("_") and getattr(v, "__module__", None) == module.__name__}
    return sorted(k for k in own if not isinstance(vars(module)[k], type))


def match_hint(wanted: str, known: list[str]) -> str:
    if not known:
        return ""
    close = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"there are: {', '.join(known[:12])}"


def _name_hint(name: str, what: str) -> str:
    """For a bare FILE.py: its public functions, read from the source without running it."""
    if what != "model":
        return f"{what}es are cross-entropy, mse, output, or module:function" if what == "loss" else NAME_HINT
    if hint := hub_hint(name):
        return hint
    path = Path(name)
    if path.suffix == ".py" and path.is_file():
        with contextlib.suppress(SyntaxError, UnicodeDecodeError, OSError):
            body = ast.parse(path.read_text(encoding="utf-8")).body
            functions = [n.name for n in body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
            if functions:
                return f"name one of its functions: {', '.join(f'{name}:{f}' for f in functions[:8])}"
    return NAME_HINT


def _checked(name: str, result: Any) -> tuple[nn.Module, tuple[torch.Tensor, ...], Calling | None]:
    def wrong(message: str) -> UsageError:
        hint = "a model function returns (nn.Module, (input, ..., target)) or (nn.Module, {name: input, ...}), batch first, target last"
        return UsageError(message, where=name, hint=hint)

    if not isinstance(result, tuple) or len(result) != 2:
        raise wrong(f"returned {type(result).__name__}, not a pair (module, example inputs)")
    module, given = result
    if not isinstance(module, nn.Module):
        raise wrong(f"the first of the pair is a {type(module).__name__}, not an nn.Module")
    if not isinstance(given, (tuple, list, Mapping)) or not given:
        raise wrong("the second of the pair is neither a tuple nor a dictionary of tensors")
    inputs, calling = flat_inputs(given)
    if not inputs:
        raise wrong("there is no tensor among the example inputs")
    for i, x in enumerate(inputs):
        which = f"example input {i}" if calling is None else f"example input {calling.names[i]!r}"
        if not isinstance(x, torch.Tensor):
            raise wrong(f"{which} is a {type(x).__name__}, not a tensor")
        if x.dim() == 0 or x.shape[0] == 0:
            raise wrong(f"{which} has shape {tuple(x.shape)}: it needs a batch as leading dimension")
        if x.shape[0] != inputs[0].shape[0]:
            raise wrong(f"{which} has {x.shape[0]} rows, input 0 has {inputs[0].shape[0]}: the leading dimension is the batch")
    return module, inputs, calling
