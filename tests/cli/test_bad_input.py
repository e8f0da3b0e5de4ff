"""What a first user gets wrong: every refusal is one line that says what, with the exit code that fits; nothing hangs, nothing is silently wrong."""

import json
import os

import numpy as np
import pytest

from meshwright.check import check_program
from meshwright.cli import main
from meshwright.decide.collective import OPERATIONS, STRATEGIES, CollectiveProblem, collective_bound
from meshwright.decide.collective.program_time import simulated_time_s
from meshwright.errors import Unsupported
from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.io.fabric.name import load_fabric, select_devices
from meshwright.io.fabric.toml import fabric_toml

MB = 10**6
JUNK = bytes(range(128, 256)) * 20
GOOD_XML = (
    '<system version="1"><cpu numaid="0" arch="x86_64"><pci busid="0000:11:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" '
    'link_width="16"><gpu dev="0" sm="80"/></pci></cpu></system>'
)


def refused(capsys, words: list[str], code: int, *parts: str) -> None:
    assert main(words) == code, (words, capsys.readouterr())
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and len(err.splitlines()) <= 2 and "Traceback" not in err and "bug in meshwright" not in err, err
    for part in parts:
        assert part in err, (words, err)


def fabric_of(devices: str, links: dict[str, int], switches: str = "", groups: dict[str, str] | None = None) -> Fabric:
    """`a-b`: a cable, `a>b`: one way; rates in B/s."""
    found = []
    for ends, rate in links.items():
        a, way, b = ends[0], ends[1], ends[2:]
        found.append(Link(src=a, dst=b, rate_Bps=rate, latency_s=1e-6))
        found += [Link(src=b, dst=a, rate_Bps=rate, latency_s=1e-6)] if way == "-" else []
    group = groups or {}
    return Fabric(
        name="odd", devices=tuple(Device(name=d, group=group.get(d, "")) for d in devices),
        switches=tuple(Switch(name=s, group=group.get(s, "")) for s in switches), links=tuple(found),
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for ending in ("", ".toml", ".json", ".xml"):
        (tmp_path / f"junk{ending}").write_bytes(JUNK)
        (tmp_path / f"empty{ending}").write_bytes(b"")
        (tmp_path / f"folder{ending}").mkdir()
    (tmp_path / "node.xml").write_text(GOOD_XML)
    apart = fabric_of("abcd", {"a-b": MB, "c-d": MB})
    (tmp_path / "apart.toml").write_text(fabric_toml(apart))
    (tmp_path / "oneway.toml").write_text(fabric_toml(fabric_of("abc", {"a-b": MB, "b>c": MB})))
    long = fabric_of("ab", {"a>b": 9 * 10**18, "b>a": 9 * 10**18 - 1})
    (tmp_path / "long.toml").write_text(fabric_toml(long))
    return tmp_path


# ---- files ---------------------------------------------------------------------------------------------------------------
READERS = [
    ["fabric", "show"], ["fabric", "subset", "--devices", "0"], ["collective", "bound", "all-gather", "--size", "1MiB", "--fabric"],
    ["collective", "plan", "all-gather", "--size", "1MiB", "--strategy", "ring", "--fabric"],
    ["collective", "compare", "all-gather", "--sizes", "1KiB", "--strategies", "ring", "--fabric"],
    ["collective", "replan", "all-gather", "--size", "1MiB", "--without", "a", "--fabric"], ["collective", "nccl", "all-reduce", "--fabric"],
    ["collective", "order", "--fabric"], ["collective", "groups", "--group", "all-reduce:1MiB:0-1", "--fabric"],
    ["collective", "export", "all-reduce", "--format", "nccl-tuner", "-o", "o.csv", "--fabric"],
]  # fmt: skip


@pytest.mark.parametrize("reader", READERS, ids=" ".join)
def test_fabrics_that_are_none(capsys, folder, reader):
    for name, code, part in [
        ("junk.toml", 1, "not UTF-8"), ("junk.json", 1, "not UTF-8"), ("empty.toml", 1, "schema: is missing"), ("empty.json", 1, "empty.json"),
        ("folder.toml", 2, "Is a directory"), ("nowhere.toml", 2, "No such file"), ("junk", 2, "ends in neither .toml nor .json"),
        ("node.xml", 2, "fabric import node.xml"), ("nosuch", 2, "no fabric is called"), ("", 2, "no fabric is called ''"),
        ("dgx-h100:0", 2, "must be between 1"), ("dgx-h100:two", 2, "must be a whole number"), ("dgx-h100:2?net=no", 2, "must be one of"),
    ]:  # fmt: skip
        refused(capsys, [*reader, name], code, part)


def test_schedules_and_clusters_that_are_none(capsys, folder):
    for words in (["collective", "check"], ["collective", "import", "-o", "o.json"], ["collective", "export", "-o", "o.xml"], ["fabric", "import"]):
        for name in ("junk", "empty", "junk.xml", "empty.json", "/dev/null"):
            refused(capsys, [*words, name], 1)
        for name in ("folder", "nowhere.xml"):
            refused(capsys, [*words, name], 2, name)
    for name in ("junk", "folder", "/dev/null"):
        refused(capsys, ["collective", "order", "--matrix", name], 2 if name == "folder" else 1)
        refused(capsys, ["collective", "import", "--format", "nccl-tuner", name], 2 if name == "folder" else 1)
    refused(capsys, ["fabric", "import", "apart.toml"], 2, "is a document of meshwright already")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable(capsys, folder):
    (folder / "shut.toml").write_text("")
    (folder / "shut.toml").chmod(0)
    refused(capsys, ["fabric", "show", "shut.toml"], 2, "Permission denied")


HOSTILE_XML = {
    "doctype": ('<!DOCTYPE system [<!ENTITY a "b">]>' + GOOD_XML, "has a DOCTYPE"),
    "bomb": ('<!DOCTYPE s [<!ENTITY a "xx"><!ENTITY b "&a;&a;">]><system version="&b;"/>', "has a DOCTYPE"),
    "deep": ('<system version="1">' + '<pci busid="0:1">' * 5000 + "</pci>" * 5000 + "</system>", "nests deeper"),
    "attribute": ('<system version="1"><cpu arch="' + "x" * 10**6 + '"/></system>', "is longer than"),
    "unclosed": ('<system version="1"><cpu>', "line 1"),
    "second root": (GOOD_XML + "<system/>", "line 1"),
    "entity": ('<system version="&x;"/>', "line 1"),
}


@pytest.mark.parametrize("kind", HOSTILE_XML)
def test_hostile_xml(capsys, folder, kind):
    text, part = HOSTILE_XML[kind]
    (folder / "bad.xml").write_text(text)
    refused(capsys, ["fabric", "import", "bad.xml"], 1, "bad.xml", part)
    assert main(["collective", "check", "bad.xml"]) in (1, 4) and "bug in meshwright" not in capsys.readouterr().err
    assert main(["fabric", "lint", "bad.xml"]) == 1 and "[format]" in capsys.readouterr().out


# ---- fabrics that cannot -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", OPERATIONS)
def test_disconnected_and_one_way_fabrics_name_the_cut(capsys, folder, op):
    for name, ends in (("apart.toml", ("a", "c")), ("oneway.toml", ("c", "a"))):
        for verb in ("bound", "plan"):
            words = ["collective", verb, op, "--fabric", name, "--size", "4KiB", *(["--strategy", "ring"] if verb == "plan" else [])]
            if op in ("broadcast", "scatter") and name == "oneway.toml":
                assert verb == "plan" or main(words) == 0  # from a everything can be reached
                capsys.readouterr()
                continue
            code = main(words)
            err = capsys.readouterr().err
            assert code in (2, 3) and ("no path from" in err or "does not do" in err or "has no" in err), (words, err)
            if verb == "bound":
                assert code == 3 and any(end in err for end in ends)


def test_rates_with_huge_common_denominators(capsys, folder):
    refused(capsys, ["collective", "bound", "all-gather", "--fabric", "long.toml", "--size", "1GiB"], 2, "exact 64-bit max-flow is not possible")
    assert main(["fabric", "lint", "long.toml"]) == 1 and "[rates-too-long]" in capsys.readouterr().out


# ---- arguments -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["--size", "0"], 2, "not a positive multiple"), (["--size", "1B"], 2, "not a positive multiple"), (["--size", "6"], 2, "not a positive"),
        (["--size", "-4"], 2, "must be a number with a unit"), (["--size", "1e9"], 2, "--size"), (["--size", "NaN"], 2, "--size"),
        (["--devices", "0"], 2, "at least 2 ranks"), (["--devices", "0,0"], 2, "named twice"), (["--devices", "0-2,1"], 2, "named twice"),
        (["--devices", "3-0"], 2, "not a range"), (["--devices", ""], 2, "has no device ''"), (["--devices", "9"], 2, "not a range"),
        (["--root", "4"], 2, "root: must be 0..3"), (["--root", "-1"], 2, "--root: must be >= 0"), (["--element-bytes", "0"], 2, "must be >= 1"),
        (["--shards", "4,4"], 2, "2 shards for 4 ranks"), (["--shards", "4,4,4,4"], 2, "add up to 16 B"), (["--shards", "x"], 2, "--shards"),
        (["--peers", "1,2,3,0"], 2, "has no peers"), (["--without", "nope"], 2, "no device, switch or server 'nope'"),
        (["--without", ","], 2, "an empty name"), (["--without", "0,island0/cpu0"], 2, "named twice"),
        (["--without", "island0,island1"], 3, "no device"), (["--without", "island0/switch->island1/switch"], 3, "no path from"),
        (["--degrade", "island0=0"], 2, "above 0 and below 1"), (["--degrade", "island0=1/0"], 2, "above 0"),
        (["--degrade", "x"], 2, "NAME=FRACTION"),
        (["--sizee", "1"], 2, "did you mean `--size`"), (["extra"], 2, "unknown argument"),
    ],
)  # fmt: skip
def test_problems_that_are_none(capsys, words, code, part):
    for verb in (["bound"], ["plan", "--strategy", "ring"]):
        refused(capsys, ["collective", *verb, "all-gather", "--fabric", "two-islands", "--size", "1MiB", *words], code, part)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("plan all-gather --seed -1", "2^63 - 1"), (f"plan all-gather --seed {2**70}", "2^63 - 1"), ("plan all-gather --time-limit nan", "above 0"),
        ("plan all-gather --time-limit 0", "above 0"), ("plan all-gather --pieces 0", ">= 1"), ("plan all-gather --pieces 1000000000", "at most"),
        ("plan all-gather --trees x", ">= 1"), ("plan all-gather --strategy nope", "there are: ring"),
        ("plan all-gather --out nowhere/p.json", "nowhere"),
        ("plan nothing", "no collective 'nothing'"), ("replan all-gather", "no part is down"), ("replan all-gather --without 0 --seed -1", "2^63"),
        ("replan broadcast --without 0", "the root island0/cpu0 is taken out"), ("replan all-gather --without 0,1,2", "1 device is left"),
    ],
)  # fmt: skip
def test_wrong_flags_of_planning(capsys, words, part):
    first, *rest = words.split()
    refused(capsys, ["collective", first, *rest[:1], "--fabric", "two-islands", "--size", "1MiB", *rest[1:]], 2, part)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("compare all-gather --fabric two-islands --sizes 0", "not a positive multiple"),
        ("compare all-gather --fabric two-islands --sizes 1KiB --strategies ring,nope", "no collective strategy 'nope'"),
        ("compare all-gather --fabric two-islands --sizes 1KiB --time-limit nan", "above 0"),
        ("nccl all-reduce --fabric dgx-h100:2 --devices 0", "at least 2 devices"),
        ("nccl all-reduce --fabric dgx-h100:2 --sizes 0", "names no size"),
        ("nccl all-reduce --fabric dgx-h100:2 --sizes 8:4", "is empty"),
        ("nccl all-reduce --fabric dgx-h100:2 --algo nope", "no algorithm 'nope'"),
        ("nccl all-reduce --fabric laptop:2", "NCCL runs on GPUs"),
        ("order all-reduce --fabric two-islands --devices 0", "at least two devices"),
        ("order all-reduce --fabric two-islands --seed -1", "2^63 - 1"),
        ("order all-reduce --fabric two-islands --probe a=b:c", "one source of costs"),
        ("order", "give one source of costs"),
        ("groups --fabric two-islands --group all-reduce:1MiB", "must be OP:SIZE:DEVICES"),
        ("groups --fabric two-islands --group all-reduce:0:0-1", "not a positive multiple"),
        ("groups --fabric two-islands --group all-reduce:1MiB:0,0", "named twice"),
        ("groups --fabric two-islands --group all-reduce:1MiB:0-1/", "no device ''"),
    ],
)
def test_wrong_flags_of_other_commands(capsys, words, part):
    refused(capsys, ["collective", *words.split()], 2, part)


