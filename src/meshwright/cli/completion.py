"""`meshwright completion bash|zsh|fish`: a completion script made from the table of commands and their parsers: commands, options, choices."""

from __future__ import annotations

import argparse
import shlex

from .commands import COMMANDS, NOUNS
from .frame import Result, _load, _parser

__all__ = ["HELP", "arguments", "run"]

HELP = "Print a completion script for a shell."
EPILOG = """\
bash:  eval "$(meshwright completion bash)"
zsh:   eval "$(meshwright completion zsh)"
fish:  meshwright completion fish | source"""

_COMMON = ("--json", "--output", "--quiet", "--debug", "--help")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help="the shell to complete for")


def run(args: argparse.Namespace) -> Result:
    script = {"bash": _bash, "zsh": _zsh, "fish": _fish}[args.shell]()
    return Result({"schema": "meshwright.completion", "version": 1, "shell": args.shell, "script": script}, script)


def _firsts() -> list[tuple[str, str]]:
    return [(noun, line) for noun, line in NOUNS.items()] + [(c[0], line) for c, (_, line) in COMMANDS.items() if len(c) == 1]


def _verbs(noun: str) -> list[tuple[str, str]]:
    return [(c[1], line) for c, (_, line) in COMMANDS.items() if len(c) == 2 and c[0] == noun]


def _options() -> dict[tuple[str, ...], dict[str, list[str]]]:
    """Long options of every command -> what may follow them, where that is a list."""
    found = {}
    for command in COMMANDS:
        actions = _parser(command, _load(command))._actions
        long = [(option, a) for a in actions for option in a.option_strings if option.startswith("--")]
        found[command] = {option: [str(c) for c in a.choices or () if str(c)] for option, a in long}
    return found


def _bash() -> str:
    options = _options()
    flags = "\n".join(f"    '{' '.join(c)}'*) words='{' '.join(o)}' ;;" for c, o in sorted(options.items(), reverse=True))  # longer names first
    values = "\n".join(f"    '{' '.join(c)} {o}') words='{' '.join(v)}' ;;" for c, own in options.items() for o, v in own.items() if v)
    cases = "\n".join(f"    {noun}) words='{' '.join(v for v, _ in _verbs(noun))}' ;;" for noun in NOUNS)
    return f"""\
_meshwright() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} words=
  local command="${{COMP_WORDS[1]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  case ${{COMP_WORDS[2]}} in -* | '') ;; *) command+=" ${{COMP_WORDS[2]}}" ;; esac
  if [[ $current == -* ]]; then words='{" ".join(_COMMON)}'; case $command in
{flags}
  esac
  elif [[ $before == --* ]]; then case "$command $before" in
{values}
  esac
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
    options = _options()
    flags = "\n".join(f"      {shlex.quote(' '.join(c))}*) choices=({' '.join(o)}) ;;" for c, o in sorted(options.items(), reverse=True))
    values = "\n".join(f"      '{' '.join(c)} {o}') choices=({shlex.join(v)}) ;;" for c, own in options.items() for o, v in own.items() if v)
    def described(pairs: list[tuple[str, str]]) -> str:
        return " ".join(shlex.quote(f"{word}:{line}") for word, line in pairs)

    cases = "\n".join(f"      {noun}) choices=({described(_verbs(noun))}) ;;" for noun in NOUNS)
    return f"""\
_meshwright() {{
  local -a choices
  local command="$words[2]" before="$words[CURRENT-1]"
  [[ -z $words[3] || $words[3] == -* ]] || command+=" $words[3]"
  if [[ $PREFIX == -* ]]; then choices=({" ".join(f"'{x}'" for x in _COMMON)}); case $command in
{flags}
    esac
  elif [[ $before == --* ]]; then case "$command $before" in
{values}
    esac
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
    for command, own in _options().items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command)
        for option, values in own.items():
            if option not in _COMMON:
                takes = f" -x -a {_quoted(' '.join(values))}" if values else ""
                lines.append(f"complete -c meshwright -n '{seen}' -l {option.removeprefix('--')}{takes}")
    return "\n".join(lines) + "\n"
