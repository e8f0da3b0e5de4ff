"""Shards of training data: archives in WebDataset's naming and MosaicML's MDS, whole and damaged."""

from __future__ import annotations

import io
import json
import struct
import tarfile

import pytest

from meshwright.data import MdsSamples, TarSamples
from meshwright.errors import FormatError, UsageError
from meshwright.io.data import read_mds_index, read_mds_offsets, read_tar_index, tar


def archive(path, files, mode="w"):
    with tarfile.open(path, mode) as made:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            made.addfile(member, io.BytesIO(data))
    return path


def mds(folder, columns, rows, **over):
    """A shard as the format's page describes it. columns: (name, encoding, fixed size or None); a sample: bytes of each column."""
    folder.mkdir(exist_ok=True)
    bodies = []
    for sample in rows:
        head = b"".join(struct.pack("<I", len(part)) for part, (_, _, size) in zip(sample, columns, strict=True) if size is None)
        bodies.append(head + b"".join(sample))
    begin = 4 * (len(bodies) + 2)
    offsets = [begin + sum(map(len, bodies[:i])) for i in range(len(bodies) + 1)]
    data = struct.pack(f"<I{len(offsets)}I", len(bodies), *offsets) + b"".join(bodies)
    (folder / "shard.00000.mds").write_bytes(data)
    shard = {
        "column_names": [c[0] for c in columns], "column_encodings": [c[1] for c in columns], "column_sizes": [c[2] for c in columns],
        "format": "mds", "compression": None, "hashes": [], "samples": len(bodies), "size_limit": 1 << 26, "version": 2, "zip_data": None,
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(data), "hashes": {}},
    } | over  # fmt: skip
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return folder


COLUMNS = [("image", "jpeg", None), ("label", "int", 8), ("caption", "str", None), ("odd", "pkl", None)]
SAMPLES = [(b"\xff\xd8\x00", struct.pack("<q", -7), "père".encode(), b"cos\nsystem\n"), (b"", struct.pack("<q", 12), b"", b"")]


def test_an_archive_is_read_by_sample(tmp_path):
    path = archive(tmp_path / "a.tar", [("x/1.jpg", b"one"), ("x/1.cls", b"1"), ("x.y/2.seg.png", b"two!"), ("x/1.JSON", b"{}"), ("README", b"")])
    found = [(s.key, [e for e, _, _ in s.files]) for s in read_tar_index(path)]
    assert found == [("x/1", ["jpg", "cls", "json"]), ("x.y/2", ["seg.png"])]
    samples = TarSamples([path, path])
    assert len(samples) == 4 and samples[2] == samples[0] == {"__key__": "x/1", "jpg": b"one", "cls": b"1", "json": b"{}"}
    assert samples[1]["seg.png"] == b"two!"
    with tarfile.open(path) as opened:  # tarfile's own reading is the oracle of the offsets
        assert {m.name: (m.offset_data, m.size) for m in opened}["x.y/2.seg.png"] == read_tar_index(path)[1].files[0][1:]


def test_what_macs_and_webdataset_itself_put_beside_samples_is_none(tmp_path):
    """One sample of all files `._*` of a folder had a range from its first byte to its last."""
    beside = ["._1.jpg", "x/._1.jpg", "x/.DS_Store", "__MACOSX/._1.jpg", "__index__", "__meta__/1.json", "x/LICENSE"]
    path = archive(tmp_path / "a.tar", [("x/1.jpg", b"one"), *((name, b"?") for name in beside), ("x/2..jpg", b"two")])
    assert [(s.key, [e for e, _, _ in s.files]) for s in read_tar_index(path)] == [("x/1", ["jpg"]), ("x/2", [".jpg"])]
    archive(path, [("1.jpg", b"one"), ("1.JPG", b"two")])
    with pytest.raises(FormatError, match=r"1\.JPG is there twice"):
        read_tar_index(path)


