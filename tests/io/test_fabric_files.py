"""Fabric files: round trips, errors that point, hostile input."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import FormatError, UsageError
from meshwright.fabric.fabric import Device, Fabric, Link, Provenance, Switch
from meshwright.io.fabric.document import DTYPES, SPEEDS, fabric_document, fabric_from_document
from meshwright.io.fabric.toml import fabric_toml, parse_fabric_toml, read_fabric_json, read_fabric_toml
from meshwright.testing.fabrics import fabrics

HEAD = 'schema = "meshwright.fabric"\nversion = 1\nname = "f"\n'
CORES = HEAD + '[[devices]]\nname = "a"\ncpu_speeds = '
TWO = HEAD + '[[devices]]\nname = "a"\n[[devices]]\nname = "b"\n'

# ---- round trips -------------------------------------------------------------------------------------------------------
text = st.text(st.characters(exclude_categories=("C", "Z")) | st.just(" "), max_size=40)
names = st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters=",[]"), min_size=1, max_size=12)
valid_names = names.filter(lambda x: not x.startswith("-") and not x.replace("-", "").isdecimal() and not any(c.isspace() for c in x))
big = st.integers(0, 9 * 10**18)
speeds = st.lists(st.floats(1e-4, 1), max_size=3)


@st.composite
def odd_fabrics(draw):
    """Everything a file may say: strange names, every field, arrays of equal devices."""
    base = draw(st.lists(valid_names, unique=True, max_size=4))
    names = [f"{draw(st.sampled_from(['g', 'g0', 'x/']))}{i}" for i in range(draw(st.integers(0, 4)))]
    unique = list(dict.fromkeys([*names, *base])) or ["only"]
    cut = draw(st.integers(1, len(unique)))
    same = draw(st.booleans())
    device = Device(name="x", kind="cpu", group="g", memory_bytes=draw(big), flops={"fp32": 5, "int8": draw(st.integers(1, 9 * 10**18))})
    devices = [
        replace(device, name=x)
        if same
        else Device(
            name=x,
            kind=draw(st.sampled_from(["gpu", "cpu"])),
            group=draw(text),
            memory_bytes=draw(big),
            memory_bandwidth_Bps=draw(big),
            flops={d: draw(st.integers(1, 9 * 10**18)) for d in draw(st.lists(st.sampled_from(DTYPES), unique=True, max_size=2))},
            cpu_share=draw(st.floats(0, 1)),
            cpu_overrun_s=draw(st.floats(0, 1)),
            cpu_stretch=draw(st.floats(1, 8)),
            cpu_cores=(cores := draw(st.floats(0, 64))),
            cpu_speeds={k: (1.0, *draw(speeds)) for k in draw(st.lists(st.sampled_from(SPEEDS), unique=True))} if cores else {},
            watts=draw(st.floats(0, 1e5)),
        )
        for x in unique[:cut]
    ]
    switches = [Switch(name=x, group=draw(text), multicast=draw(st.booleans()), aggregate=draw(st.booleans())) for x in unique[cut:]]
    links = []
    for _ in range(draw(st.integers(0, 5)) if len(unique) > 1 else 0):
        src, dst = draw(st.permutations(unique))[:2]
        latency = st.floats(0, 3600)
        times = {"latency_s": draw(latency), "library_latency_s": draw(latency), "joules_per_byte": draw(st.floats(0, 1))}
        link = Link(src=src, dst=dst, rate_Bps=draw(st.integers(1, 9 * 10**18)), kind=draw(text)[:16], burst_bytes=draw(big), **times)
        links += [link, replace(link, src=dst, dst=src)][: draw(st.integers(1, 2))]
    notes = [Provenance(what=draw(text), source=draw(text)) for _ in range(draw(st.integers(0, 2)))]
    return Fabric(name=draw(text.filter(bool)), devices=tuple(devices), switches=tuple(switches), links=tuple(links), provenance=tuple(notes))


@settings(max_examples=200)
@given(fabrics() | odd_fabrics())
def test_toml_reads_back_equal(fabric):
    assert parse_fabric_toml(fabric_toml(fabric)) == fabric


@settings(max_examples=200)
@given(fabrics() | odd_fabrics())
def test_document_reads_back_equal_through_json(fabric):
    document = json.loads(json.dumps(fabric_document(fabric)))
    assert fabric_from_document(document) == fabric
    assert fabric_document(fabric_from_document(document)) == document


def test_files(tmp_path):
    fabric = parse_fabric_toml(TWO + '[[links]]\nsrc = "a"\ndst = "b"\nrate = "1Gbit/s"\n')
    (tmp_path / "f.toml").write_text("\ufeff" + fabric_toml(fabric).replace("\n", "\r\n"))
    (tmp_path / "f.json").write_text(json.dumps(fabric_document(fabric)))
    assert read_fabric_toml(tmp_path / "f.toml") == fabric == read_fabric_json(tmp_path / "f.json")


@pytest.mark.parametrize("path", sorted(Path("examples/fabrics").glob("*.toml")), ids=lambda p: p.name)
def test_examples_are_valid_and_connected(path):
    fabric = read_fabric_toml(path)
    fabric.require_connected()
    assert fabric.provenance


# ---- conveniences ------------------------------------------------------------------------------------------------------
def test_quantities_arrays_ranges_and_both_ways():
    fabric = parse_fabric_toml(
        HEAD
        + """