# ---- plans ---------------------------------------------------------------------------------------------------------------
def test_plans_that_were_edited_or_cut(capsys, folder):
    words = ["collective", "plan", "all-gather", "--fabric", "two-islands", "--size", "64KiB", "--strategy", "ring", "--pieces", "2"]
    words += ["-o", "plan.json"]
    assert main(words) == 0 and main(["collective", "check", "plan.json"]) == 0
    capsys.readouterr()
    whole = (folder / "plan.json").read_bytes()
    for at in range(0, len(whole) - 2, max(1, len(whole) // 40)):
        (folder / "cut.json").write_bytes(whole[:at])
        refused(capsys, ["collective", "check", "cut.json"], 1, "cut.json")
    for edit in (
        lambda d: d["job"]["collective"].update(size_bytes=65540), lambda d: d["job"]["collective"].update(op="all-reduce"),
        lambda d: d["job"]["collective"].update(size_bytes=65532), lambda d: d["job"]["collective"]["ranks"].reverse(),
        lambda d: d["job"]["collective"]["ranks"].pop(), lambda d: d["placement"].__setitem__(1, d["placement"][0]),
        lambda d: d["target_fabric"]["links"][0].update(rate_Bps=5),
        lambda d: d["bound"].update(value="1/7"), lambda d: d["placement"].reverse(), lambda d: d["prediction"].update(time_s=1e-9),
        lambda d: d["target_fabric"]["links"].pop(), lambda d: d["programs"].clear(), lambda d: d.update(version=99), lambda d: d.update(extra=1),
    ):  # fmt: skip
        document = json.loads(whole)
        edit(document)
        (folder / "edited.json").write_text(json.dumps(document))
        code = main(["collective", "check", "edited.json"])
        out, err = capsys.readouterr()
        assert "bug in meshwright" not in err
        assert code in (1, 2, 4) and (code != 4 or ": wrong" in out), (code, out, err)
    for words, code, part in [
        (["export", "plan.json", "-o", "o.xml", "--blocks", "0"], 2, "must be >= 1"), (["export", "plan.json", "-o", "folder"], 2, "is a folder"),
        (["export", "plan.json", "-o", "o.json", "--format", "mscclpp-json", "--min-size", "5B", "--max-size", "4B"], 2, "is below"),
        (["export", "plan.json", "-o", "o.xml", "--fabric", "laptop"], 2, "do not apply"), (["import", "plan.json", "-o", "o.json"], 1, "already"),
        (["check", "plan.json", "--fifo", "0"], 2, "must be >= 1"), (["import", "plan.json"], 2, "--out is missing"),
    ]:  # fmt: skip
        refused(capsys, ["collective", *words], code, part)


# ---- every strategy, every operation, small odd fabrics ------------------------------------------------------------------
ODD = {
    "pair": fabric_of("ab", {"a-b": 100 * MB}),
    "one-way ring": fabric_of("abc", {"a>b": 100 * MB, "b>c": 70 * MB, "c>a": 30 * MB}),
    "star of five": fabric_of("abcde", {f"{x}-s": r * MB for x, r in zip("abcde", (10, 20, 30, 40, 50), strict=True)}, "s"),
    "seven behind switches": fabric_of("abcdefg", {**{f"{x}-{'s' if x < 'd' else 't'}": 100 * MB for x in "abcdefg"}, "s-u": 50 * MB, "u-t": 40 * MB},
                                       "stu"),
    "prime rates": fabric_of("abc", {"a-b": 999999937, "b-c": 2147483647, "a-c": 1000000007}),
    "3+5": fabric_of("abcdefgh", {**{f"{x}-{'s' if x < 'd' else 't'}": 100 * MB for x in "abcdefgh"}, "s-u": 25 * MB, "t-u": 25 * MB}, "stu",
                     {**dict.fromkeys("abcs", "A"), **dict.fromkeys("defght", "B")}),
    "part of two A100 boxes": select_devices(load_fabric("dgx-a100:2"), "0,3,9"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_every_strategy_is_right_or_refuses(name):
    fabric = ODD[name]
    n = len(fabric.devices)
    planned = 0
    for turn, op in enumerate(OPERATIONS, [*ODD].index(name)):
        # every operation meets both sizes, and every fabric does, though not all three each other
        for size, more in ((4, {}), (4 * n + 4, {"root": n - 1}))[turn % 2 :: 2]:
            problem = CollectiveProblem.on(fabric, op, size, **more)
            bound_s = float(collective_bound(problem).exact)
            for kind in STRATEGIES:
                if kind.name == "taccl" and (n > 5 or size > 4):
                    continue  # minutes in all; tests/decide/collective/test_taccl.py has them
                try:
                    plan = kind().plan(problem, rng=np.random.default_rng(0))
                except Unsupported as error:
                    assert error.message
                    continue
                verdict = check_program(plan.program)
                assert verdict.ok, (op, size, kind, verdict.findings)
                if not plan.switches:
                    assert simulated_time_s(plan.program, fabric, problem.ranks, None) >= bound_s * (1 - 1e-9), (op, size, kind)
                planned += 1
    assert planned > 30


def test_a_value_with_a_dash_is_explained_and_so_are_shares_and_roots(capsys: pytest.CaptureFixture[str]) -> None:
    """What a newcomer met: `--size -5MB` was said to lack an argument; a density and a root were refused without what to do."""
    for words, hint in (
        (["collective", "plan", "all-reduce", "--fabric", "laptop:4", "--size", "-5MB"], "begins with a dash is written --size=-..."),
        (["collective", "plan", "all-reduce", "--fabric", "laptop:4", "--size", "1MB", "--out"], "is written --out=-..."),
        (["collective", "sparse", "--fabric", "laptop:4", "--elements", "100", "--density", "2"], "0.01 is 1 %"),
        (["collective", "plan", "broadcast", "--fabric", "laptop:4", "--size", "1MB", "--root", "7"], "counts the ranks of this call, from 0"),
    ):
        assert main(words) == 2
        assert hint in capsys.readouterr().err.partition("hint: ")[2]


# ---- strategies that do not do the operation -------------------------------------------------------------------------------
@pytest.mark.parametrize("op", OPERATIONS)
def test_a_strategy_without_the_operation_is_refused_before_a_fabric_is_read(capsys, op):
    for kind in STRATEGIES:
        if op in kind.operations:
            continue
        # The fabric does not exist: the strategy is refused first, with those that do it.
        assert main(["collective", "plan", op, "--strategy", kind.name, "--fabric", "none.toml", "--size", "4KiB"]) == 2
        err = capsys.readouterr().err
        assert f"{kind.name} does not do {op}; it does" in err and f"{op} is done by" in err and "direct" in err, err
