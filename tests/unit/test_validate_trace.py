"""Attribution against a trace: a prediction written as a trace differs nowhere, one with an op slowed differs there."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from perfmodel.api import predict_run
from perfmodel.cli.validate import validate
from perfmodel.errors import ConfigError
from perfmodel.traces.export import job_of_run, kineto_documents, kineto_json
from perfmodel.traces.link import link
from perfmodel.utilisation.op_gaps import op_gaps
from perfmodel.validate.suite import COLUMNS

MODEL = {"kind": "dlrm", "name": "d", "dense_features": 4, "bottom_mlp": [64, 16], "top_mlp": [64, 1], "embedding_dim": 16,
         "batch_size": 512, "tables": [1000, 2000]}  # fmt: skip


@pytest.fixture(scope="module")
def run():
    return predict_run(MODEL, "a100", bounds=False)


def test_a_prediction_differs_nowhere_from_itself(run):
    gaps = op_gaps(run, job_of_run(run))
    assert {gap.name for gap in gaps} >= {"aten.addmm", "aten.mm", "aten._embedding_bag"}
    assert all(abs(gap.gap_s) < 1e-12 and gap.calls[0] == gap.calls[1] for gap in gaps)


def test_an_operator_that_took_longer_comes_first(run):
    job = job_of_run(run)
    [trace] = job.traces
    mm = {id(w.span) for w in link(trace).work if w.op >= 0 and trace.ops[w.op].name == "aten::mm"}
    device = tuple(
        replace(span, end_s=span.end_s + span.duration_s) if id(span) in mm else span for span in trace.device
    )
    slowed = replace(job, traces=(replace(trace, device=device),))
    first = op_gaps(run, slowed)[0]
    assert first.name == "aten.mm"
    assert first.measured_s == pytest.approx(2 * first.predicted_s, rel=1e-6)


def test_the_command_takes_one_case_and_its_trace(tmp_path, run):
    (tmp_path / "d.yaml").write_text(json.dumps(MODEL))
    (tmp_path / "rank0.json").write_text(kineto_json(kineto_documents(run)[0]))
    row = "{},d.yaml,a100,ddp,512,,fp32,eager,train,0.002,1,,"
    (tmp_path / "s.csv").write_text("\n".join([",".join(COLUMNS), row.format("one"), row.format("two")]))
    call = [str(tmp_path / "s.csv"), "--attribute", "--trace", str(tmp_path / "rank0.json")]
    shown = CliRunner().invoke(validate, [*call, "--cases", "one"], catch_exceptions=False)
    assert shown.exit_code == 0
    assert "one, device time: step error +0.0%" in shown.stderr
    with pytest.raises(ConfigError, match="found 2 cases, allowed the one that was traced"):
        CliRunner().invoke(validate, call, catch_exceptions=False)
    with pytest.raises(ConfigError, match="all three together"):
        CliRunner().invoke(validate, call[:2], catch_exceptions=False)