[[devices]]
name = "g"
count = 3
memory = "80GB"
memory_bandwidth = "2TB/s"
flops = { fp32 = "50GFLOP/s", int8 = 7 }
[[switches]]
name = "s0"
[[switches]]
name = "s1"
[[links]]
src = "g[0-2]"
dst = "s0"
rate = "100 MB/s"
latency = "5us"
library_latency = "1ms"
burst = "16KiB"
both_ways = true
[[links]]
src = "g[0-1]"
dst = "s[0-1]"
rate_Bps = 3
latency_s = 0
[[links]]
src = "s1"
dst = "g[0-1]"
rate_Bps = 4
"""
    )
    assert fabric.devices[2] == Device(
        name="g2", memory_bytes=80 * 10**9, memory_bandwidth_Bps=2 * 10**12, flops={"fp32": 50 * 10**9, "int8": 7}
    )
    first = Link(src="g0", dst="s0", rate_Bps=10**8, latency_s=5e-6, library_latency_s=1e-3, burst_bytes=16384)
    assert fabric.links[:2] == (first, replace(first, src="s0", dst="g0"))
    assert [(x.src, x.dst) for x in fabric.links[6:]] == [("g0", "s0"), ("g1", "s1"), ("s1", "g0"), ("s1", "g1")]


def test_a_name_array_of_one_still_gets_its_number():
    assert parse_fabric_toml(HEAD + '[[devices]]\nname = "a"\ncount = 1\n').devices[0].name == "a0"


# ---- errors that point -------------------------------------------------------------------------------------------------
def link(**fields):
    lines = {"src": '"a"', "dst": '"b"', "rate_Bps": "1"} | fields
    return TWO + "[[links]]\n" + "".join(f"{k} = {v}\n" for k, v in lines.items() if v is not None)


WRONG = [
    ("", "schema: is missing"),
    ('schema = "x"', "schema: must be 'meshwright.fabric', got 'x'"),
    ('schema = "meshwright.fabric"\nversion = 2\nname = "f"', "version: must be 1, got 2"),
    ('schema = "meshwright.fabric"\nversion = true\nname = "f"', "version: must be a whole number, got True"),
    ('schema = "meshwright.fabric"\nversion = 1\nname = ""', "name: is empty"),
    ('schema = "meshwright.fabric"\nversion = 1\nname = "a\\u0007"', "name: must be a text of at most 128 printable"),
    (HEAD, "devices: there must be at least one device"),
    (HEAD + "devices = 3", "devices: must be a list of tables, got 3"),
    (HEAD + "devices = [3]", "devices[0]: must be a table, got 3"),
    (HEAD + "[[devices]]\n", "devices[0].name: is missing"),
    (HEAD + "[[devices]]\nname = 3", "devices[0].name: must be a text"),
    (HEAD + '[[devices]]\nname = ""', "devices[0].name: must not be empty"),
    (HEAD + '[[devices]]\nname = "a b"', "devices[0].name: must not"),
    (HEAD + '[[devices]]\nname = "a,b"', "devices[0].name: must not"),
    (HEAD + '[[devices]]\nname = "a[1-2]"', "devices[0].name: must not"),
    (HEAD + '[[devices]]\nname = "-a"', "devices[0].name: must not"),
    (HEAD + '[[devices]]\nname = "3-4"', "devices[0].name: must not"),
    (HEAD + f'[[devices]]\nname = "{"a" * 129}"', "devices[0].name: must be a text of at most 128"),
    (HEAD + '[[devices]]\nname = "a"\ncount = 0', "devices[0].count: must be > 0, got 0"),
    (HEAD + '[[devices]]\nname = "a"\ncount = 16385', "devices[0].count: must be <= 16384"),
    (HEAD + '[[devices]]\nname = "a"\ncount = 9000\n[[devices]]\nname = "b"\ncount = 9000', "devices[1].count: a fabric has at most 16384"),
    (HEAD + '[[devices]]\nname = "a"\nkind = "tpu"', "devices[0].kind: must be 'gpu' or 'cpu', got 'tpu'"),
    (HEAD + '[[devices]]\nname = "a"\ncpu_share = 1.5', "devices[0].cpu_share: must be between 0 and 1, got 1.5"),
    (HEAD + '[[devices]]\nname = "a"\ncpu_share = nan', "devices[0].cpu_share: must be finite, got nan"),
    (CORES + "{ memory = [1.0, 0.5] }", "devices[0].cpu_speeds: are of the cores of a machine"),
    (CORES + "{ disk = [1.0] }\ncpu_cores = 2", "devices[0].cpu_speeds"),
    (CORES + "7\ncpu_cores = 2", "devices[0].cpu_speeds"),
    (CORES + "{ memory = 0.5 }\ncpu_cores = 2", "devices[0].cpu_speeds.memory: must be a list of 1 to"),
    (CORES + "{ memory = [] }\ncpu_cores = 2", "devices[0].cpu_speeds.memory: must be a list of 1 to"),
    (CORES + "{ memory = [0.9] }\ncpu_cores = 2", "devices[0].cpu_speeds.memory: must begin with 1"),
    (CORES + "{ memory = [1.0, 0.0] }\ncpu_cores = 2", "devices[0].cpu_speeds.memory: must begin with 1, the speed of one alone, and none may be"),
    (CORES + "{ compute = [1.0, 1.5] }\ncpu_cores = 2", "devices[0].cpu_speeds.compute[1]: must be between 0 and 1, got 1.5"),
    (CORES + "{ compute = [1.0, nan] }\ncpu_cores = 2", "devices[0].cpu_speeds.compute[1]: must be finite"),
    (CORES + "{ compute = [true] }\ncpu_cores = 2", "devices[0].cpu_speeds.compute[0]: must be a number"),
    (HEAD + '[[devices]]\nname = "a"\ncpu_stretch = 0.5', "devices[0].cpu_stretch: must be at least 1, got 0.5"),
    (HEAD + '[[devices]]\nname = "a"\nmemory_bytes = -1', "devices[0].memory_bytes: must be >= 0, got -1"),
    (HEAD + '[[devices]]\nname = "a"\nmemory = "80"', "devices[0].memory: has no unit"),
    (HEAD + '[[devices]]\nname = "a"\nmemory = "80 apples"', "devices[0].memory: unknown unit 'apples'"),
    (HEAD + '[[devices]]\nname = "a"\nmemory = 80', "devices[0].memory: must be a text with a unit, got 80"),
    (HEAD + '[[devices]]\nname = "a"\nmemory = "1GB"\nmemory_bytes = 1', "devices[0].memory: give either memory or memory_bytes"),
    (HEAD + '[[devices]]\nname = "a"\nmemory_bytes = 0x' + "f" * 4000, "must be <= 9000000000000000000, got an integer of 16000 bits"),
    (HEAD + '[[devices]]\nname = "a"\nmemory_bytes = ' + "9" * 5000, "f.toml: "),
    (HEAD + '[[devices]]\nname = "a"\nflops = 3', "devices[0].flops: must be a table, got 3"),
    (HEAD + '[[devices]]\nname = "a"\nflops = { float = 3 }', "devices[0].flops.float: unknown dtype"),
    (HEAD + '[[devices]]\nname = "a"\nflops = { fp32 = 0 }', "devices[0].flops.fp32: must be > 0, got 0"),
    (HEAD + '[[devices]]\nname = "a"\nflops = { fp32 = 1.5 }', "devices[0].flops.fp32: must be a whole number, got 1.5"),
    (HEAD + '[[devices]]\nname = "a"\nflops = { fp32 = "fast" }', "devices[0].flops.fp32: must be a number with a unit"),
    (HEAD + '[[devices]]\nname = "a"\nmemori = 3', "devices[0].memori: unknown field"),
    (TWO + '[[devices]]\nname = "a"', "devices[2].name: 'a' is taken by devices[0]"),
    (TWO + '[[switches]]\nname = "b"', "switches[0].name: 'b' is taken by devices[1]"),
    (TWO + '[[switches]]\nname = "s"\nmulticast = 1', "switches[0].multicast: must be true or false, got 1"),
    (TWO + '[[switches]]\nname = "s"\ncount = 2', "switches[0].count: unknown field"),
    (TWO + "[[provenance]]\nwhat = 'x'", "provenance[0].source: is missing"),
    (TWO + "extra = 1", "devices[1].extra: unknown field"),
    (TWO + "[more]\nx = 1", "more: unknown field"),
    (link(rate_Bps=-100), "links[0].rate_Bps: must be > 0, got -100"),
    (link(rate_Bps="1.5"), "links[0].rate_Bps: must be a whole number, got 1.5"),
    (link(rate_Bps="inf"), "links[0].rate_Bps: must be a whole number, got inf"),
    (link(rate_Bps='"1GB/s"'), "links[0].rate_Bps: must be a whole number, got '1GB/s'"),
    (link(rate_Bps=None), "links[0]: needs rate or rate_Bps"),
    (link(rate_Bps=None, rate='"0GB/s"'), "links[0].rate: must be > 0, got 0"),
    (link(rate_Bps=None, rate='"1Gbps"'), "links[0].rate: 'Gbps' is read in two ways"),
    (link(latency_s="nan"), "links[0].latency_s: must be finite, got nan"),
    (link(latency_s="-1e-6"), "links[0].latency_s: must be between 0 and 3600, got -1e-06"),
    (link(latency_s="true"), "links[0].latency_s: must be a number, got True"),
    (link(latency='"2 hours"'), "links[0].latency: unknown unit 'hours'"),
    (link(burst_bytes="-1"), "links[0].burst_bytes: must be >= 0"),
    (link(kind='"' + "x" * 17 + '"'), "links[0].kind: must be a text of at most 16"),
    (link(both_ways='"yes"'), "links[0].both_ways: must be true or false, got 'yes'"),
    (link(src=None), "links[0].src: is missing"),
    (link(src='"c"'), "links[0].src: no device or switch is called 'c'"),
    (link(dst='"a"'), "links[0].dst: a link must join two different actors, got 'a' twice"),
    (link(dst='"b[0-1]"'), "links[0].dst: no device or switch is called 'b0'"),
    (link(dst='"b[3-1]"'), "links[0].dst: is not a range"),
    (link(dst='"b[0-99999999]"'), "links[0].dst: is not a range"),
    (HEAD + "[[devices]]\nname='d'\ncount=5\n[[links]]\nsrc='d[0-1]'\ndst='d[2-4]'\nrate_Bps=1", "links[0].dst: names 3 actors, src names 2"),
    (HEAD + "[[devices]]\nname='d'\n[[switches]]\nname='s'\naggregate_memory='2MiB'", "switches[0].aggregate_bytes: is the memory of a switch with"),
    ("x = [1", "f.toml: "),
    ("a = " + "[" * 5000, "is nested too deeply"),
    ("a = " + "{a=" * 4000, "is nested too deeply"),
    ("a" + ".a" * 70 + " = 1", "line 1: has more than 64 dots outside texts"),
    ("x = { s = \"a.b\", 'q'" + ".a" * 70 + " = 1 } # '", "line 1: has more than 64 dots"),
    ('\n\na = """x\n', "line 3: texts of several lines"),
    ("a = '''x\n", "line 1: texts of several lines"),
    ("#" + "x" * 20_000, "line 1: is longer than 16384"),
    ("a = 1\na = 2", "f.toml: "),
]


