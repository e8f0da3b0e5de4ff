"""torch.export of a model with its loss: flat, equal to eager, with what cannot be traced kept whole.

What is kept whole is as small as its cause. Where export fails in a function of torch's, calls of it are kept whole (`whole_functions`), if they
can be. Else a module is (`regions`): one that export fails in, of which a call cannot be made flat (`flatten`), or that holds what export would
lose without a word (`watching`). Modules of the same class of the owner's go with it. Export is tried again until it goes through; where the
outermost module itself is the one, the whole model stays one operator. Code that goes another way under export, and fails there, is first led the
way that it goes in eager PyTorch (`as_if_not_traced`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.errors import MeshwrightError, Unsupported

from .as_before import as_before
from .assigned_buffers import changes_moved_down, copies_moved_up
from .checks import CHECKED, Answers, answered, checks_of, split_off
from .conversions import idle_conversions_removed, modules_left_as_they_are
from .diagnose import Refusal, diagnose, quiet
from .flatten import Left, flatten
from .in_place import changed_parameter, written_out
from .kept_modules import kept_whole
from .left_tensors import RUNS, Given, refuse_left_tensors
from .live import LossModule
from .losses import Objective, kept_tensors
from .placed_tables import together
from .resolve import ModelSource, place_of, shown
from .side_effects import Seen, changed, contents_watched, plain_values, refuse_changing
from .torch_private import as_if_exported, export_as_called, global_backward_hooks, noting_places
from .user_gradients import parameter_changes
from .watched import NOT_THE_OWNERS, Watched, as_if_not_traced, watching
from .whole_functions import JOINED, FunctionsWhole, LastFunction

__all__ = ["exported_program", "line_of", "module_path", "places_noted"]

_HOOKS = "the backward hooks of a module"
_NOTING: ContextVar[bool] = ContextVar("lines of calls are noted", default=False)
_BY_VALUE = ("DynamicOutputShapeException", "DataDependentOutputException")  # of an operator in a function whose results may have fixed shapes
_OF_VALUES = (*_BY_VALUE, "GuardOnDataDependentSymNode", "a shape depends on values")  # where forward may have asked a tensor for its value
_ANSWERS: ContextVar[Answers] = ContextVar("answers of checks", default={})  # noqa: B039 - never changed
MAX_ROUNDS = 12  # exports of one model: each keeps at least one more class of modules whole


def exported_program(objective: Objective, source: ModelSource, mode: Any) -> tuple[Any, tuple[str, ...]] | Refusal:
    """(exported program, notes on what was kept whole), or why the model as a whole cannot be exported."""
    hooks = {p: [*m._backward_hooks.values(), *m._backward_pre_hooks.values()] for p, m in objective.model.named_modules()}
    hooked = {p: place_of(found[0]) for p, found in hooks.items() if found}
    if "" in hooked or (of_all := global_backward_hooks()):
        what, where = (_HOOKS, hooked[""]) if "" in hooked else ("the backward hooks of all modules", place_of(of_all[0]))
        return Refusal(operator="", where=where, module="", message=f"export would lose {what}")
    outer = [p for p in hooked if not any(p.startswith(f"{q}.") for q in hooked)]
    # path of a module, or a function of torch's -> why
    whole: dict[Any, str] = {p: f"export would lose {_HOOKS} ({hooked[p]})" for p in outer}
    refusal: Refusal | None = None
    unfit: set[Any] = set()
    untold = False
    answers: Answers | None = None
    left = _left(objective, source, mode, list(whole))
    with as_before(objective.model, objective.code), contextlib.ExitStack() as told:
        for _ in range(MAX_ROUNDS):
            seen, before = Seen(), plain_values(objective.model, objective.code)
            found = _once(objective, source, mode, list(whole), seen, unfit=unfit)
            changing, after = changed(before, plain_values(objective.model, objective.code)), plain_values(objective.model, objective.code)
            if changing or seen.assigned:
                attributes = seen.changing(partial(_again, objective, source, mode, list(whole)))
                again = changing & changed(after, plain_values(objective.model, objective.code))
                refuse_changing(objective.model, again, attributes, objective.code)
            if not isinstance(found, Refusal):
                if isinstance(left := left or _left(objective, source, mode, list(whole)), Unsupported):
                    raise left
                notes, lines = _notes(_modules_of(objective), whole), ", ".join(seen.printed)
                if lines:
                    notes.append(f"what forward prints ({lines}) is printed while the model is traced, not in training")
                if checks := _lines_of(found):
                    notes.append(f"forward checks its batch ({checks}): asked of every micro-batch before a step, and raised as it would raise")
                if mode is not None and not left:
                    notes.append("whether forward reads what it left the time before is not known: it does not run by itself")
                return found, tuple(notes)
            if answers is None and found.message.startswith(_OF_VALUES) and mode is not None:
                answers = _checks(objective, source, mode, list(whole))
                told.enter_context(_answering(answers))
                if answers:
                    continue
            refusal = refusal or found  # the first says what stands in the way; later ones may come of keeping modules whole
            if found.in_python and not untold:
                untold = True
                told.enter_context(as_if_not_traced())
                continue
            whole = {k: why for k, why in whole.items() if k not in unfit}
            if found.function is not None and found.function not in unfit and found.function not in whole:
                whole[found.function] = _why(found)
                continue
            more = _modules_like(_modules_of(objective), found.module, whole)
            if not more and JOINED not in whole and found.message.startswith(_OF_VALUES):
                whole[JOINED] = _why(found)
                continue
            if not more:
                break
            for path in [p for p in _modules(whole) if any(p.startswith(f"{m}.") for m in more)]:
                del whole[path]
            whole |= dict.fromkeys(more, _why(found))
    assert refusal is not None
    if isinstance(left, Unsupported):
        raise left
    return refusal


def _left(objective: Objective, source: ModelSource, mode: Any, whole: Sequence[Any]) -> Unsupported | bool:
    """What `refuse_left_tensors` says of forward and loss with these kept whole. Raises as that."""
    if mode is None:
        return False

    def run(given: Given) -> Any:
        with _kept(objective, whole, source, None):
            return objective(*given.inputs)

    with quiet(), mode:
        given = [Given(x, kept_tensors(objective)) for x in (source.inputs, *([x.clone() for x in source.inputs] for _ in range(RUNS - 1)))]
        return refuse_left_tensors(objective.model, objective.code, run, given)


def _checks(objective: Objective, source: ModelSource, mode: Any, whole: Sequence[Any]) -> Answers:
    with quiet(), mode, _kept(objective, whole, source, None), as_if_exported():
        return checks_of(lambda: objective(*source.inputs))


@contextlib.contextmanager
def _answering(answers: Answers) -> Iterator[None]:
    token = _ANSWERS.set(answers)
    try:
        yield
    finally:
        _ANSWERS.reset(token)


def _lines_of(exported: Any) -> str:
    return ", ".join(dict.fromkeys(str(n.args[2]) for n in exported.checks.nodes if str(n.target) == CHECKED))


def _why(found: Refusal) -> str:
    return f"{found.message} ({found.where})" if found.where else found.message


def _modules(whole: Iterable[Any]) -> list[str]:
    return [x for x in whole if isinstance(x, str)]


def _again(objective: Objective, source: ModelSource, mode: Any, whole: Sequence[Any]) -> Seen:
    seen = Seen()
    _once(objective, source, mode, whole, seen)
    return seen


def _once(
    objective: Objective, source: ModelSource, mode: Any, whole: Sequence[Any], seen: Seen, *, places: bool = False, unfit: set[Any] | None = None
) -> Any:
    """An exported program, flat; or a refusal. `places`: of every call in the source, which only a refusal names; `unfit`: is told which functions
    cannot be kept whole."""
    lost: list[Watched] = []
    noting = noting_places(places or _NOTING.get())
    try:
        with quiet(), noting, mode or contextlib.nullcontext(), _as_eager(objective, source, whole, lost, seen, unfit):
            exported = torch.export.export(objective, source.inputs, strict=False)
    except MeshwrightError:
        raise
    except Exception as error:
        with quiet(), _kept(objective, whole, source, unfit):
            found = diagnose(objective, source, mode, error)
        if found.message.startswith(_BY_VALUE):
            return replace(found, function=_failing(objective, source, mode, whole))
        return replace(found, in_python=not isinstance(error, RuntimeError))
    if lost:
        first = lost[0]
        return Refusal(operator="", where=shown(first.where), module=_plain(first.module), message=f"export would lose {first.what}")
    exported.checks, of_weights = split_off(exported)
    if of_weights is not None:
        return _refused(Left("what a check asks for is computed of more than the batch", dict(of_weights.meta)), source)
    detached = [name for name, x in exported.constants.items() if isinstance(x, torch.Tensor) and x.requires_grad]
    if detached:  # export would train a different function
        taken = Left(f"a gradient is taken inside forward, export detaches {detached[0]}", _use_of(exported, detached[0]))
        return _refused(taken, source) if places else _once(objective, source, mode, whole, Seen(), places=True)
    idle = idle_conversions_removed(exported.graph)
    with quiet():
        left = flatten(exported)
    if left:
        return _refused(left[0], source) if places else _once(objective, source, mode, whole, Seen(), places=True)
    if (change := changed_parameter(exported)) is not None:
        if not places:
            return _once(objective, source, mode, whole, Seen(), places=True)
        raise parameter_changes(_plain(change[0]), line_of(change[1].meta) or source.name)
    moved = together(exported.graph) | copies_moved_up(exported.graph) | changes_moved_down(exported.graph)
    if written_out(exported.graph) or moved or idle or len(exported.checks.nodes) > 1:
        exported.graph_module.recompile()
    return exported


def _failing(objective: Objective, source: ModelSource, mode: Any, whole: Sequence[Any]) -> Any:
    """The function of torch's in which export fails; None where it is none, or does not fail again."""
    last = LastFunction()
    with contextlib.suppress(Exception), quiet(), noting_places(False), mode or contextlib.nullcontext():
        with _as_eager(objective, source, whole, [], Seen(), None), last:
            torch.export.export(objective, source.inputs, strict=False)
        return None
    return last.failed


