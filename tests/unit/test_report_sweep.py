"""Pages of tables: the front against brute force, costs by hand, and what is said of wrong columns."""

import json

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cli.report import report
from perfmodel.errors import ConfigError
from perfmodel.report.sweep import SweepChoice, pareto_front, read_table, render_sweep_page, show, with_costs

CHOICE = SweepChoice(x="a", y="b", value="t", against="m")


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_the_front_is_what_nothing_beats(pairs):
    rows = [{"t": float(t), "m": float(m)} for t, m in pairs]
    front = {pairs[i] for i in pareto_front(rows, CHOICE)}
    beaten = {p for p in pairs for q in pairs if q != p and q[0] <= p[0] and q[1] <= p[1]}
    assert front == set(pairs) - beaten


def test_larger_turns_a_figure_round():
    rows = [{"t": 1.0, "m": 5.0}, {"t": 3.0, "m": 5.0}]
    assert pareto_front(rows, CHOICE) == [0]
    assert pareto_front(rows, SweepChoice(x="a", y="b", value="t", against="m", larger=("t",))) == [1]


def test_rows_without_an_answer_are_on_no_front():
    assert pareto_front([{"t": None, "m": 1.0}, {"t": 2.0, "m": 1.0}, {"t": float("nan"), "m": 0.0}], CHOICE) == [1]


def test_costs_by_hand(tmp_path):
    prices = tmp_path / "prices.yaml"
    prices.write_text("per_hour: {dgx_h100: 30, l40s: 1.5, a100_sxm_40gb: 2}\n")
    rows = [
        {"topology": "dgx_h100", "nodes": 2, "iteration_time_s": 0.36},  # a node's price, twice
        {"device": "l40s", "n_ranks": 4, "iteration_time_s": None},  # 4 x 1.5
        {"topology": "dgx", "iteration_time_s": 1.8},  # 8 ranks of the A100 of 40 GB
    ]
    found = with_costs(rows, prices)
    assert [row["cost_per_hour"] for row in found] == [60, 6, 16]
    assert [row["cost_per_iteration"] for row in found] == [pytest.approx(0.006), None, pytest.approx(0.008)]


def test_a_device_without_a_price_is_named(tmp_path):
    prices = tmp_path / "prices.yaml"
    prices.write_text("per_hour: {l40s: 1.5}\n")
    with pytest.raises(ConfigError, match="no price for 'h100_sxm'"):
        with_costs([{"topology": "dgx_h100"}], prices)


def test_values_are_shown_by_the_suffix_of_their_column():
    shown = [show(v, c) for v, c in ((0.0012, "iteration_time_s"), (2**30, "memory_bytes"), (1234.0, "samples_per_s"))]
    assert shown == ["1.20 ms", "1.00 GiB", "1.23k"]


def test_tables_come_as_csv_json_and_rows(tmp_path):
    (tmp_path / "t.csv").write_text("# by hand\na,b\n1,x\n,y\n")
    (tmp_path / "t.json").write_text(json.dumps({"rows": [{"a": 1.0, "b": "x"}, {"a": None, "b": "y"}]}))
    assert read_table(tmp_path / "t.csv") == read_table(tmp_path / "t.json")
    (tmp_path / "empty.csv").write_text("a,b\n")
    with pytest.raises(ConfigError, match="no rows"):
        read_table(tmp_path / "empty.csv")


def test_a_column_that_is_not_there_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"--y: found 'btach'.*did you mean 'batch'"):
        render_sweep_page(
            "t", [{"a": 1, "batch": 2, "t": 3, "m": 4}], SweepChoice(x="a", y="btach", value="t", against="m")
        )


def test_the_command_writes_the_page_and_prints_the_front(tmp_path):
    table = "nodes,batch,iteration_time_s,memory_bytes\n1,32,0.5,100\n2,32,0.3,100\n1,64,0.9,50\n2,64,,\n"
    page = tmp_path / "sweep.html"
    arguments = ["-", "--x", "nodes", "--y", "batch", "--html", str(page), "--json"]
    done = CliRunner().invoke(report, arguments, input=table, catch_exceptions=False)
    front = json.loads(done.stdout)["pareto_front"]
    assert [row["iteration_time_s"] for row in front] == [0.9, 0.3]
    text = page.read_text()
    assert text.count("<title>no answer<") == 1
    assert "300 ms" in text


def test_a_page_may_be_read_by_others(tmp_path):
    import os

    from perfmodel.report.write import write_text

    before = os.umask(0o027)
    try:
        write_text(tmp_path / "p.html", "x")
        assert (tmp_path / "p.html").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_keys_of_inline_plans_are_axes_and_long_axes_keep_their_best(tmp_path):
    from perfmodel.report.sweep import heat_map

    table = tmp_path / "plans.csv"
    lines = [f'"tp={2 ** (n % 3)},pp={n}",{n + 1}' for n in range(60)]
    table.write_text("plan,t\n" + "\n".join(lines))
    rows = read_table(table)
    assert {row["tp"] for row in rows} == {1.0, 2.0, 4.0}
    drawn = heat_map(rows, SweepChoice(x="tp", y="pp", value="t", against="t"))
    assert drawn.count("<rect") == 3 * 40
    assert "pp 39:" in drawn
    assert "pp 40:" not in drawn
