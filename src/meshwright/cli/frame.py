"""What all commands share: finding the command, its arguments, its output, its errors and its exit code.

Results go to stdout, everything else to stderr. An error is one line `error: ...` and, where there is something to do about
it, one line `hint: ...`; with `--json` it is one JSON object on one line. Modules of commands are imported only when used.
"""

from __future__ import annotations

import argparse
import codecs
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TextIO, cast

from .. import __version__
from ..errors import Interrupted, MeshwrightError, MissingExtra, TimeLimit, Unsupported, UsageError
from ..kernels.kept import fallback_in_use
from .arguments import whole_number
from .columns import folded, hung
from .commands import COMMANDS, NOUNS
from .other_names import ours
from .progress import Interrupts, shown

if TYPE_CHECKING:
    from ..kernels.effort import Cut

__all__ = ["Result", "keep_memory", "main", "one_blas_thread", "suggest", "use_color"]

# Packages that come with an extra: import name -> (package, extra). A command that meets one of them missing says what to install.
_EXTRAS = {
    "torch": ("torch", "torch"),
    "safetensors": ("safetensors", "torch"),
    "pyarrow": ("pyarrow", "tables"),
    "aiconfigurator_core": ("aiconfigurator-core", "tables"),
    "hypothesis": ("hypothesis", "test"),
}

_OPTIONS = ("--json", "--quiet", "--debug", "--version", "--help", "-h")
_FOOTER = """\
options of every command:
  --json     print one JSON document instead of text
  --output csv
             print the document's table as CSV (its rows, or itself as one row)
  --quiet    say nothing on standard error but errors: no progress, no notes
  --debug    show the traceback of an error
  --help     show help
  --version  (alone) show the version

what takes more than 2 s says on standard error how far it is; Ctrl-C ends a search with the best so far
environment: NO_COLOR (no colour), MESHWRIGHT_PROGRESS=0 (no progress), MESHWRIGHT_CACHE, NUMBA_CACHE_DIR (where plans and kernels are kept)
exit codes: 0 ok, 1 failure, 2 usage, 3 infeasible, 4 check failed, 5 time limit, 130 interrupted"""


class Result(NamedTuple):
    """What a command found: `document` (with `schema` and `version`) for `--json`, `text` for people. `cut`: the time limit ended the search, what
    is written is the best so far; the text, the document and stderr say so, and the exit code is that of a time limit."""

    document: dict[str, Any]
    text: str
    exit_code: int = 0
    cut: Cut | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Parse `argv` (default: the process's), run the command, print, and return the exit code. Never raises."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = words[: words.index("--")] if "--" in words else words
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_ESCAPES)  # a terminal without Unicode gets escapes, not a traceback
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler, wherever it serves: it says on stderr that it starts and stops
    try:
        return _run(words)
    except SystemExit as stop:  # argparse after --help
        return _write("", stop.code if isinstance(stop.code, int) else 0)
    except BaseException as error:  # the last resort: whatever happened becomes one line and an exit code
        if "--debug" in options:
            import traceback

            traceback.print_exc()
        return _report(_as_typed(error), as_json="--json" in options)


whole_process = False  # set by `cli.process`: the command is all that this process does


def one_blas_thread() -> None:
    """For commands that multiply no matrices, before they load numpy: its library then starts no threads, which takes 0.04 s of processor time.

    Only where the command is the process: a caller's own environment is left as it is.
    """
    if whole_process:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    keep_memory()


def keep_memory() -> None:
    """`kernels.garbage.keep_memory`, where the command is the process: a caller's own memory is left as it is."""
    if whole_process:
        from ..kernels.garbage import keep_memory as settle

        settle()


_ESCAPES = "meshwright-escapes"


