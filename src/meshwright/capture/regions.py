"""What cannot be traced, kept whole: a call of such a module (`kept_modules`) or function (`whole_functions`) is one operator, `meshwright.region`.

The operator takes all tensors that the module is called with, and its parameters and buffers, so that planning sees them; what it returns is found by
running the module once for real, on random values of the same shapes (values decide its way, so its work is that of this sample). A rank that runs
the graph calls the module itself, under autograd (`run_region`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.errors import MeshwrightError, Unsupported
from meshwright.graph.graph import Work

from .torch_private import DispatchRecorder, calls_untraced, flat_tree, storage_key, without_hooks_where_refused
from .user_gradients import gradients_returned, parameter_changes
from .work import work_of

__all__ = ["REGION", "REGION_BACKWARD", "Samples", "counts_held", "one_region", "region_saved_bytes", "region_work", "run_region"]

REGION = "meshwright.region.default"
REGION_BACKWARD = "meshwright.region_backward.default"
MAX_SAMPLE_BYTES = 2 * 1024**3  # of the parameters of a module that is run for real to see what it returns

Shapes = tuple[tuple[int, ...], ...]
Samples = Sequence[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]  # (arguments, state) each
Tried = Callable[[Callable[[Sequence[torch.Tensor]], Any], Samples], None]


@dataclass
class _Sample:
    """What one run of a region made: shape and dtype of its results, work, bytes kept for backward."""

    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    forward: Work
    backward: Work
    saved_bytes: int


@dataclass
class _Region:
    """One call: `function(state, args, kwargs)`. `arguments`: their form and its leaves, `_TENSOR` where a tensor stands; `names`: of its state, in
    the order in which the operator takes it; `batch`: the model's samples, wherever they are among its arguments' dimensions."""

    function: Callable[[dict[str, torch.Tensor], Any, Any], Any]
    arguments: tuple[Any, tuple[Any, ...]]
    tensors: int
    names: tuple[tuple[str, ...], ...]
    batch: int
    out_spec: Any = None
    out_leaves: tuple[Any, ...] = ()
    sampled: Any = None  # module and form of the call that samples were taken of last, where it is one of a module
    sample: _Sample | None = None

    def call(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The function called with these tensors; the tensors among what it returns."""
        given = iter(tensors[: self.tensors])
        spec, leaves = self.arguments
        args, kwargs = spec.unflatten([next(given) if x is _TENSOR else x for x in leaves])
        state = {n: t for names, t in zip(self.names, tensors[self.tensors :], strict=True) for n in names}
        result = without_hooks_where_refused(self, lambda: self.function(state, args, kwargs))
        found, self.out_spec = flat_tree(result)
        self.out_leaves = tuple(_TENSOR if isinstance(x, torch.Tensor) else x for x in found)
        return [x for x in found if isinstance(x, torch.Tensor)]


_TENSOR = object()
_COUNTS: ContextVar[dict[str, tuple[_Sample, int]] | None] = ContextVar("counts of regions, and the batch they were taken at", default=None)
# By key (model, path, number of the call) and shapes of all tensors: in a batch of another size numbers may be others, and tensors in a list more.
# The last trace of a model wins; equal models make equal regions.
_REGIONS: dict[tuple[str, Shapes], _Region] = {}