@contextlib.contextmanager
def _kept(objective: Objective, whole: Sequence[Any], source: ModelSource, unfit: set[Any] | None) -> Iterator[None]:
    functions = frozenset(x for x in whole if not isinstance(x, str))
    mode = FunctionsWhole(functions, source.name, source.batch_size)
    try:
        kept = kept_whole(_modules_of(objective), _modules(whole), source.name, source.batch_size)
        with modules_left_as_they_are(), kept, answered(_ANSWERS.get()), mode if functions else contextlib.nullcontext():
            yield
    finally:
        if unfit is not None:
            unfit |= mode.unfit


@contextlib.contextmanager
def _as_eager(
    objective: Objective, source: ModelSource, whole: Sequence[Any], lost: list[Watched], seen: Seen, unfit: set[Any] | None
) -> Iterator[None]:
    own = Objective.called

    def called(self: Objective, tensors: Sequence[torch.Tensor]) -> Any:
        with contents_watched(self.model, seen):
            return own(self, tensors)

    Objective.called = called  # type: ignore[method-assign]
    try:
        with watching(objective, lost, seen), _kept(objective, whole, source, unfit), export_as_called():
            yield
    finally:
        Objective.called = own  # type: ignore[method-assign]


def _use_of(exported: Any, constant: str) -> dict[str, Any]:
    """Metadata of the first call that takes a constant."""
    place = next(s.arg.name for s in exported.graph_signature.input_specs if s.target == constant)
    users = [n for n in exported.graph.nodes if any(x.name == place for x in n.all_input_nodes)]
    return dict(users[0].meta) if users else {}


