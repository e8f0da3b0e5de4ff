"""Experts on the page: cells of the maps counted, hottest experts and copies told, choices of a layer's plan, and nothing for other plans."""

from __future__ import annotations

import re
from dataclasses import replace

from page_plans import content

from meshwright.decide.experts import ExpertProblem, ExpertShape, Tutel
from meshwright.drive.experts import plan_experts
from meshwright.drive.plans import read_fabric
from meshwright.report.page.document import report_page
from meshwright.report.page.experts import MAX_COLUMNS, MAX_ROWS, experts_section
from meshwright.report.page.gather import gather


def with_loads(loads):
    page = content("run")
    return replace(page, run=replace(page.run, expert_loads=loads))


def test_a_map_has_a_cell_for_every_step_and_expert_that_got_rows():
    steps = [[0, 8, 4, 1], [0, 8, 0, 2], [3, 8, 0, 0]]
    text = experts_section(with_loads({"a<b": steps}))
    shades = {float(o): len(d.split("z")) - 1 for d, o in re.findall(r'<path d="([^"]*)" class="heat" fill-opacity="([0-9.]+)"', text)}
    # eight shades: 8 rows the darkest, 1 and less than that the lightest that is seen
    assert shades == {1.0: 3, 0.5: 1, 0.375: 1, 0.25: 1, 0.125: 1} and 'viewBox="0 0 30 40"' in text
    assert "a&lt;b: 3 steps, 4 experts; expert 1 got most, 2.82 times the mean" in text and "a<b" not in text


def test_long_runs_and_many_experts_are_thinned_and_none_is_left_out():
    text = experts_section(with_loads({"a": [[1] * 300] * 1000}))
    wide, high = (int(x) // 10 for x in re.search(r'viewBox="0 0 (\d+) (\d+)" preserveAspectRatio="none" role="img"', text).groups())
    assert (wide, high) == (MAX_COLUMNS, 60) and high <= MAX_ROWS and len(re.findall("z", text.split('d="')[1].split('"')[0])) == wide * high
    assert "no rows" in experts_section(with_loads({"a": [[0, 0]]}))


def test_plans_without_experts_say_nothing_of_them():
    assert experts_section(content("run")) is None and 'id="experts"' not in report_page(content("pipeline")).html


def test_the_page_of_a_layers_plan_names_its_choices():
    fabric = read_fabric("laptop:2")
    shape = ExpertShape(ranks=2, experts=1, model=6, inner=8)
    problem = ExpertProblem(fabric=fabric, ranks=tuple(d.name for d in fabric.devices), shape=shape, capacities=(8, 304))
    plan, ranked = plan_experts(problem, Tutel(chunks=(1,), algorithms=("linear",)))
    html = report_page(gather(plan, plan_file="experts.json")).html
    assert "expert layer" in html and all(f"up to {rows[0].capacity}" in html for rows in ranked)
