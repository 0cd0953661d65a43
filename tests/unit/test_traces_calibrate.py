"""Overheads by hand, an overlay that loads, and predictions from a trace against predictions with the same changes."""

import csv
import json
from pathlib import Path

import pytest

from perfmodel.api import predict, predict_run
from perfmodel.cli import main
from perfmodel.db import load_device
from perfmodel.errors import ConfigError
from perfmodel.traces.export import kineto_documents, kineto_json
from perfmodel.traces.kineto import read_kineto
from perfmodel.traces.overheads import collective_times, kernel_times, measure_overheads
from perfmodel.traces.overlay import write_overlay
from perfmodel.traces.ranks import load_job, make_job
from perfmodel.utilisation.from_trace import find_factors

SHARED = Path(__file__).parents[2].parent / "shared"
TRACES = SHARED / "data" / "traces"
US = 1e-6
GPT = {
    "kind": "transformer", "architecture": "gpt2", "name": "tiny_gpt", "vocab_size": 2000, "hidden_size": 512, "layers": 2,
    "heads": 8, "max_positions": 256, "sequence_length": 256, "batch_size": 2, "precision": "amp_bf16", "optimizer": "adamw",
}  # fmt: skip


def event(cat, name, ts, dur, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": tid, "args": args}


@pytest.fixture
def small(tmp_path):
    """Two ops: the first launches at 10 and 30 us of its 50 us, the second begins 5 us after it and launches at 8 of 20."""
    events = [
        event("cpu_op", "aten::a", 0, 50),
        event("cuda_runtime", "cudaLaunchKernel", 10, 4, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 30, 6, correlation=2),
        event("cpu_op", "aten::b", 55, 20, **{"Input Dims": [[4, 4]], "Input type": ["float"]}),
        event("cuda_runtime", "cudaLaunchKernel", 63, 4, correlation=3),
        event("kernel", "k1", 20, 9, tid=7, stream=7, correlation=1),
        event("kernel", "k2", 40, 9, tid=7, stream=7, correlation=2),
        event("kernel", "k3", 70, 9, tid=7, stream=7, correlation=3),
    ]
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return read_kineto(path)


def test_the_five_classes_by_hand(small):
    first, second = sorted(measure_overheads(small), key=lambda row: row.op)
    found = [getattr(first, f"t{i}_s") / US for i in range(1, 6)]
    assert found == pytest.approx([0, 10, 14, 5, 16])  # T4: median of 4 and 6
    assert (first.n_launches, first.n_calls) == (2, 1)
    found = [getattr(second, f"t{i}_s") / US for i in range(1, 6)]
    assert found == pytest.approx([5, 8, 8, 4, 0])


def test_kernel_times_are_by_op_and_shape(small):
    rows = {row.kernel: row for row in kernel_times(make_job([small]))}
    assert (rows["k3"].op, rows["k3"].shapes, rows["k3"].median_s) == ("aten::b", "((4, 4),)", pytest.approx(9 * US))
    assert (rows["k1"].op, rows["k1"].shapes) == ("aten::a", "")


def test_overheads_of_a_real_trace_are_those_of_its_time():
    """The field's reference paper has T4 of 10 us and T2 of 12 to 40 us on V100 hosts under a profiler."""
    path = TRACES / "dlrm_v100x8_kineto" / "rank0.json.gz"
    if not path.exists():
        pytest.skip("shared/ is absent: real traces are not part of the repository")
    rows = {row.op: row for row in measure_overheads(read_kineto(path))}
    linear = rows["aten::linear"]
    assert 4 * US < linear.t4_s < 20 * US
    assert 12 * US < linear.t2_s < 120 * US


def test_collectives_take_the_minimum_over_ranks():
    paths = sorted((SHARED / "cases").glob("54-*/rank?.json"))
    if not paths:
        pytest.skip("shared/ is absent: cases are not part of the repository")
    (row,) = collective_times(load_job(paths))
    assert (row.op, row.bytes, row.transfer_s, row.ranks_seen) == ("all_reduce", 67108864, pytest.approx(300 * US), 2)


def test_an_overlay_loads_and_stands_alone(tmp_path):
    run = predict_run(GPT, "dgx_a100", "ddp", batch=4)
    path = tmp_path / "k.json"
    path.write_text(kineto_json(kineto_documents(run)[0]))
    base = load_device("a100_sxm_40gb")
    found = write_overlay(load_job([path]), base, tmp_path / "db")
    assert set(found.fits) == set(base.fits)
    assert found.host.launch_s == pytest.approx(base.host.launch_s, rel=0.01)  # the trace was made with it
    assert found.host.launch_latency_s == pytest.approx(base.host.launch_latency_s, rel=0.05)
    again = predict(GPT, "dgx_a100", "ddp", batch=4, db=str(tmp_path / "db"))
    assert again.iteration_time_s == pytest.approx(run.prediction.iteration_time_s, rel=0.2)
    with (tmp_path / "db" / "_trace" / "kernels.csv").open() as file:
        assert len(list(csv.DictReader(file))) > 20
    with pytest.raises(ConfigError, match="exists already"):
        write_overlay(load_job([path]), base, tmp_path / "db")


CHANGES = ("gemm x1.3", "elementwise x1.5", "all_reduce x2")


def test_factors_are_those_a_run_was_made_with(tmp_path):
    """A run whose products take 1.3 times as long: its trace must say so.

    Twice the communication also slows what runs beside it a little, as it would in a real trace: 4 % for that.
    """
    traced = predict_run(GPT, "dgx_a100", "ddp", batch=16, what_if=CHANGES)
    paths = [tmp_path / "k.json"]
    paths[0].write_text(kineto_json(kineto_documents(traced)[0]))
    factors = find_factors(load_job(paths), predict_run(GPT, "dgx_a100", "ddp", batch=16)).by_word
    assert factors["gemm"] == pytest.approx(1.3, rel=0.04)
    assert factors["elementwise"] == pytest.approx(1.5, rel=0.04)
    assert factors["all_reduce"] == pytest.approx(2.0, rel=0.05)
    assert factors["softmax"] == pytest.approx(1.0, rel=0.04)


def test_predict_from_trace_equals_predict_with_the_same_changes(tmp_path, capsys):
    traced = predict_run(GPT, "dgx_a100", "ddp", batch=16, what_if=CHANGES)
    path = tmp_path / "k.json"
    path.write_text(kineto_json(kineto_documents(traced)[0]))
    model = tmp_path / "m.yaml"
    model.write_text(json.dumps(GPT))
    args = [
        "--model",
        str(model),
        "--topo",
        "dgx_a100",
        "--batch",
        "64",
        "--from-trace",
        str(path),
        "--trace-batch",
        "16",
    ]
    with pytest.raises(SystemExit) as stopped:
        main(["predict", *args, "--json"])
    assert not stopped.value.code
    found = json.loads(capsys.readouterr().out)["iteration_time_s"]
    truth = predict(GPT, "dgx_a100", "ddp", batch=64, what_if=CHANGES).iteration_time_s
    plain = predict(GPT, "dgx_a100", "ddp", batch=64).iteration_time_s
    assert found == pytest.approx(truth, rel=0.03)
    assert abs(plain / truth - 1) > 0.05  # the changes matter


def test_a_trace_of_another_model_is_refused(tmp_path, capsys):
    run = predict_run(GPT, "dgx_a100", "ddp", batch=46)
    path = tmp_path / "k.json"
    path.write_text(kineto_json(kineto_documents(run)[0]))
    small = {
        "kind": "dlrm", "name": "tiny", "batch_size": 8, "dense_features": 4, "bottom_mlp": [8, 4], "top_mlp": [8, 1],
        "embedding_dim": 4, "tables": [{"rows": 100}],
    }  # fmt: skip
    with pytest.raises(ConfigError, match="of another model, batch"):
        find_factors(load_job([path]), predict_run(small, "dgx_a100", "ddp"))


def test_the_calibrate_command(tmp_path, capsys):
    run = predict_run(GPT, "dgx_a100", "ddp", batch=4)
    path = tmp_path / "k.json"
    path.write_text(kineto_json(kineto_documents(run)[0]))
    with pytest.raises(SystemExit) as stopped:
        main(["trace", "calibrate", str(path), "--out", str(tmp_path / "db")])
    assert not stopped.value.code
    assert "device a100_sxm_40gb" in capsys.readouterr().out