def _escaped(error: UnicodeError) -> tuple[bytes, int]:
    """Bytes of a file name that the locale cannot express are written as they are, so the name reads as it was typed; other characters as escapes."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return b"".join(c.encode("ascii", "surrogateescape") if _raw_byte(c) else c.encode("ascii", "backslashreplace") for c in text), error.end


def _raw_byte(character: str) -> bool:
    """Whether it stands for a byte that could not be decoded (PEP 383)."""
    return "\udc80" <= character <= "\udcff"


codecs.register_error(_ESCAPES, _escaped)


def _run(words: list[str]) -> int:
    leading: list[str] = []
    while words and words[0].startswith("-"):
        leading.append(words.pop(0))
    if unknown := [x for x in leading if x not in _OPTIONS]:
        raise UsageError(f"unknown option {unknown[0]!r}", hint=suggest(unknown[0], _OPTIONS) or "see `meshwright --help`")
    as_json = "--json" in leading
    if "--version" in leading:
        document = {"schema": "meshwright.version", "version": 1, "meshwright": __version__, "python": sys.version.split()[0]}
        return _print(Result(document, f"meshwright {__version__}"), as_json)
    if "-h" in leading or "--help" in leading or words[:1] == ["help"]:
        return _write(_help(words[1] if words[:1] == ["help"] and len(words) > 1 else None))
    if not words:
        sys.stderr.write(_help(None) + "\n")
        return 2
    command, rest = _find(words)
    if command is None:  # `meshwright <noun>` or `meshwright <noun> --help`
        if any(x in ("-h", "--help") for x in rest):
            return _write(_help(words[0]))
        sys.stderr.write(_help(words[0]) + "\n")
        return 2
    module = _load(command)
    parser = _parser(command, module)
    _refuse_unknown_options(parser, rest)  # before argparse says that the right one is missing
    args, unrecognised = parser.parse_known_args(rest)
    if unrecognised:
        _refuse(parser, unrecognised[0])
    args.json = as_json or args.json or args.output == "json"
    quiet, interrupts = args.quiet or "--quiet" in leading, Interrupts()
    watched = shown(" ".join(command), as_json=args.json) if getattr(module, "PROGRESS", True) else nullcontext()
    with _silenced(sys.stderr) if quiet else watched, interrupts.caught():
        try:
            result: Result = module.run(args)
        except TimeLimit as error:
            if interrupts.asked:
                raise interrupts.nothing_yet(error) from error
            raise
        _say_where_kernels_are_kept()
    return _print(result._replace(exit_code=Interrupted.exit_code) if interrupts.asked else result, args.json, as_csv=args.output == "csv")


@contextmanager
def _silenced(stderr: TextIO) -> Iterator[None]:
    """What is written to stderr meanwhile is dropped; an error that ends the command is printed after it."""
    with Path(os.devnull).open("w") as nowhere:
        sys.stderr = nowhere
        try:
            yield
        finally:
            sys.stderr = stderr


def _say_where_kernels_are_kept() -> None:
    """One line where a command compiled kernels into a temporary folder, since there was no other place."""
    if "numba" in sys.modules and (folder := fallback_in_use()):
        sys.stderr.write(f"note: compiled kernels are kept in {folder}, since no other cache can be written; NUMBA_CACHE_DIR names another place\n")


def _find(words: list[str]) -> tuple[tuple[str, ...] | None, list[str]]:
    """The command named by the first words and what follows it; None when only a noun is named."""
    first = words[0]
    if (first,) in COMMANDS:
        return (first,), words[1:]
    verbs = [command[1] for command in COMMANDS if len(command) == 2 and command[0] == first]
    if not verbs:
        firsts = list(dict.fromkeys(command[0] for command in COMMANDS))
        raise UsageError(f"unknown command {first!r}", hint=suggest(first, firsts) or f"one of: {', '.join(firsts)}; see `meshwright --help`")
    if len(words) == 1 or words[1].startswith("-"):
        return None, words[1:]
    if words[1] not in verbs:
        hint = suggest(words[1], verbs, before=f"meshwright {first} ")
        raise UsageError(f"unknown command '{first} {words[1]}'", hint=hint or f"one of: {', '.join(verbs)}; see `meshwright {first} --help`")
    return (first, words[1]), words[2:]


class CommandModule(Protocol):
    """What a command's module has; see `commands`."""

    HELP: str
    # PROGRESS: bool = True, False for a command that says by itself how far it is, or that runs a program of the user's

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None: ...
    @staticmethod
    def run(args: argparse.Namespace) -> Result: ...