def run_region(key: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What the operator does on a rank: the module itself, under autograd. Raises: Unsupported where the model was not traced in this process."""
    region = _REGIONS.get((key, _shapes(tensors)))
    if region is None:
        raise Unsupported(
            f"what is kept whole as {key!r} is not known here for tensors of these shapes: {_shapes(tensors)}",
            hint="trace the model in this process first, with batches of this size",
        )  # fmt: skip
    return region.call(tensors)


def _sample_of(key: str, tensors: Sequence[torch.Tensor]) -> _Sample:
    found = _REGIONS[key, _shapes(tensors)].sample
    assert found is not None, "a region is known once it was sampled"
    return found


def region_work(key: str, tensors: Sequence[torch.Tensor], *, backward: bool) -> Work:
    sample = _sample_of(key, tensors)
    return sample.backward if backward else sample.forward


def region_saved_bytes(key: str, tensors: Sequence[torch.Tensor]) -> int:
    """Bytes that autograd keeps of what the module makes inside, by the sample."""
    return _sample_of(key, tensors).saved_bytes


def one_region(
    key: str, function: Callable[..., Any], args: Any, kwargs: Any, state: Sequence[tuple[str, torch.Tensor]] = (),
    real: Mapping[str, torch.Tensor] | None = None, *, batch: int, fixed: bool = False, where: str = "",
    around: Callable[[], AbstractContextManager[object]] = nullcontext, tried: Tried | None = None, owner: Any = None,
) -> Any:  # fmt: skip
    """Traces a call, whose code is at `where`, as one operator. `state`: by name, the tensors beside its arguments; `real`: those that have values;
    `fixed`: only where what it returns has the shapes of one sample on another, too. `around`: entered around each run on samples; `tried`: is given
    the call and several samples of its arguments and state, to raise what is wrong with it; `owner`: the module that is called.

    Raises: Unsupported where it changes a parameter; RuntimeError for more state than may be run for real, and what the call raises on samples.
    """
    leaves, spec = flat_tree((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    names: dict[int, list[str]] = {}
    held: dict[int, torch.Tensor] = {}
    for n, t in state:
        names.setdefault(id(t), []).append(n)
        held[id(t)] = t
    given = [*tensors, *held.values()]
    before = _REGIONS.get((key, _shapes(given)))
    said = [x if isinstance(x, (bool, int, float, str)) else id(_TENSOR if isinstance(x, torch.Tensor) else x) for x in leaves]
    region = _Region(
        function=function, arguments=(spec, tuple(_TENSOR if isinstance(x, torch.Tensor) else x for x in leaves)), tensors=len(tensors),
        names=tuple(map(tuple, names.values())), batch=batch,
        sampled=(owner, said, [(x.dtype, x.requires_grad) for x in given]) if owner is not None else None,
    )  # fmt: skip
    if before is not None and region.sampled is not None and before.sampled == region.sampled:
        region.out_spec, region.out_leaves, region.sample = before.out_spec, before.out_leaves, before.sample
    else:
        parameters = {n for n, t in state if isinstance(t, nn.Parameter)}
        _take_sample(key, region, given, real or {}, fixed, parameters, where, around, tried)
    _REGIONS[key, _shapes(given)] = region
    outputs = iter(torch.ops.meshwright.region(key, given))
    return region.out_spec.unflatten([next(outputs) if x is _TENSOR else x for x in region.out_leaves])


def _take_sample(
    key: str, region: _Region, given: Sequence[torch.Tensor], real: Mapping[str, torch.Tensor], fixed: bool, parameters: Container[str], where: str,
    around: Callable[[], AbstractContextManager[object]], tried: Tried | None,
) -> None:  # fmt: skip
    """Runs the call for real, on samples."""
    specs = [(tuple(int(d) for d in t.shape), t.dtype, bool(t.requires_grad)) for t in given]
    size = sum(t.numel() * t.element_size() for t in given[region.tensors :])
    if size > MAX_SAMPLE_BYTES:
        raise RuntimeError(f"a module of {size} bytes would have to be run for real to know what it returns")

    def values_of(value: Callable[[Sequence[int], torch.dtype], torch.Tensor], seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        values = [value(s, d) for s, d, _ in specs[: region.tensors]]
        state = [real.get(n[0]) for n in region.names]
        values += [_weight(s, d) if t is None else t.detach().clone() for (s, d, _), t in zip(specs[region.tensors :], state, strict=True)]
        for x, (_, _, wanted) in zip(values, specs, strict=True):
            x.requires_grad_(wanted and x.is_floating_point())
        return values

    def run(value: Callable[[Sequence[int], torch.dtype], torch.Tensor], seed: int = 0) -> _Sample:
        with torch.random.fork_rng(devices=[]), around():
            values = values_of(value, seed)
            before = [x._version for x in values]
            with gradients_returned(region.sampled[0]) if region.sampled is not None else nullcontext():
                measured = _measured(region, values)
            for names, x, version in list(zip(region.names, values[region.tensors :], before[region.tensors :], strict=True)):
                if names[0] in parameters and x._version != version:
                    raise parameter_changes(names[0], where)
            return measured

    def try_again(tried: Tried) -> None:
        with torch.random.fork_rng(devices=[]):
            samples = [values_of(value, seed) for seed in (1, 2, 0)]
        tried(region.call, [(x[: region.tensors], x[region.tensors :]) for x in samples])

    def numbers() -> list[Any]:
        return [x for x in region.out_leaves if isinstance(x, (int, float))]

    def others(error: Exception) -> tuple[Callable[[Sequence[int], torch.dtype], torch.Tensor], _Sample, _Sample]:
        """The first values with which it runs: integers that may not be 0, lengths for one, which shapes may follow; numbers that are shares."""
        for low, numbers in ((False, (2, 1)), (True, (0,)), (True, (2, 1))):
            try:
                found = [_apart(partial(run, partial(_value, whole=n, shares=low))) for n in numbers]
            except MeshwrightError:
                raise
            except Exception:  # the first error is the one to tell
                continue
            return partial(_value, whole=numbers[-1], shares=low), found[0], found[-1]
        raise error

    value: Callable[[Sequence[int], torch.dtype], torch.Tensor] = _value
    with calls_untraced():
        try:
            sample = _apart(partial(run, _value))
            other = _apart(partial(run, _flat_value)) if fixed else sample
        except MeshwrightError:
            raise
        except Exception as error:
            if fixed:
                raise
            value, other, sample = others(error)
        if tried is not None:
            _apart(partial(try_again, tried))
        if said := numbers():  # the graph would keep them as they are, whoever goes by them: how many rows an expert gets, for one
            for seed in (1, 2):
                _apart(partial(run, value, seed))
                if numbers() != said:
                    raise RuntimeError("it returns numbers that depend on values")
    if (first := _counts_of(key, sample, region.batch)) is not sample:
        with calls_untraced():  # more or less than what the first had of each row: by the values, or by how many rows there are?
            by_values = _apart(partial(run, value, 1)) != sample
        sample = first if by_values else sample
    if sample.outputs != other.outputs or (fixed and not sample.outputs):
        raise RuntimeError("the shapes of what it returns depend on values" if sample.outputs else "it returns no tensor")
    region.sample = sample


@contextmanager
def counts_held() -> Iterator[None]:
    """While it lasts, regions whose work depends on values have that of the first batch, row by row, in batches of other sizes: sizes learned from
    several batches would be those of their samples else."""
    token = _COUNTS.set({})
    try:
        yield
    finally:
        _COUNTS.reset(token)


def _counts_of(key: str, sample: _Sample, batch: int) -> _Sample:
    """`sample`, or with the work that the first one of this region had for each row of the batch, if that is another."""
    held = _COUNTS.get()
    first, rows = held.setdefault(key, (sample, batch)) if held is not None else (sample, batch)

    def scaled(x: int) -> int:
        return x * batch // rows

    forward, backward = (
        Work(flops=scaled(w.flops), bytes_read=scaled(w.bytes_read), bytes_written=scaled(w.bytes_written), calls=w.calls)
        for w in (first.forward, first.backward)
    )
    found = _Sample(sample.outputs, forward, backward, scaled(first.saved_bytes))
    return sample if found == sample else found


def _apart(function: Callable[[], Any]) -> Any:
    """Calls `function` in a thread of its own, where nothing that traces is active and autograd is not passed over."""
    results: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return results[0]


def _measured(region: _Region, values: Sequence[torch.Tensor]) -> _Sample:
    phase = [Work(), Work()]
    backward = [0]
    kept: dict[int, torch.Tensor] = {}
    outside = {storage_key(x) for x in values}

    def seen(operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        phase[backward[0]] += work_of(operator, args, kwargs, result)

    def pack(x: torch.Tensor) -> torch.Tensor:
        if storage_key(x) not in outside:
            kept[storage_key(x)] = x
        return x

    with DispatchRecorder(seen), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outputs = region.call(values)
        backward[0] = 1
        leads = [y for y in outputs if y.requires_grad]
        wanted = [x for x in values if x.requires_grad]
        if leads and wanted:
            torch.autograd.grad(leads, wanted, [torch.ones_like(y) for y in leads], allow_unused=True)
    rows = int(values[0].shape[0]) if region.tensors and values[0].dim() else 1
    rows = rows if rows % region.batch == 0 else region.batch  # the samples are not its first dimension
    made = sum(x.untyped_storage().nbytes() for x in kept.values())
    return _Sample(
        tuple((tuple(y.shape), y.dtype) for y in outputs), _per_row(phase[0], rows), _per_row(phase[1], rows), -(-made // rows) * rows
    )  # fmt: skip


def _per_row(work: Work, rows: int) -> Work:
    """Rounded up to whole numbers per row, so that other batch sizes scale from it."""

    def up(x: int) -> int:
        return -(-x // rows) * rows

    return Work(flops=up(work.flops), bytes_read=up(work.bytes_read), bytes_written=up(work.bytes_written), calls=1)


def _shapes(tensors: Sequence[torch.Tensor]) -> Shapes:
    return tuple(tuple(int(d) for d in t.shape) for t in tensors)


def _value(shape: Sequence[int], dtype: torch.dtype, whole: int = 0, shares: bool = False) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.rand(shape, dtype=dtype) if shares else torch.randn(shape, dtype=dtype)
    return torch.full(shape, True if dtype == torch.bool else whole, dtype=dtype)


def _flat_value(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The opposite of `_value`: what counts or picks by value finds another number."""
    return torch.zeros(shape, dtype=dtype) if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex else torch.ones(shape, dtype=dtype)


def _weight(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Small and positive enough for what divides by it or takes its root."""
    return torch.rand(shape, dtype=dtype) * 0.1 + 0.01 if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


@torch.library.custom_op("meshwright::region", mutates_args=())  # type: ignore[untyped-decorator]
def _region(key: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [y.clone() for y in run_region(key, tensors)]


@_region.register_fake  # type: ignore[untyped-decorator]
def _(key: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype, device=tensors[0].device) for shape, dtype in _sample_of(key, tensors).outputs]


@torch.library.custom_op("meshwright::region_backward", mutates_args=())  # type: ignore[untyped-decorator]
def _region_backward(key: str, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], wanted: Sequence[int]) -> list[torch.Tensor]:
    """Gradients of the tensors numbered in `wanted`; the module runs once more for them."""
    def run() -> Any:
        leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
        outputs = run_region(key, leaves)
        pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad]
        return torch.autograd.grad([y for y, _ in pairs], [leaves[i] for i in wanted], [g for _, g in pairs], allow_unused=True)

    found = _apart(run)
    return [torch.zeros_like(tensors[i]) if g is None else g.clone() for i, g in zip(wanted, found, strict=True)]


@_region_backward.register_fake  # type: ignore[untyped-decorator]
def _(key: str, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], wanted: Sequence[int]) -> list[torch.Tensor]:
    return [torch.empty_like(tensors[i]) for i in wanted]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.key, tensors = inputs
    ctx.wanted = [i for i, t in enumerate(tensors) if t.requires_grad]
    ctx.like = [(tuple(y.shape), y.dtype, y.device) for y in output]
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[None, list[torch.Tensor | None]]:
    given = [torch.zeros(s, dtype=t, device=d) if g is None else g for g, (s, t, d) in zip(gradients, ctx.like, strict=True)]
    found = torch.ops.meshwright.region_backward(ctx.key, list(ctx.saved_tensors), given, ctx.wanted)
    result: list[torch.Tensor | None] = [None] * len(ctx.saved_tensors)
    for i, g in zip(ctx.wanted, found, strict=True):
        result[i] = g
    return None, result


_region.register_autograd(_backward, setup_context=_setup)
