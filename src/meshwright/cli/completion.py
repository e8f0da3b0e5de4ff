"""`meshwright completion bash|zsh|fish`: a completion script made from the table of commands."""

from __future__ import annotations

import argparse
import shlex

from .commands import COMMANDS, NOUNS
from .frame import Result

__all__ = ["HELP", "arguments", "run"]

HELP = "Print a completion script for a shell."
EPILOG = """\
bash:  eval "$(meshwright completion bash)"
zsh:   eval "$(meshwright completion zsh)"
fish:  meshwright completion fish | source"""

_COMMON = ("--json", "--debug", "--help")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help="the shell to complete for")


def run(args: argparse.Namespace) -> Result:
    script = {"bash": _bash, "zsh": _zsh, "fish": _fish}[args.shell]()
    return Result({"schema": "meshwright.completion", "version": 1, "shell": args.shell, "script": script}, script)


def _firsts() -> list[tuple[str, str]]:
    return [(noun, line) for noun, line in NOUNS.items()] + [(c[0], line) for c, (_, line) in COMMANDS.items() if len(c) == 1]


def _verbs(noun: str) -> list[tuple[str, str]]:
    return [(c[1], line) for c, (_, line) in COMMANDS.items() if len(c) == 2 and c[0] == noun]


def _bash() -> str:
    cases = "\n".join(f"    {noun}) words='{' '.join(v for v, _ in _verbs(noun))}' ;;" for noun in NOUNS)
    return f"""\
_meshwright() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} words=
  if [[ $current == -* ]]; then words='{" ".join(_COMMON)}'
  elif [[ $COMP_CWORD -eq 1 ]]; then words='{" ".join(w for w, _ in _firsts())}'
  elif [[ $COMP_CWORD -eq 2 ]]; then case ${{COMP_WORDS[1]}} in
{cases}
    completion) words='bash zsh fish' ;;
  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _meshwright meshwright
"""


def _zsh() -> str:
    def described(pairs: list[tuple[str, str]]) -> str:
        return " ".join(shlex.quote(f"{word}:{line}") for word, line in pairs)

    cases = "\n".join(f"      {noun}) choices=({described(_verbs(noun))}) ;;" for noun in NOUNS)
    return f"""\
_meshwright() {{
  local -a choices
  if [[ $PREFIX == -* ]]; then choices=({" ".join(f"'{x}'" for x in _COMMON)})
  elif (( CURRENT == 2 )); then choices=({described(_firsts())})
  elif (( CURRENT == 3 )); then case $words[2] in
{cases}
      completion) choices=('bash' 'zsh' 'fish') ;;
    esac; fi
  if (( $#choices )); then _describe 'meshwright' choices; else _files; fi
}}
compdef _meshwright meshwright
"""


def _quoted(text: str) -> str:
    """Fish's single quotes: a backslash escapes the quote and itself."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _fish() -> str:
    lines = [f"complete -c meshwright -n __fish_use_subcommand -f -a {word} -d {_quoted(line)}" for word, line in _firsts()]
    for noun in NOUNS:
        verbs = " ".join(v for v, _ in _verbs(noun))
        seen = f"__fish_seen_subcommand_from {noun}; and not __fish_seen_subcommand_from {verbs}"
        lines += [f"complete -c meshwright -n '{seen}' -f -a {verb} -d {_quoted(line)}" for verb, line in _verbs(noun)]
    lines += ["complete -c meshwright -n '__fish_seen_subcommand_from completion' -f -a 'bash zsh fish'"]
    lines += [f"complete -c meshwright -l {option.removeprefix('--')}" for option in _COMMON]
    return "\n".join(lines) + "\n"
