"""Completion scripts are valid shell and complete what the table says."""

import shutil
import subprocess

import pytest

from meshwright.cli import main
from meshwright.cli.commands import COMMANDS, NOUNS


def script(capsys, shell):
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def complete(source, *words):
    """What bash offers for the last word."""
    array = " ".join(f"'{w}'" for w in words)
    code = f'{source}\nCOMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; _meshwright; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=200, check=True)
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash(capsys):
    source = script(capsys, "bash")
    assert set(complete(source, "meshwright", "")) == set(NOUNS) | {c[0] for c in COMMANDS if len(c) == 1}
    assert complete(source, "meshwright", "fab") == ["fabric"]
    assert set(complete(source, "meshwright", "fabric", "")) == {c[1] for c in COMMANDS if c[0] == "fabric"}
    assert complete(source, "meshwright", "train", "com") == ["compare"]
    assert complete(source, "meshwright", "fabric", "show", "--js") == ["--json"]
    assert complete(source, "meshwright", "fabric", "show", "x") == []


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(capsys, shell):
    source = script(capsys, shell)
    for command in COMMANDS:
        assert command[-1] in source
    program = shutil.which(shell)
    if program:  # the shell's own syntax check, where it is installed
        assert subprocess.run([program, "-n"], input=source, text=True, timeout=200).returncode == 0


def test_help_lines_with_quotes_stay_quoted(capsys, monkeypatch):
    monkeypatch.setitem(COMMANDS, ("fabric", "odd"), ("fabric_list", "it's \\odd"))
    assert "'it\\'s \\\\odd'" in script(capsys, "fish")
    assert """'odd:it'"'"'s \\odd'""" in script(capsys, "zsh")


def test_unknown_shell(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_options_of_a_command_and_their_choices(capsys):
    source = script(capsys, "bash")
    offered = complete(source, "meshwright", "train", "plan", "--")
    assert {"--model", "--fabric", "--global-batch", "--json", "--quiet"} <= set(offered)
    assert complete(source, "meshwright", "train", "plan", "--glo") == ["--global-batch"]
    assert "--model" not in complete(source, "meshwright", "fabric", "show", "--")
    assert set(complete(source, "meshwright", "train", "plan", "--zero", "")) == {"auto", "0", "1", "2", "3"}
    assert set(complete(source, "meshwright", "report", "plan.json", "--")) >= {"--out", "--json"}
    assert complete(source, "meshwright", "train", "plan", "--model", "x") == [], "files are left to the shell"