def test_links_and_folders_are_no_items(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as made:
        for kind, name in ((tarfile.DIRTYPE, "d"), (tarfile.SYMTYPE, "../../etc/passwd"), (tarfile.LNKTYPE, "l"), (tarfile.CHRTYPE, "c")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            made.addfile(member)
    assert read_tar_index(path) == []


def test_what_is_no_archive(tmp_path, monkeypatch):
    (tmp_path / "text.tar").write_text("hello")
    with pytest.raises(FormatError, match="not a plain tar archive"):
        read_tar_index(tmp_path / "text.tar")
    archive(tmp_path / "a.tar.gz", [("1.a", b"x")], "w:gz")
    with pytest.raises(FormatError, match="not a plain tar archive") as caught:
        read_tar_index(tmp_path / "a.tar.gz")
    assert "unpack" in str(caught.value.hint)
    with pytest.raises(UsageError, match="cannot read"):
        read_tar_index(tmp_path / "gone.tar")
    whole = archive(tmp_path / "b.tar", [("1.a", b"x" * 9000)])
    (tmp_path / "cut.tar").write_bytes(whole.read_bytes()[:4000])
    with pytest.raises(FormatError, match=r"1\.a ends beyond the file|not a plain tar"):
        read_tar_index(tmp_path / "cut.tar")
    monkeypatch.setattr(tar, "MAX_MEMBERS", 0)
    with pytest.raises(FormatError, match="more than 0 members"):
        read_tar_index(whole)


def test_an_archive_that_became_shorter(tmp_path):
    path = archive(tmp_path / "a.tar", [("1.a", b"x" * 9000)])
    samples = TarSamples([path])
    path.write_bytes(path.read_bytes()[:4000])
    with pytest.raises(UsageError, match="ends at byte 4000, an item needs 9512"):
        samples[0]


def test_mds(tmp_path):
    samples = MdsSamples(mds(tmp_path / "d", COLUMNS, SAMPLES))
    assert len(samples) == 2
    assert samples[0] == {"image": b"\xff\xd8\x00", "label": -7, "caption": "père", "odd": b"cos\nsystem\n"}  # what was pickled stays bytes
    assert samples[1] == {"image": b"", "label": 12, "caption": "", "odd": b""}
    assert MdsSamples(tmp_path / "d", transform=lambda s: s["label"])[1] == 12
    for index in (2, -1):
        with pytest.raises(IndexError):
            samples[index]


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"format": "json"}, "a shard of format json"), ({"compression": "zstd"}, "compression zstd"), ({"column_names": ["a"]}, "unlike numbers"),
        ({"raw_data": {"basename": "../shard.00000.mds", "bytes": 1}}, "a file '../shard.00000.mds'"), ({"samples": -1}, "of -1 samples"),
        ({"samples": "x"}, "no index of MDS shards"),
    ],
)  # fmt: skip
def test_an_index_that_is_refused(tmp_path, over, message):
    with pytest.raises(FormatError, match=message):
        read_mds_index(mds(tmp_path / "d", COLUMNS, SAMPLES, **over) / "index.json")


def test_damaged_shards(tmp_path):
    folder = mds(tmp_path / "d", COLUMNS, SAMPLES)
    path, data = folder / "shard.00000.mds", (folder / "shard.00000.mds").read_bytes()
    for changed, message in (
        (data[:-3], "end beyond the file"), (data[:6], "the shard holds 2 samples"), (b"", "holds 0 samples"),
        (struct.pack("<I", 3) + data[4:], "holds 3 samples"),
        (data[:4] + struct.pack("<I", 3) + data[8:], "samples overlap"), (data[:8] + struct.pack("<I", 1) + data[12:], "samples overlap"),
    ):
        path.write_bytes(changed)
        with pytest.raises(FormatError, match=message):
            read_mds_offsets(path, 2)
    with pytest.raises(UsageError, match="cannot read"):
        read_mds_offsets(folder / "gone", 2)
    with pytest.raises(UsageError, match="cannot read"):
        read_mds_index(tmp_path / "index.json")
    (tmp_path / "index.json").write_bytes(b'{"shards": [{"format": "\xae"}]}')
    with pytest.raises(FormatError, match="no index of MDS shards: "):
        read_mds_index(tmp_path / "index.json")
    (tmp_path / "index.json").write_bytes(b'{"other": ' + b"[" * 100_000)
    with pytest.raises(FormatError, match="no index of MDS shards: nested too deeply"):
        read_mds_index(tmp_path / "index.json")
    path.write_bytes(data[:16] + struct.pack("<I", 1 << 30) + data[20:])  # a column longer than its sample
    with pytest.raises(FormatError, match="column image ends beyond its sample"):
        MdsSamples(folder)[0]
    mds(folder, [("a", "bytes", None)] * 3, [(b"", b"", b"")])
    short = struct.pack("<3I", 1, 12, 16) + b"1234"
    path.write_bytes(short)
    with pytest.raises(FormatError, match="shorter than its sizes"):
        MdsSamples(folder)[0]


def test_an_index_that_is_too_large(tmp_path, monkeypatch):
    from meshwright.io.data import mds as reader

    monkeypatch.setattr(reader, "MAX_INDEX_BYTES", 10)
    with pytest.raises(FormatError, match="more than 10 bytes"):
        read_mds_index(mds(tmp_path / "d", COLUMNS, SAMPLES) / "index.json")
