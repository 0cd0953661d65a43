"""The page of a suite: it loads nothing, shows the figures of its JSON, and every case; checked by parsing it."""

import json
import re
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner

from perfmodel.cli.validate import validate
from perfmodel.errors import InfeasiblePlanError
from perfmodel.pipeline.prediction import PathShare, Prediction
from perfmodel.report.validation import render_validation, validation_json
from perfmodel.report.validation_page import error_bars, render_validation_page, scatter
from perfmodel.validate.run_suite import run_suite, score_suite
from perfmodel.validate.suite import COLUMNS, parse_suite

ROWS = ["a,m,t,,1,,,,,1.0,1,paper <1>,", "b,m,t,,1,,,,,2.0,1,,", "c,m,t,,1,,,,,4.0,1,,", "d,m,t,,1,,,,,8.0,1,,"]
TIMES = {"a": (1.1, 0.9, 1.3), "b": (1.6, 1.5, 1.7), "c": (4.0, 3.0, 6.0)}


def prediction(case):
    if case.name not in TIMES:
        raise InfeasiblePlanError("no <room>")
    time_s, low_s, high_s = TIMES[case.name]
    path = (PathShare(cause="gemm", time_s=0.5 * time_s, share_frac=0.5, below_s=0.1, above_s=0.1),)
    return Prediction(
        model="m", topology="t", plan="ddp", precision="fp32", n_ranks=1, batch_per_rank=1, iteration_time_s=time_s,
        low_s=low_s, high_s=high_s, ranks=(), top_ops=(), critical_path=path, coverage={}, work_flops=0, model_flops=0,
    )  # fmt: skip


@pytest.fixture
def outcome(tmp_path):
    cases = parse_suite("\n".join([",".join(COLUMNS), *ROWS]), "s.csv", tmp_path)
    results = run_suite(cases, prediction)
    return results, score_suite(results)


class Tags(HTMLParser):
    """Counts elements and collects what may lead outside a page."""

    def __init__(self):
        super().__init__()
        self.n, self.outside = {}, []

    def handle_starttag(self, tag, attrs):
        self.n[tag] = self.n.get(tag, 0) + 1
        self.outside += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith(("#", "data:"))]


def test_the_page_carries_the_json_and_loads_nothing(outcome):
    results, score = outcome
    page = render_validation_page("s", results, score)
    tags = Tags()
    tags.feed(page)
    assert tags.outside == []
    body = re.search(r'<script type="application/json" id="validation">(.*?)</script>', page, re.S).group(1)
    assert json.loads(body) == json.loads(validation_json("s", results, score))
    assert "no &lt;room&gt;" in page
    assert "paper &lt;1&gt;" in page
    assert "<room>" not in page
    assert page == render_validation_page("s", results, score)


def test_every_predicted_case_is_drawn_once(outcome):
    predicted = [result for result in outcome[0] if result.predicted_s is not None]
    plot = scatter(predicted)
    # a and c are inside their ranges (circles), b is outside (a diamond).
    assert (plot.count("<circle"), plot.count("<polygon")) == (2, 1)
    bars = error_bars(predicted)
    assert bars.count("<rect") == 2 * 3
    assert bars.index("b: -20") < bars.index("a: +10")
    assert scatter([]) == error_bars([]) == ""


def test_a_suite_of_failures_still_has_a_page(tmp_path):
    cases = parse_suite("\n".join([",".join(COLUMNS), ROWS[3]]), "s.csv", tmp_path)
    results = run_suite(cases, prediction)
    assert "No case could be predicted" in render_validation_page("s", results, score_suite(results))


def test_what_the_cause_alone_would_have_to_be(outcome):
    by_name = {result.case.name: result for result in outcome[0]}
    # a: 1.1 predicted, 1.0 measured, 0.55 of it gemm: gemm would have to be 0.45, 0.45 / 0.55 = 0.818 of its time.
    assert by_name["a"].cause_factor == pytest.approx(0.45 / 0.55)
    assert by_name["b"].cause_factor == pytest.approx(1.2 / 0.8)
    assert by_name["d"].cause_factor is None
    text = " ".join(render_validation("s", *outcome, width=250).split())
    assert "x0.82 would explain it" in text
    # Widths: 0.4 / 1.1, 0.2 / 1.6 and 3 / 4; the median is the first.
    assert outcome[1].median_width_frac == pytest.approx(0.4 / 1.1)


def test_a_measured_case_is_predicted_whatever_the_memory_model_says(tmp_path):
    suite, page = tmp_path / "s.csv", tmp_path / "s.html"
    model = {"kind": "dlrm", "name": "d", "dense_features": 4, "bottom_mlp": [8], "top_mlp": [8, 1], "embedding_dim": 8,
             "batch_size": 8, "tables": [{"rows": 2_000_000_000}]}  # fmt: skip
    (tmp_path / "d.yaml").write_text(json.dumps(model))
    suite.write_text(",".join(COLUMNS) + "\nbig,d.yaml,v100,ddp,8,,amp,eager,train,0.004,1,,\n")
    run = CliRunner().invoke(validate, [str(suite), "--html", str(page), "--json"], catch_exceptions=False)
    [case] = json.loads(run.stdout)["cases"]
    assert (run.exit_code, case["status"], case["precision"]) == (0, "predicted", "amp_fp16")
    # 2e9 rows of 8 fp32 elements are 59.6 GiB.
    assert re.search(
        r"rank 0 needs 59\.\d GiB .* its device has \d+\.\d GiB: predicted as if it fitted", case["remarks"][0]
    )
    assert case["remarks"][0] in page.read_text()