@pytest.mark.parametrize(("content", "message"), WRONG, ids=[m[:40] for _, m in WRONG])
def test_wrong_file(content, message):
    with pytest.raises(FormatError) as caught:
        parse_fabric_toml(content, where="f.toml")
    assert str(caught.value).startswith("f.toml: ") and message in str(caught.value)
    assert len(str(caught.value)) < 400 and caught.value.exit_code == 1


def test_the_example_of_the_design():
    content = TWO + '[[links]]\nsrc="a"\ndst="b"\nrate_Bps=1\n' * 14 + '[[links]]\nsrc="a"\ndst="b"\nrate_Bps=-100\n'
    with pytest.raises(FormatError) as caught:
        parse_fabric_toml(content)
    assert str(caught.value) == "fabric.toml: links[14].rate_Bps: must be > 0, got -100"
    assert caught.value.data == {"field": "links[14].rate_Bps"}


def test_a_typing_error_gets_a_suggestion():
    with pytest.raises(FormatError) as caught:
        parse_fabric_toml(link(latncy_s="1"))
    assert caught.value.hint == "did you mean 'latency_s'?"
    with pytest.raises(FormatError) as caught:
        parse_fabric_toml(TWO + "[[switches]]\nname='switch0'\n[[links]]\nsrc='a'\ndst='swich0'\nrate_Bps=1")
    assert caught.value.hint == "did you mean 'switch0'?"


