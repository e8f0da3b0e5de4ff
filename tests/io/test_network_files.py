"""Prices, jobs of networks and lists of cables: the page's examples, what is missing or wrong, and cables that add up to the links."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from meshwright.errors import FormatError, UsageError
from meshwright.fabric.fabric import Fabric
from meshwright.fabric.prices import shipped_prices
from meshwright.io.fabric.cabling import cabling_csv, graphviz
from meshwright.io.fabric.name import load_fabric
from meshwright.io.fabric.network_jobs import read_board_jobs, read_network_job
from meshwright.io.fabric.prices import read_prices
from meshwright.io.limits import MaxBytes

PAGE = Path("docs/formats.md").read_text(encoding="utf-8")
SHIPPED = Path("src/meshwright/fabric/prices.toml")


def example(name: str) -> str:
    return re.findall(rf'```toml title="{name}"\n(.*?)```', PAGE, re.DOTALL)[0]


def written(folder: Path, text: str) -> Path:
    path = folder / "file.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_examples_on_the_page(tmp_path: Path) -> None:
    assert read_prices(written(tmp_path, example("prices.toml"))).switch_usd == shipped_prices().switch_usd
    assert read_network_job(written(tmp_path, example("job.toml"))) == {"compute_s": 0.2, "all_reduce_bytes": 1e10, "all_to_all_bytes": 1e9}
    jobs = read_board_jobs(written(tmp_path, example("mix.toml")))
    assert jobs == [{"name": "pretraining", "rows": 2, "columns": 4, "arrival_s": 60.0, "duration_s": 3600.0}]
    assert read_prices(SHIPPED) == shipped_prices()


@pytest.mark.parametrize("line", ["switch_usd", "switch_ports", "optical_cable_usd", "copper_cable_usd"])
def test_a_missing_price_is_named(tmp_path: Path, line: str) -> None:
    text = "\n".join(x for x in SHIPPED.read_text(encoding="utf-8").splitlines() if not x.startswith(line))
    with pytest.raises(FormatError, match=f"prices.{line}: is missing"):
        read_prices(written(tmp_path, text))


WRONG = {
    "[prices]\n": "prices", "switch_ports = 64": "1e3", "schema = \"meshwright.prices\"": 'schema = "x"', "version = 1": "version = 2",
    "switch_usd = 14280": "switch_usd = -1", "copper_cable_usd = 272": "copper = 272",
}  # fmt: skip


@pytest.mark.parametrize("change", WRONG)
def test_what_no_price_file_is(tmp_path: Path, change: str) -> None:
    with pytest.raises(FormatError):
        read_prices(written(tmp_path, SHIPPED.read_text(encoding="utf-8").replace(change, WRONG[change])))


def test_files_that_are_missing_too_large_or_nested(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_prices(tmp_path / "none.toml")
    for text in ("#" * (MaxBytes.PRICES + 1), "x = " + "[" * 2000, 'schema = "meshwright.prices"\nversion = 1\n'):
        with pytest.raises(FormatError):
            read_prices(written(tmp_path, text))


HEAD = 'schema = "meshwright.board-jobs"\nversion = 1\n'
JOB = '[[jobs]]\nname = "a"\nrows = 1\ncolumns = 1\nduration_s = 1\n'


@pytest.mark.parametrize(
    "text", [HEAD, HEAD + JOB + JOB, HEAD + JOB.replace("duration_s = 1", "duration_s = 0"), HEAD + JOB.replace("rows = 1", "rows = 99")]
)
def test_what_no_list_of_jobs_is(tmp_path: Path, text: str) -> None:
    with pytest.raises(FormatError):
        read_board_jobs(written(tmp_path, text))
    with pytest.raises(FormatError, match="sends nothing"):
        read_network_job(written(tmp_path, 'schema = "meshwright.network-job"\nversion = 1\ncompute_s = 1\n'))


@pytest.mark.parametrize("name", ["torus:3", "dgx1-v100:1", "fat-tree:2"])
def test_cables_add_up_to_the_links(name: str) -> None:
    fabric: Fabric = load_fabric(name)
    rows = list(csv.DictReader(cabling_csv(fabric).splitlines()))
    assert sum(2 if row["ways"] == "both ways" else 1 for row in rows) == len(fabric.links)
    plugs = [(row["from"], row["from_port"], row["ways"]) for row in rows]
    assert len(set(plugs)) == len(plugs)
    drawn = graphviz(fabric)
    assert drawn.count("->") == len(rows) and drawn.count("[shape=box]") == len(fabric.switches)
