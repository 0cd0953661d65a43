"""Suites: what is read, what is refused, and the figures against arithmetic by hand."""

import math

import pytest

from perfmodel.config import list_configs
from perfmodel.errors import ConfigError, GraphError
from perfmodel.pipeline.prediction import PathShare, Prediction
from perfmodel.report.validation import render_markdown, render_validation, validation_json
from perfmodel.validate.run_suite import run_suite, score_suite
from perfmodel.validate.suite import COLUMNS, load_suite, parse_suite

HEADER = ",".join(COLUMNS)
GOOD = "a,dlrm_small,v100,ddp,64,,fp32,eager,train,0.001,1,paper,"


def parsed(text, folder):
    return parse_suite(text, "suite.csv", folder)


def problems(text, folder):
    with pytest.raises(ConfigError) as caught:
        parsed(text, folder)
    return caught.value.problems


def prediction(time_s, low_s, high_s):
    path = (
        PathShare(cause="gemm", time_s=0.8 * time_s, share_frac=0.8, below_s=0.01, above_s=0.01),
        PathShare(cause="copy", time_s=0.2 * time_s, share_frac=0.2, below_s=0.0, above_s=0.02),
    )
    return Prediction(
        model="m", topology="t", plan="ddp", precision="fp32", n_ranks=1, batch_per_rank=1, iteration_time_s=time_s,
        low_s=low_s, high_s=high_s, ranks=(), top_ops=(), critical_path=path, coverage={}, work_flops=0, model_flops=0,
    )  # fmt: skip


def test_cells_left_empty_and_columns_in_any_order(tmp_path):
    (tmp_path / "m.yaml").write_text("kind: dlrm")
    text = "note,source,weight,measured_s,phase,mode,precision,seq_len,batch_per_rank,plan,topology,model,name\n"
    (case,) = parsed(text + ",,,1e-3,,,,,8,,v100,m.yaml,one\n\n", tmp_path)
    assert (case.plan, case.mode, case.phase, case.weight) == ("ddp", "eager", "train", 1.0)
    assert (case.seq_len, case.precision, case.topology) == (None, None, "v100")
    assert case.model == str(tmp_path / "m.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["empty, allowed a header"]),
        (HEADER, ["found no case"]),
        (HEADER.replace("plan", "plans"), ["missing column plan", "unknown column 'plans'; did you mean 'plan'?"]),
        (f"{HEADER},name", ["column name appears 2 times"]),
        (f"{HEADER}\na,b", ["row 2: found 2 cells, allowed 13"]),
        (f"{HEADER}\n{GOOD}\n{GOOD}", ["row 3: name: found 'a' again (first in row 2)"]),
        (f"{HEADER}\n{GOOD.replace('0.001', '-1')}", ["row 2: measured_s: found '-1'"]),
        (f"{HEADER}\n{GOOD.replace('0.001', 'nan')}", ["measured_s: found 'nan'"]),
        (f"{HEADER}\n{GOOD.replace('64', '6.5')}", ["batch_per_rank: found '6.5'"]),
        (f"{HEADER}\n{GOOD.replace('fp32', 'fp31')}", ["precision: found 'fp31'", "did you mean 'fp32'?"]),
        (f"{HEADER}\n{GOOD.replace('train', 'trian')}", ["phase: found 'trian'", "did you mean 'train'?"]),
        (f"{HEADER}\n{GOOD.replace('a,dlrm_small', ',')}", ["name: empty", "model: empty"]),
        (f'{HEADER}\n"a,{GOOD}', ["not a CSV file"]),
    ],
)
def test_every_mistake_is_one_clear_line(tmp_path, text, words):
    found = problems(text, tmp_path)
    assert all(line.startswith("suite.csv: ") and "\n" not in line for line in found)
    assert all(any(word in line for line in found) for word in words)


def test_all_mistakes_come_at_once(tmp_path):
    bad = GOOD.replace("64", "0").replace("eager", "eagr")
    assert len(problems(f"{HEADER}\n{bad}\nb{bad[1:]}", tmp_path)) == 4


def test_figures_by_hand(tmp_path):
    rows = ["a,m,t,,1,,,,,1.0,1,,", "b,m,t,,1,,,,,2.0,3,,", "c,m,t,,1,,,,,4.0,0,,", "d,m,t,,1,,,,,8.0,1,,"]
    cases = parsed("\n".join([HEADER, *rows]), tmp_path)
    times = {"a": 1.1, "b": 1.6, "c": 40.0}

    def predict(case):
        if case.name == "d":
            raise GraphError("the model\ncannot be traced")
        return prediction(times[case.name], 0.99, 1.2)

    results = run_suite(cases, predict)
    score = score_suite(results)
    assert (score.n_cases, score.n_failed) == (4, 1)
    # errors 0.1 (weight 1) and 0.2 (weight 3); c has no weight, d failed
    assert score.mean == pytest.approx((0.1 + 3 * 0.2) / 4)
    assert score.geomean == pytest.approx((0.1 * 0.2**3) ** 0.25)
    assert score.median == pytest.approx(0.15)
    assert score.p90 == pytest.approx(0.19)
    assert score.inside_frac == 0.5
    assert score.spearman == pytest.approx(1.0)
    assert results[3].reason == "the model cannot be traced"
    assert results[0].cause.cause == "gemm"  # too long: only gemm may be shorter
    assert results[1].cause.cause == "copy"  # too short: copy has the larger way up
    assert not score.passes(1.0)  # a failed case fails the suite
    for text in (render_validation("s", results, score), render_markdown("s", results, score)):
        assert "the model cannot be traced" in " ".join(text.split())
        assert "geometric mean" in text
    assert '"status": "failed"' in validation_json("s", results, score)


def test_the_gate_is_the_mean_error(tmp_path):
    cases = parsed(f"{HEADER}\na,m,t,,1,,,,,1.0,1,,", tmp_path)
    score = score_suite(run_suite(cases, lambda _: prediction(1.1, 1.0, 1.2)))
    assert score.passes(0.11)
    assert score.passes(None)
    assert not score.passes(0.09)
    assert score.spearman is None


def test_a_fault_of_ours_fails_its_case_alone(tmp_path):
    cases = parsed(f"{HEADER}\na,m,t,,1,,,,,1.0,1,,\nb,m,t,,1,,,,,1.0,1,,", tmp_path)

    def predict(case):
        if case.name == "a":
            raise IndexError("list index out of range")
        return prediction(1.0, 1.0, 1.0)

    failed, fine = run_suite(cases, predict)
    assert failed.reason == "fault of perfmodel: IndexError: list index out of range"
    assert fine.error == 0.0


def test_words_of_mlcommons_stand_beside_its_figures(tmp_path):
    cases = parsed(f"{HEADER}\na,m,t,,1,,,,,1.0,0,,result not verified by MLCommons", tmp_path)
    results = run_suite(cases, lambda _: prediction(1.0, 1.0, 1.0))
    score = score_suite(results)
    assert score.mean is None
    assert score.passes(0.0)
    assert "not verified by MLCommons" in render_validation("s", results, score).splitlines()[-1]


@pytest.mark.parametrize("name", list_configs("suites"))
def test_shipped_suites_load_and_cite(name):
    suite = load_suite(name)
    assert all(case.source and math.isfinite(case.measured_s) for case in suite.cases)