def _refused(left: Left, source: ModelSource) -> Refusal:
    return Refusal(operator="", where=line_of(left.meta) or source.name, module=module_path(left.meta), message=left.reason)


def line_of(meta: Any) -> str:
    """`file:line` of the owner's code that made a call; "" where that was not noted (`places_noted`), or is nobody's."""
    trace = [line.strip() for line in str(meta.get("stack_trace") or "").splitlines() if line.strip().startswith("File ")]
    found = [x for line in trace if not (x := line.removeprefix('File "')).startswith(NOT_THE_OWNERS)]
    file, _, rest = (found or [""])[-1].partition('", line ')
    return shown(f"{file}:{rest.partition(',')[0]}") if found else ""


@contextlib.contextmanager
def places_noted() -> Iterator[None]:
    """While it lasts, exports of this context note the line of every call."""
    token = _NOTING.set(True)
    try:
        yield
    finally:
        _NOTING.reset(token)


def _modules_of(objective: Objective) -> dict[str, nn.Module]:
    """By path: the model's, and the loss function's."""
    own = {"loss": objective.loss} if objective.loss is not None else {}
    return {**own, **dict(objective.model.named_modules())}


def _modules_like(modules: Mapping[str, nn.Module], path: str, whole: Iterable[Any]) -> list[str]:
    """The module at `path` and others of its class, which will not fare better; empty if that is nothing new."""
    if not path or path not in modules or any(path == p or path.startswith(f"{p}.") for p in _modules(whole)):
        return []
    kind = type(modules[path])
    if kind.__module__.startswith("torch.nn."):
        return [path]
    same = [p for p, m in modules.items() if p and type(m) is kind]
    return [p for p in same if not any(p.startswith(f"{q}.") for q in same)]


def _notes(modules: Mapping[str, nn.Module], whole: dict[Any, str]) -> list[str]:
    by_class: dict[tuple[str, str], list[str]] = {}
    for path in _modules(whole):
        why = whole[path]
        m = modules[path]
        kind = getattr(m.function, "__name__", "") if isinstance(m, LossModule) else ""
        by_class.setdefault((kind or type(m).__name__, why), []).append(path)
    called = [f"calls of {x.__name__} are kept whole as one operator each: {why}" for x, why in whole.items() if not isinstance(x, str)]
    return called + [
        f"kept whole as one operator each: {', '.join(paths[:4])}{' ...' if len(paths) > 4 else ''} ({kind}): {why}"
        for (kind, why), paths in by_class.items()
    ]


def module_path(meta: Any) -> str:
    """Module path of a node in the user's terms: `blocks.0.mlp.up`, `""` at the root, `loss` for the loss."""
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    return _plain(str(list(stack.values())[-1][0]).removeprefix("L['self'].")) if stack else ""


def _plain(path: str) -> str:
    return path.removeprefix("model.") if path != "model" else ""
