"""Predictions as traces: what is written is read back equal, and says what the prediction said. ETs of all three schemas."""

import dataclasses
import json
from pathlib import Path

import pytest

from perfmodel.api import predict_run
from perfmodel.cli import main
from perfmodel.errors import ConfigError
from perfmodel.traces.execution_trace import chakra_document, chakra_json, is_collective, read_execution_trace
from perfmodel.traces.explain import explain_steps
from perfmodel.traces.export import job_of_run, kineto_documents, kineto_json, traces_of_run
from perfmodel.traces.kineto import read_kineto

TRACES = Path(__file__).parents[2].parent / "shared" / "data" / "traces"
DLRM = {
    "kind": "dlrm",
    "name": "tiny",
    "batch_size": 512,
    "dense_features": 13,
    "bottom_mlp": [64, 16],
    "top_mlp": [64, 1],
    "embedding_dim": 16,
    "tables": [{"rows": 50_000, "count": 4}, {"rows": 2_000_000}],
}


@pytest.fixture(scope="module")
def run():
    return predict_run(DLRM, "dgx_a100", "embeddings=table_wise")


@pytest.mark.parametrize("index", [0, -1])
def test_a_written_prediction_is_read_back_equal(run, tmp_path, index):
    path = tmp_path / "t.json"
    path.write_text(kineto_json(kineto_documents(run)[index]))
    assert dataclasses.replace(read_kineto(path), path="prediction") == traces_of_run(run)[index]


def test_the_trace_says_what_the_prediction_said(run):
    """Steps and their parts, found by the trace's own rules, against the simulator's breakdown of every rank class."""
    rows = explain_steps(job_of_run(run))
    by_rank = {row.rank: row for row in rows if row.step.name == "ProfilerStep#1"}  # the middle one is whole
    for summary in run.prediction.ranks:
        found = by_rank[summary.ranks[0]]
        assert found.step.duration_s == pytest.approx(run.prediction.iteration_time_s, rel=1e-9)
        assert found.parts["compute"] == pytest.approx(summary.breakdown.compute_s, abs=2e-9)
        assert found.parts["communication"] == pytest.approx(summary.breakdown.exposed_communication_s, abs=2e-6)
        assert found.parts["waiting for ranks"] == pytest.approx(summary.breakdown.wait_s, abs=2e-6)


def test_a_cpu_prediction_has_its_ops_on_the_thread():
    run = predict_run(DLRM, "cpu", "ddp")
    (trace,) = traces_of_run(run, n_steps=1)
    assert trace.device == ()
    ops = [op for op in trace.ops if op.kind == "op"]
    assert sum(op.duration_s for op in ops) == pytest.approx(run.prediction.iteration_time_s, rel=1e-3)


def test_chakra_nodes_are_read_back_with_deps_and_times(run, tmp_path):
    path = tmp_path / "t.json"
    path.write_text(chakra_json(chakra_document(run)))
    program = run.classes[0].program
    trace = read_execution_trace(path)
    assert [round(node.duration_s * 1e12) for node in trace.nodes] == program.duration_ps.tolist()
    assert [len(set(node.data_deps)) for node in trace.nodes] == [
        len(set(program.dep_index[end - n : end].tolist()))
        for n, end in zip(program.dep_count.tolist(), program.dep_count.cumsum().tolist(), strict=True)
    ]
    assert trace.notes == ()
    collectives = [event for event in run.classes[0].rank_class.events if event.collective is not None]
    assert sum(is_collective(node) for node in trace.nodes) == len(collectives)


# Counted in the files with grep: nodes, and records of collectives (`"nccl:`).
@pytest.mark.parametrize("rank", [0, 7])
def test_real_execution_traces(rank):
    path = TRACES / "dlrm_v100x8_et" / f"rank{rank}.json.gz"
    if not path.exists():
        pytest.skip("shared/ is absent: real traces are not part of the repository")
    trace = read_execution_trace(path)
    assert (trace.schema, trace.notes) == ("1.0.1", ())
    assert sum(is_collective(node) for node in trace.nodes) == 8
    mm = next(node for node in trace.nodes if node.name == "aten::mm")
    assert (len(mm.input_shapes), mm.schema.startswith("aten::mm(Tensor self, Tensor mat2)")) == (2, True)


NEW = {
    "id": 3,
    "name": "aten::relu",
    "ctrl_deps": 2,
    "inputs": {"values": [[1, 2]], "shapes": [[4, 4]], "types": ["Tensor(float)"]},
    "outputs": {"values": [], "shapes": [[4, 4]], "types": ["Tensor(float)"]},
    "attrs": [{"name": "rf_id", "type": "uint64", "value": 9}, {"name": "tid", "type": "uint64", "value": 1}],
}
PROTO = {
    "id": "4",
    "name": "AR",
    "type": "COMM_COLL_NODE",
    "ctrlDeps": ["3"],
    "dataDeps": ["3"],
    "durationMicros": "12",
    "attr": [{"name": "comm_size", "int64Val": "64"}],
}


def test_other_spellings(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "nodes": [PROTO, NEW, {"id": 5}, 7, dict(NEW)]}))
    trace = read_execution_trace(path)
    relu, reduce = trace.nodes
    assert (relu.parent, relu.record_id, relu.thread, relu.input_shapes) == (2, 9, 1, ((4, 4),))
    assert (reduce.type, reduce.data_deps, reduce.duration_s, reduce.attrs["comm_size"]) == (7, (3,), 12e-6, "64")
    assert [(note.kind, note.count) for note in trace.notes] == [("dropped", 1), ("dropped", 2), ("missing", 1)]


def test_no_nodes_is_one_clear_line(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="nodes: none found"):
        read_execution_trace(path)


def test_the_commands_write_and_load(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("m.json").write_text(json.dumps(DLRM))
    Path("m.yaml").write_text(json.dumps(DLRM))
    args = ["trace", "export", "--model", "m.yaml", "--topo", "cpu", "--out", "k.json", "--chakra", "c.json"]
    for command in (args, ["trace", "load", "k.json", "c.json"]):
        with pytest.raises(SystemExit) as stopped:
            main(command)
        assert not stopped.value.code, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "c.json: execution trace, schema 1.1.1-chakra.0.0.4" in out
    assert "ProfilerStep#2" in out
