"""Writes the pages of docs/reference: `python tools/reference.py`. `tests/docs/test_reference.py` compares them with what it would write.

cli.md       every command and option, from the argument parsers
python.md    the public names, from their signatures and docstrings
presets.md   fabrics by name, their options; the sources of figures of those that are no machine one can buy
methods.md   every strategy, from the docstring of its module
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parents[1] / "docs" / "reference"
EVERYWHERE = {"--help", "--json", "--quiet", "--debug"}  # options of every command
WRITTEN = "<!-- written by tools/reference.py -->\n"


# ---- commands ----------------------------------------------------------------------------------------------------------
def cli_page() -> str:
    from meshwright.cli.commands import COMMANDS, NOUNS
    from meshwright.cli.frame import _FOOTER, _load, _parser

    lines = ["# Every command and option", WRITTEN]
    lines += ["`meshwright COMMAND --help` prints the same on a terminal. Words of the field: [glossary](../glossary.md).", ""]
    lines += ["```text", _FOOTER, "```", ""]
    for noun, commands in groupby(COMMANDS, key=lambda command: command[0]):
        if noun in NOUNS:
            lines += [f"## {noun}", "", f"{sentence(NOUNS[noun])}", ""]
        for command in commands:
            name = " ".join(command)
            parser = _parser(command, _load(command))
            lines += [f"### {name}" if noun in NOUNS else f"## {name}", "", sentence(escaped(parser.description or "")), ""]
            lines += [*options(parser), ""]
            if parser.epilog:
                lines += ["```text", parser.epilog.strip("\n"), "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """One line each: positional arguments, then options, those of every command left out; groups under their title."""
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if not EVERYWHERE & set(a.option_strings) and a.help != argparse.SUPPRESS]
        if actions and group.title not in ("positional arguments", "options", "optional arguments"):
            yield from ("", f"{sentence(group.title or '')} {sentence(escaped(group.description or ''))}".rstrip(), "")
        for action in actions:
            yield f"- {shown(action)}{escaped(said(action, parser))}"


def shown(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings)
    value = action.metavar or (None if action.choices else action.dest.upper() if action.option_strings else action.dest)
    value = " ".join(value) if isinstance(value, tuple) else value or "{" + ",".join(str(c) or "''" for c in action.choices or ()) + "}"
    many = {"*": " ...", "+": " ...", "?": ""}.get(str(action.nargs), "")
    takes = "" if action.nargs == 0 else f" {value}{many}" if names else f"{value}{many}"
    return f"`{names}{takes}`" + (" (required)" if action.required and names else "")


def said(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    text = (action.help or "") % dict(vars(action), prog=parser.prog) if action.help else ""
    return f": {text}" if text else ""


def sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if not text or text[-1] in ".?!:" else text + "."


def escaped(text: str) -> str:
    """For a page: outside code, nothing is a tag, emphasis or a link."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if i % 2 else re.sub(r"([*_<\[])", r"\\\1", p) for i, p in enumerate(parts))


# ---- Python ------------------------------------------------------------------------------------------------------------
def python_page() -> str:
    import meshwright
    import meshwright.torch as front

    lines = ["# Python by name", WRITTEN]
    lines += ["Signatures and docstrings of all public names. How they are used together: [Python in use](../api.md).", ""]
    for module in (meshwright, front):
        lines += [f"## {module.__name__}", ""]
        for name in module.__all__:
            thing = getattr(module, name)
            if name in ("__version__", "plan"):  # `plan` is `plan_model`
                continue
            lines += [f"### {name}" if module is meshwright else f"### torch.{name}", ""]
            if callable(thing) and not (inspect.isclass(thing) and thing.__init__ is object.__init__):
                lines += ["```python", signature(name, thing), "```", ""]
            lines += [docstring(thing), ""]
    return "\n".join(lines).rstrip() + "\n"


def signature(name: str, thing: Any) -> str:
    try:
        text = str(inspect.signature(thing))
    except ValueError:
        return name
    text = re.sub(r"<(?:class|function|object)? ?'?([\w.]+)[^>]*>", r"\1", re.sub(r"(: |-> )'([^']*)'", r"\1\2", text))
    if len(text) + len(name) <= 100:
        return name + text
    depth, parts, last = 0, [], ""
    for letter in text[1 : text.rindex(")")]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append(last.strip())
            last = ""
        else:
            last += letter
    return f"{name}(\n" + "".join(f"    {part},\n" for part in [*parts, last.strip()]) + text[text.rindex(")") :]


def docstring(thing: Any) -> str:
    text = inspect.cleandoc(thing.__doc__ or "") if isinstance(thing.__doc__, str) else ""
    return "```text\n" + text + "\n```" if re.search(r"^    ", text, re.MULTILINE) else escaped(text)


# ---- presets -----------------------------------------------------------------------------------------------------------
def presets_page() -> str:
    from meshwright.drive.plans import read_fabric
    from meshwright.fabric.machines import MACHINES
    from meshwright.fabric.presets import PRESETS

    lines = ["# Every preset and its options", WRITTEN]
    lines += ["A fabric is named everywhere as `PRESET:n`, with options as `PRESET:n?option=value&option=value`, or as a file.", ""]
    lines += ["`meshwright fabric show NAME` prints one with its links and sources; [file formats](../formats.md) has the file.", ""]
    lines += ["[Machines that one can buy or rent](../presets.md) have a page: their names at providers, the sources of their figures.", ""]
    for preset in PRESETS.values():
        lines += [f"## {preset.name}", "", f"{sentence(escaped(preset.summary))} n is the number of {preset.unit} (default {preset.default}).", ""]
        for name, option in preset.options.items():
            choices = ": " + ", ".join(f"`{c}`" for c in option.choices) if option.choices else ""
            lines.append(f"- `{name}`: {escaped(option.help)}{choices}")
        if preset.name in MACHINES:
            lines.append("")
            continue
        fabric = read_fabric(f"{preset.name}:2")
        known = {"what this machine has"} if preset.name == "laptop" else {escaped(f"{p.what}: {p.source}") for p in fabric.provenance}
        lines += ["", "Where the figures come from (two of them):", "", *(f"- {line}" for line in sorted(known)), ""]
    return "\n".join(lines).rstrip() + "\n"


# ---- methods -----------------------------------------------------------------------------------------------------------
# The page that explains the methods of a decision, beside their own where they have one.
EXPLAINED = {
    "collective": "collectives.md", "collective.sparse": "sparse_collectives.md", "layout": "layout_search.md", "memory": "memory.md",
    "pipeline": "pipelines.md", "traffic": "traffic.md", "restart": "replanning.md", "experts": "experts.md",
    "topology": "topology.md", "place": "placement.md", "tables": "tables.md", "traffic.halo": "graphs.md", "cluster": "queues.md",
    "cluster.vms": "machines.md",
    "cluster.resize": "resizing.md",
    "data": "howto/slow_input.md",
}  # fmt: skip
OWN_PAGES = {
    "decide.layout.autoddl": "autoddl.md", "decide.layout.grid": "tensor_parallel.md", "decide.memory.monet": "monet.md",
    "decide.memory.rules": "recomputation.md", "decide.memory.selective": "recomputation.md", "decide.memory.static": "arenas.md",
    "decide.memory.fusionaware": "memory_curves.md", "decide.layout.profiled": "profiles.md", "decide.collective.cloudcollectives": "clusters.md",
}  # fmt: skip
METHOD_PAGES = {
    "decide.collective.forestcoll": "forestcoll", "decide.collective.joint": "forestcoll", "decide.collective.taccl": "taccl",
    "decide.collective.blink": "blink", "decide.collective.blueconnect": "blueconnect", "decide.collective.sparse.oktopk": "oktopk",
    "decide.collective.cloudcollectives": "cloudcollectives", "decide.layout.grid": "megatron", "decide.memory.rules": "sequence",
    "decide.memory.selective": "sequence", "decide.layout.autoddl": "autoddl", "decide.pipeline.chimera": "chimera",
    "decide.pipeline.zerobubble": "zerobubble", "decide.pipeline.vschedules": "zerobubble", "decide.pipeline.breadthfirst": "breadthfirst",
    "decide.memory.monet": "monet", "decide.memory.fusionaware": "fusionaware", "decide.memory.static": "staticmemory",
    "decide.traffic.cupcake": "cupcake", "decide.topology.directconnect": "directconnect", "decide.topology.hammingmesh": "hammingmesh",
    "decide.experts.tutel": "tutel", "decide.collective.switchml": "switchml", "decide.collective.bfb": "directconnect",
    "decide.collective.classic": "classic", "decide.collective.trees": "classic", "decide.collective.nccl": "nccl",
    "decide.collective.sparse.gtopk": "oktopk", "decide.collective.sparse.topka": "oktopk", "decide.collective.sparse.topkdsa": "oktopk",
    "decide.collective.sparse.zen": "oktopk", "decide.layout.mixed": "metis", "decide.memory.baselines": "rotor", "decide.pipeline.gpipe": "onefoneb",
    "decide.pipeline.onefoneb": "onefoneb", "decide.pipeline.interleaved": "onefoneb", "decide.pipeline.dualpipe": "dualpipe",
    "decide.pipeline.search": "zerobubble", "decide.traffic.fixed": "cupcake", "decide.traffic.adaqp": "adaqp", "decide.place": "giph",
    "decide.tables": "neuroshard", "decide.cluster.opt": "synergy", "decide.cluster.orders": "synergy", "decide.cluster.priced": "synergy",
    "decide.cluster.shares": "synergy", "decide.cluster.resize.baselines": "adares", "decide.collective.multipath": "directconnect",
    "decide.cluster.vms": "vmlifetime",
    "decide.cluster.resize.learners": "adares",
    "decide.data.coordl": "coordl",
}  # fmt: skip


def methods_page() -> str:
    from meshwright.cite import FOLKLORE
    from meshwright.drive.strategies import decisions

    lines = ["# Methods", WRITTEN]
    lines += ["Every strategy in this version: what it does, where it comes from, what the paper leaves open and what we do instead.", ""]
    lines += ["`meshwright strategies list` prints their options; `meshwright cite PLAN` the publications that a plan rests on.", ""]
    alone = []
    for decision, kinds in decisions().items():
        lines += [f"## {decision}", "", f"Explained on [a page of its own](../{EXPLAINED[decision]}).", ""]
        for module, own in groupby(sorted(kinds, key=lambda kind: kind.__module__), key=lambda kind: kind.__module__):
            strategies = list(own)
            lines += [f"### {', '.join(dict.fromkeys(k.name for k in strategies))}", "", *method(sys.modules[module].__doc__ or ""), ""]
            cites = dict.fromkeys(k.cite.line() for k in strategies if k.cite is not FOLKLORE)
            lines += [f"- From: {escaped(line)}" for line in cites]
            pages = [f"methods/{page}.md" for name, page in METHOD_PAGES.items() if f".{name}." in f"{module}."]
            pages += [page for name, page in OWN_PAGES.items() if f".{name}." in f"{module}."]
            lines += [*(f"- More: [its page](../{page})" for page in pages), ""]
            alone += [] if pages else [f"`{k.name}`" for k in strategies if k.cite is not FOLKLORE]
    if alone:
        lines += ["## Published methods without a page of their own", ""]
        lines += ["They stand above and on the page of their decision, but have no page with a picture and a measurement yet:", ""]
        lines += [", ".join(dict.fromkeys(alone)) + "."]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def method(doc: str) -> Sequence[str]:
    """The paragraphs of a strategy's module, without the citation, which is printed from the data."""
    text = re.sub(r"(^|\n)Cite: .*?(?=\n[A-Z][a-z ]+:|\n\n|\Z)", r"\1", inspect.cleandoc(doc), flags=re.DOTALL)
    paragraphs = [escaped(" ".join(p.split())) for p in re.split(r"\n\n|\n(?=(?:Left open|Deviations?|Invariant|Cost|Our answer)[^\n]{0,40}:)", text)]
    return [line for p in paragraphs if p for line in (p, "")]


PAGES_WRITTEN = {"cli.md": cli_page, "python.md": python_page, "presets.md": presets_page, "methods.md": methods_page}

if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for name, page in PAGES_WRITTEN.items():
        (PAGES / name).write_text(page(), encoding="utf-8")