@pytest.mark.parametrize("count", ["links", "switches", "provenance"])
def test_too_many_entries(count, monkeypatch):
    import meshwright.io.fabric.document as module

    monkeypatch.setattr(module, "MAX_LINKS", 3)
    monkeypatch.setattr(module, "MAX_SWITCHES", 3)
    entry = {"links": {"src": "a", "dst": "b", "rate_Bps": 1}, "switches": {"name": "s"}, "provenance": {"what": "", "source": ""}}[count]
    document = {"schema": "meshwright.fabric", "version": 1, "name": "f", "devices": [{"name": "a"}, {"name": "b"}], count: [entry] * 5000}
    with pytest.raises(FormatError, match=rf"{count}: has 5000 entries; at most"):
        fabric_from_document(document)


def test_links_multiply_only_up_to_the_cap(monkeypatch):
    import meshwright.io.fabric.document as module

    monkeypatch.setattr(module, "MAX_LINKS", 5)
    content = HEAD + '[[devices]]\nname="d"\ncount=4\n[[switches]]\nname="s"\n[[links]]\nsrc="d[0-3]"\ndst="s"\nrate_Bps=1\nboth_ways=true\n'
    with pytest.raises(FormatError, match=r"links\[0\]: a fabric has at most 5 links"):
        parse_fabric_toml(content)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="cannot read the fabric: Is a directory"):
        read_fabric_toml(tmp_path)
    (tmp_path / "b.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(FormatError, match=r"b.toml: is not UTF-8 text \(byte 8\)"):
        read_fabric_toml(tmp_path / "b.toml")
    with (tmp_path / "big.toml").open("wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(FormatError, match=r"big.toml: is larger than 16777216 bytes"):
        read_fabric_toml(tmp_path / "big.toml")
    empty = '{"schema": "meshwright.fabric", "version": 1, "name": "f", "devices": null}'
    for index, content in enumerate(["", "[" * 100_000, '{"a": 1, "a": 2}', "[]", empty]):
        (tmp_path / f"{index}.json").write_text(content)
        with pytest.raises(FormatError, match=rf"^{index}.json: "):
            read_fabric_json(tmp_path / f"{index}.json")


# ---- anything at all ---------------------------------------------------------------------------------------------------
KEYS = ["name", "devices", "links", "src", "rate", "flops", "count", "x"]
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300)
@given(fabrics(max_devices=3), st.data())
def test_a_document_with_one_wrong_place_is_read_or_refused_with_FormatError(fabric, data):
    document = fabric_document(fabric)
    at = document
    while True:  # walk down at random, then put junk there
        key = data.draw(st.sampled_from(sorted(at)) if isinstance(at, dict) else st.integers(0, len(at) - 1))
        if isinstance(at[key], dict | list) and at[key] and data.draw(st.booleans()):
            at = at[key]
            continue
        at[key] = data.draw(junk)
        break
    try:
        fabric_from_document(document)
    except FormatError as error:
        assert str(error).startswith("fabric: ")


@settings(max_examples=200)
@given(st.text(max_size=200) | st.lists(st.sampled_from(["[[links]]\n", *"a.='{}[]\n1#", '"']), max_size=40).map("".join))
def test_any_text_is_refused_with_FormatError(content):
    with pytest.raises(FormatError):
        parse_fabric_toml(content)
