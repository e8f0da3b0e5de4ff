"""The frame: finding commands, output, errors, exit codes. Commands made up for the test run through the real frame."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from meshwright import __version__, errors
from meshwright.cli import frame, main
from meshwright.cli.commands import COMMANDS, NOUNS
from meshwright.cli.frame import Result
from meshwright.kernels.effort import Cut


@pytest.fixture
def command(monkeypatch):
    """Install `meshwright fabric tryout` whose run is the given function."""

    def install(run, arguments=lambda parser: None):
        module = types.ModuleType("meshwright.cli.fabric_tryout")
        module.HELP, module.arguments, module.run = "Try out.", arguments, run
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(COMMANDS, ("fabric", "tryout"), ("fabric_tryout", "try out"))

    return install


DOCUMENT = {"schema": "meshwright.test", "version": 1, "name": "größe"}


# ---- finding commands --------------------------------------------------------------------------------------------------
def test_help_lists_every_command(capsys):
    assert main(["--help"]) == main(["help"]) == main(["-h"]) == 0
    out = capsys.readouterr().out
    for command, (_, line) in COMMANDS.items():
        assert out.count(line) == 3 and out.count("  " + " ".join(command) + "  ") >= 3


def test_help_of_a_noun(capsys):
    assert main(["fabric", "--help"]) == main(["help", "fabric"]) == 0
    out = capsys.readouterr().out
    assert "fabric show" in out and "train plan" not in out


def test_nothing_named_is_usage_with_help_on_stderr(capsys):
    assert main([]) == main(["fabric"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "fabric show" in captured.err


def test_help_of_a_command(capsys, command):
    command(lambda args: Result(DOCUMENT, ""), lambda parser: parser.add_argument("--size"))
    assert main(["fabric", "tryout", "--help"]) == 0
    out = capsys.readouterr().out
    assert "Try out." in out and "--size" in out and "--json" in out and "--debug" in out


@pytest.mark.parametrize(
    ("argv", "error", "hint"),
    [
        (["fabrik", "list"], "unknown command 'fabrik'", "did you mean `fabric`?"),
        (["zzz"], "unknown command 'zzz'", "one of: fabric, train"),
        (["fabric", "lst"], "unknown command 'fabric lst'", "did you mean `meshwright fabric list`?"),
        (["fabric", "zzz"], "unknown command 'fabric zzz'", "one of: list, show, subset"),
        (["help", "fabrik"], "unknown command 'fabrik'", "did you mean `fabric`?"),
        (["--jsno", "fabric", "list"], "unknown option '--jsno'", "did you mean `--json`?"),
        (["fabric", "show", "two-islands", "--devces", "1"], "meshwright fabric show: unknown option '--devces'", "did you mean `--devices`?"),
        (["train", "plan", "--tensor-model-parallel-size", "2"], "unknown option '--tensor-model-parallel-size'", "did you mean `--tp`?"),
        (["train", "plan", "--micro_batch_size=2"], "unknown option '--micro_batch_size'", "did you mean `--microbatch`?"),
        (["fabric", "show", "two-islands", "--tp-size", "2"], "unknown option '--tp-size'", "fabric show --help"),
        (["fabric", "show", "two-islands", "--devces=1"], "unknown option '--devces'", "did you mean `--devices`?"),
        (["fabric", "show", "two-islands", "more"], "unknown argument 'more'", "see `meshwright fabric show --help`"),
        (["fabric", "show"], "meshwright fabric show: the following arguments are required: FABRIC", "see `meshwright fabric show --help`"),
        (["fabric", "show", "two-islands", "--limit", "x"], "argument --limit: must be a whole number", "see `meshwright fabric show --help`"),
    ],
)
def test_usage_errors(capsys, argv, error, hint):
    assert main(argv) == 2
    captured = capsys.readouterr()
    first, second = captured.err.splitlines()
    assert captured.out == "" and first.startswith("error: ") and error in first and second.startswith("hint: ") and hint in second


def test_a_command_without_module_is_a_clean_error(capsys, monkeypatch):
    monkeypatch.setitem(COMMANDS, ("fabric", "design"), ("fabric_design_not_there", "later"))
    assert main(["fabric", "design"]) == 2
    assert capsys.readouterr().err.startswith("error: the command 'fabric design' is not part of meshwright ")


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"meshwright {__version__}\n"
    assert main(["--version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["meshwright"] == __version__


def test_every_noun_is_described_and_used():
    assert {command[0] for command in COMMANDS if len(command) == 2} == set(NOUNS)


# ---- output ------------------------------------------------------------------------------------------------------------
def test_text_or_document(capsys, command):
    command(lambda args: Result(DOCUMENT, "text", exit_code=4))
    assert main(["fabric", "tryout"]) == 4
    assert capsys.readouterr().out == "text\n"
    for argv in (["fabric", "tryout", "--json"], ["--json", "fabric", "tryout"]):
        assert main(argv) == 4
        captured = capsys.readouterr()
        assert json.loads(captured.out) == DOCUMENT and captured.err == ""


def test_a_search_that_the_clock_cut_says_so_everywhere(capsys, command):
    command(lambda args: Result(DOCUMENT, "text", cut=Cut(3, 25)))
    assert main(["fabric", "tryout"]) == 5
    captured = capsys.readouterr()
    assert captured.out == "text\ntime limit: looked at 3 of 25\n"
    assert captured.err == "error: time limit: looked at 3 of 25; this is the best so far\nhint: raise the time limit\n"
    assert main(["fabric", "tryout", "--json"]) == 5
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {**DOCUMENT, "cut": {"looked": 3, "of": 25}}
    assert json.loads(captured.err)["exit_code"] == 5


@pytest.mark.parametrize("document", [{"version": 1}, {"schema": "x"}, DOCUMENT | {"time_s": float("nan")}])
def test_a_document_that_breaks_the_contract_is_a_bug_not_output(capsys, command, document):
    command(lambda args: Result(document, ""))
    assert main(["fabric", "tryout", "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and json.loads(captured.err)["message"].startswith("unexpected ")


# ---- errors ------------------------------------------------------------------------------------------------------------
def every_error(base=errors.MeshwrightError):
    yield base
    for sub in base.__subclasses__():
        yield from every_error(sub)


EXIT_CODES = {1, 2, 3, 4, 5, 130}


@pytest.mark.parametrize("kind", [e for e in every_error() if e.__module__ == "meshwright.errors"], ids=lambda e: e.__name__)
def test_every_error_class_ends_with_its_exit_code(capsys, command, kind):
    def run(args):
        if kind is errors.MissingExtra:
            raise kind("torch", extra="torch", needed_for="x")
        raise kind("it\nbroke \x1b[31m", where="f.toml: links[3]", hint="mend\nit", data={"rank": 3})

    command(run)
    assert main(["fabric", "tryout"]) == kind.exit_code and kind.exit_code in EXIT_CODES
    captured = capsys.readouterr()
    assert captured.out == ""
    if kind is not errors.MissingExtra:
        assert captured.err == "error: f.toml: links[3]: it broke  [31m\nhint: mend it\n"
    assert main(["fabric", "tryout", "--json"]) == kind.exit_code
    captured = capsys.readouterr()
    document = json.loads(captured.err)
    assert captured.out == "" and captured.err.count("\n") == 1
    assert document["schema"] == "meshwright.error" and document["version"] == 1
    assert document["code"] == kind.code and document["exit_code"] == kind.exit_code
    assert {"message", "where", "hint", "data"} <= document.keys()


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (FileNotFoundError(2, "No such file or directory", "x.bin"), 1, "error: x.bin: No such file or directory\nhint: check the path"),
        (BrokenPipeError(32, "Broken pipe"), 1, "error: Broken pipe\nhint: the system refused"),  # a command's own pipe, not stdout
        (ModuleNotFoundError("no", name="torch.nn"), 2, "error: this command needs the package 'torch'"),
        (MemoryError(), 1, "error: out of memory\n"),
        (ValueError("two\nlines"), 1, "error: unexpected ValueError: two lines\nhint: this is a bug in meshwright; run with --debug"),
        (RecursionError(), 1, "error: unexpected RecursionError\n"),
    ],
)
def test_other_exceptions(capsys, command, error, code, text):
    def run(args):
        raise error

    command(run)
    assert main(["fabric", "tryout"]) == code
    captured = capsys.readouterr().err
    assert captured.startswith(text) and "Traceback" not in captured
    assert main(["fabric", "tryout", "--debug"]) == code
    captured = capsys.readouterr().err
    assert captured.startswith("Traceback") and text.splitlines()[0] in captured


class Terminal:
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("environment", "colored"), [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"TERM": "xterm", "NO_COLOR": "1"}, False)]
)
def test_color_only_on_a_terminal_that_wants_it(monkeypatch, environment, colored):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert frame.use_color(Terminal()) is colored


def test_no_color_into_a_file(capsys):
    main(["nothing"])
    assert "\x1b" not in capsys.readouterr().err


# ---- as a process ------------------------------------------------------------------------------------------------------
def run_process(*argv, **options):
    return subprocess.run([sys.executable, "-m", "meshwright", *argv], capture_output=True, timeout=200, **options)


@pytest.mark.interpreter
def test_python_m_meshwright():
    done = run_process("fabric", "show", "two-islands")
    assert done.returncode == 0 and b"two-islands:2" in done.stdout and done.stderr == b""
    assert run_process("fabric", "shw").returncode == 2


@pytest.mark.interpreter
@pytest.mark.parametrize("argv", ["fabric list", "--help", "fabric --help", "fabric show --help"])
@pytest.mark.parametrize("unbuffered", ["", "1"])  # what is written goes out at the end, or at once
def test_a_reader_that_leaves_is_no_error(argv, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    process = subprocess.Popen([sys.executable, "-m", "meshwright", *argv.split()], stdout=writer, stderr=subprocess.PIPE, env=environment)
    os.close(writer)
    _, stderr = process.communicate(timeout=200)
    assert (process.returncode, stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error():
    with Path("/dev/full").open("wb") as full:
        process = subprocess.run([sys.executable, "-m", "meshwright", "fabric", "list"], stdout=full, stderr=subprocess.PIPE, timeout=200)
    assert process.returncode == 1
    assert process.stderr == b"error: stdout: cannot write the result: No space left on device\nhint: check free space\n"


def test_a_terminal_without_unicode():
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = run_process("fabric", "gr\u00f6\u00dfe", env=environment)
    assert done.returncode == 2 and done.stderr.startswith(b"error: unknown command 'fabric gr\\xf6\\xdfe'")


# ---- quiet -------------------------------------------------------------------------------------------------------------
def test_quiet_drops_notes_and_keeps_results_and_errors(command, capsys):
    def run(args):
        sys.stderr.write("note: half way\n")
        if args.fail:
            raise errors.UsageError("no such thing", hint="try another")
        return Result(DOCUMENT, "done")

    command(run, lambda parser: parser.add_argument("--fail", action="store_true"))
    assert main(["fabric", "tryout"]) == 0
    assert capsys.readouterr() == ("done\n", "note: half way\n")
    for words in (["fabric", "tryout", "--quiet"], ["--quiet", "fabric", "tryout"]):
        assert main(words) == 0
        assert capsys.readouterr() == ("done\n", "")
    before = sys.stderr
    assert main(["fabric", "tryout", "--quiet", "--fail"]) == 2
    assert capsys.readouterr() == ("", "error: no such thing\nhint: try another\n") and sys.stderr is before


def test_a_temporary_place_of_kernels_is_named_once_kernels_were_used(command, capsys, monkeypatch):
    import numba  # noqa: F401

    command(lambda args: Result(DOCUMENT, "done"))
    monkeypatch.setattr(frame, "fallback_in_use", lambda: "/tmp/place")
    assert main(["fabric", "tryout"]) == 0
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("note: ") and "/tmp/place" in said and "NUMBA_CACHE_DIR" in said
