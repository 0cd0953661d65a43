"""The comparison and sweep pages in a real headless Chromium."""

import importlib.util
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import perfmodel
from perfmodel.cli.diff import diff
from perfmodel.report.sweep import SweepChoice, render_sweep_page

_spec = importlib.util.spec_from_file_location("browser", Path(__file__).with_name("browser.py"))
browser = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(browser)


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    with browser.open_browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def test_the_comparison_shows_the_figures_of_its_json(session, tmp_path):
    for name, topology in (("a", "dgx"), ("b", "dgx_h100")):
        (tmp_path / f"{name}.json").write_text(perfmodel.predict("dlrm_small", topology).to_json())
    page = tmp_path / "compare.html"
    arguments = [str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--json", "--html", str(page)]
    answer = json.loads(CliRunner().invoke(diff, arguments, catch_exceptions=False).stdout)
    session.get(page.as_uri())
    shown = [
        float(session.find_element("id", i).get_attribute("data-value")) for i in ("before", "after", "difference")
    ]
    assert shown == [answer["before_s"], answer["after_s"], answer["difference_s"]]
    assert session.get_log("browser") == []


def test_the_sweep_page_draws_every_row(session, tmp_path):
    rows = [{"n": n, "batch": b, "t_s": 1.0 / n + b, "m_bytes": 100 * b} for n in (1, 2, 4) for b in (8, 16)]
    page = tmp_path / "sweep.html"
    page.write_text(render_sweep_page("t.csv", rows, SweepChoice(x="n", y="batch", value="t_s", against="m_bytes")))
    session.get(page.as_uri())
    assert len(session.find_elements("css selector", "#heat rect")) == 6
    # One batch beats the other in both figures: the front is its fastest row alone.
    assert len(session.find_elements("css selector", "#pareto polygon")) == 1
    assert len(session.find_elements("css selector", "#pareto circle")) == 5
    assert session.get_log("browser") == []