def _load(command: tuple[str, ...]) -> CommandModule:
    """The only import by a name that is not written as one: 80 commands, each loaded when it is used. `cli` imports all of `meshwright` anyhow."""
    name = f"{__package__}.{COMMANDS[command][0]}"
    try:
        return cast("CommandModule", import_module(name))
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise Unsupported(f"the command '{' '.join(command)}' is not part of meshwright {__version__}", hint="see `meshwright --help`") from error


class _Parser(argparse.ArgumentParser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """A command that runs another one declares `set_defaults(after_dashes=[])`: what follows `--` is that, options included."""
        words = list(args or ())
        passed_on = "after_dashes" in self._defaults and "--" in words
        found, unknown = super().parse_known_args(words[: words.index("--")] if passed_on else words, namespace)
        if passed_on:
            found.after_dashes = words[words.index("--") + 1 :]
        return found, unknown

    def _print_message(self, message: str, file: Any = None) -> None:
        """Help is written as a result is. argparse of Python 3.11.2 takes a reader that has left for an error, where output is not buffered."""
        _write(message)

    def error(self, message: str) -> NoReturn:
        option = max(message.removeprefix("argument ").partition(":")[0].split("/"), key=len)
        negative = message.endswith("expected one argument")  # or there is none, or it looks like an option
        more = f"; a value that begins with a dash is written {option}=-..." if negative else ""
        raise UsageError(f"{self.prog}: {message}", hint=f"see `{self.prog} --help`{more}")


def _parser(command: tuple[str, ...], module: Any) -> _Parser:
    parser = _Parser(
        prog=f"meshwright {' '.join(command)}",
        description=module.HELP,
        epilog=getattr(module, "EPILOG", None),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.register("type", int, whole_number)
    module.arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.add_argument("--output", choices=("text", "json", "csv"), default="text", help="text (default), json (as --json), csv (the table)")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors on standard error")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _refuse_unknown_options(parser: _Parser, words: list[str]) -> None:
    """No value of an option begins with two dashes: argparse takes none such."""
    known = {option for action in parser._actions for option in action.option_strings}
    for word in words[: words.index("--")] if "--" in words else words:
        if word.startswith("--") and word.partition("=")[0] not in known:
            _refuse(parser, word)


def _refuse(parser: _Parser, word: str) -> NoReturn:
    known = [option for action in parser._actions for option in action.option_strings if option not in _OPTIONS]
    kind = "option" if word.startswith("-") else "argument"
    name = word.partition("=")[0]
    hint = suggest(ours(name, known), known) if kind == "option" else ""
    raise UsageError(f"{parser.prog}: unknown {kind} {name!r}", hint=hint or f"see `{parser.prog} --help`")


def suggest(word: str, known: Iterable[str], *, before: str = "") -> str:
    """`did you mean ...?` with the closest known word, or nothing."""
    from difflib import get_close_matches

    found = get_close_matches(word, list(known), n=1)
    return f"did you mean `{before}{found[0]}`?" if found else ""


# ---- output ------------------------------------------------------------------------------------------------------------
def _print(result: Result, as_json: bool, *, as_csv: bool = False) -> int:
    if (cut := result.cut) is not None:
        said, code = {**result.document, "cut": cut.to_json()}, Interrupted.exit_code if cut.interrupted else TimeLimit.exit_code
        result = result._replace(document=said, text=f"{result.text}\n{cut}", exit_code=result.exit_code or code)
        _report(cut.error("this is the best so far"), as_json=as_json)
    if as_csv:
        from ..report.tables import csv_text

        text = csv_text(result.document)
    elif as_json:
        import json

        if not {"schema", "version"} <= result.document.keys():
            raise AssertionError("a command's document must carry schema and version")
        text = json.dumps(result.document, indent=2, allow_nan=False, ensure_ascii=False)
    else:
        text = folded(result.text) if sys.stdout.isatty() else result.text
    return _write(text, result.exit_code)


def _write(text: str, code: int = 0) -> int:
    """Write to stdout and return `code`, also when the reader of a pipe (`| head`) has what it wanted and left."""
    try:
        sys.stdout.write(text if text.endswith("\n") or not text else text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _close_stdout()
    except OSError as error:
        _close_stdout()
        raise MeshwrightError(f"cannot write the result: {error.strerror}", where="stdout", hint="check free space") from error
    return code


def _close_stdout() -> None:
    """Nothing more may be written, also not by Python at exit, which would fail again."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # stdout is not a file (a test's buffer): nothing is left to flush there
        pass


def use_color(stream: TextIO) -> bool:
    """Colour only on a terminal, and never when NO_COLOR is set or the terminal is dumb."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


# ---- errors ------------------------------------------------------------------------------------------------------------
def _as_typed(error: BaseException) -> MeshwrightError:
    if isinstance(error, MeshwrightError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("interrupted")
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _EXTRAS:
        package, extra = _EXTRAS[(error.name or "").partition(".")[0]]
        return MissingExtra(package, extra=extra, needed_for="this command")
    if isinstance(error, OSError):
        named = isinstance(error.filename, str | bytes)
        hint = "check the path and its permissions" if named else "the system refused; run with --debug to see where"
        return MeshwrightError(error.strerror or str(error) or type(error).__name__, where=os.fsdecode(error.filename) if named else "", hint=hint)
    if isinstance(error, UnicodeEncodeError) and any(map(_raw_byte, error.object[error.start : error.end])):
        hint = "use a UTF-8 locale (LC_ALL=C.UTF-8, without PYTHONUTF8=0), or rename the file"
        return UsageError(f"a name has characters that this locale ({sys.getfilesystemencoding()}) cannot express", hint=hint)
    if isinstance(error, MemoryError):
        return MeshwrightError("out of memory", hint="use a smaller problem, or a machine with more memory")
    detail = " ".join(str(error).split())
    return MeshwrightError(
        f"unexpected {type(error).__name__}{': ' + detail if detail else ''}",
        hint="this is a bug in meshwright; run with --debug for the traceback",
        data={"type": type(error).__name__},
    )


def _report(error: MeshwrightError, *, as_json: bool) -> int:
    try:
        if as_json:
            import json

            document = {"schema": "meshwright.error", "version": 1, "exit_code": error.exit_code, **error.to_json()}
            sys.stderr.write(json.dumps(document, default=str, ensure_ascii=False) + "\n")
        else:
            bold, plain = ("\x1b[1;31m", "\x1b[0m") if use_color(sys.stderr) else ("", "")
            sys.stderr.write(f"{bold}error:{plain} {_one_line(str(error))}\n")
            if error.hint:
                sys.stderr.write(f"hint: {_one_line(error.hint)}\n")
        sys.stderr.flush()
    except BrokenPipeError:
        pass
    return error.exit_code


def _one_line(text: str) -> str:
    """Names in messages come from outside: no line breaks, no terminal control characters."""
    return "".join(c if c.isprintable() or _raw_byte(c) else " " for c in " ".join(text.split()))


# ---- help --------------------------------------------------------------------------------------------------------------
def _help(noun: str | None) -> str:
    if noun is not None and noun not in NOUNS:
        _find([noun, "--help"])  # raises with a suggestion, unless it is a single-word command
        return f"see `meshwright {noun} --help`"
    chosen = [(" ".join(command), line) for command, (_, line) in COMMANDS.items() if noun in (None, command[0])]
    width = max(len(name) for name, _ in chosen) + 2
    purpose = f"{noun}: {NOUNS[noun]}" if noun else "Decide how an ML job runs on a fabric of devices, prove it, simulate it, run it, compare."
    lines = [f"usage: meshwright {noun or '<noun>'} <verb> [options]", "", hung("", purpose), ""]
    lines += [hung(f"  {name:<{width}}", line) for name, line in chosen]
    lines += ["", hung("", f"`meshwright {noun or '<noun>'} <verb> --help` shows the options of one command.")]
    if noun is None:
        lines += ["", *(hung("", line) for line in _FOOTER.splitlines())]
    return "\n".join(lines)
