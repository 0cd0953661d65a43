"""The Kineto reader on small hand-made traces and, where present, on real ones."""

import gzip
import json
from pathlib import Path

import pytest

from perfmodel.errors import ConfigError
from perfmodel.traces.kineto import read_kineto
from perfmodel.traces.link import innermost_ops

TRACES = Path(__file__).parents[2].parent / "shared" / "data" / "traces"


def event(cat, name, ts, dur, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": tid, "args": args}


SMALL = {
    "distributedInfo": {"rank": 3, "world_size": 8},
    "traceEvents": [
        event("user_annotation", "ProfilerStep#7", 1000, 100),
        event("cpu_op", "aten::linear", 1005, 40),
        event("cpu_op", "aten::addmm", 1010, 30),
        event("cuda_runtime", "cudaLaunchKernel", 1020, 5, correlation=11),
        event("cuda_runtime", "cudaLaunchKernel", 1060, 5, correlation=12),
        event("kernel", "sgemm", 1030, 7, tid=7, stream=7, correlation=11, **{"warps per SM": 3.5}),
        event("kernel", "ncclKernel_AllReduce_RING_LL_Sum_float", 1070, 9, tid=20, stream=20, correlation=12),
        {"ph": "M", "name": "process_name", "args": {}},
    ],
}


def write(tmp_path, body, name="t.json"):
    path = tmp_path / name
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_reads_a_small_trace(tmp_path, name):
    trace = read_kineto(write(tmp_path, SMALL, name))
    assert (trace.rank, trace.world_size, trace.origin_us) == (3, 8, 1000.0)
    assert [(s.name, s.start_s, s.end_s) for s in trace.steps] == [("ProfilerStep#7", 0.0, 100e-6)]
    gemm, reduce = trace.device
    assert (gemm.stream, gemm.start_s, gemm.warps_per_sm) == (7, pytest.approx(30e-6), 3.5)
    assert [span.name for span in trace.collectives] == [reduce.name]
    assert trace.launched[11] is gemm
    found = [op.name if op else None for op in innermost_ops(trace, trace.calls)]
    assert found == ["aten::addmm", None]


BAD = [
    (b"{", "t.json: not JSON: the file ends inside its object at byte 1"),
    (b"", "t.json: not JSON: the file is empty at byte 0"),
    (b"\xff\xfe", "t.json: not JSON"),
    (b"[" * 100_000, "t.json: not JSON: brackets nested too deeply"),
    (b"3", "t.json: found a JSON int; a trace is an object with traceEvents, or a list"),
    ([], "t.json: traceEvents: no host or device spans among 0 events"),
    ({"events": []}, "t.json: traceEvents: not found"),
    ({"traceEvents": []}, "t.json: traceEvents: no host or device spans among 0 events"),
    ({"traceEvents": [event("kernel", "k", "soon", 1)]}, r"among 1 events \(1 without a start"),
    ({"traceEvents": [event("kernel", "k", 1, None)]}, "1 without a duration"),
    ({"traceEvents": [event("kernel", 5, 1, 1)]}, "1 without a name"),
    ({"traceEvents": [event("kernel", "k", float("nan"), 1)]}, "1 without a start"),
    ({"traceEvents": [5, None, []]}, "3 that are no trace events"),
]


@pytest.mark.parametrize(("body", "message"), BAD)
def test_a_bad_trace_gives_one_clear_line(tmp_path, body, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_kineto(write(tmp_path, body))
    assert len(caught.value.problems) == 1


def test_a_missing_or_cut_off_file_gives_one_clear_line(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_kineto(tmp_path / "absent.json")
    whole = write(tmp_path, SMALL, "t.json.gz").read_bytes()
    (tmp_path / "cut.json.gz").write_bytes(whole[:-30])
    with pytest.raises(ConfigError, match="gzip data cut off"):
        read_kineto(tmp_path / "cut.json.gz")


# Counted in the files with another reader (grep of the JSON): device spans, calls, steps, collectives.
REAL = {
    "resnet50_ddp_a100x2_rank0_3steps.json.gz": (3774, 8740, 3, 21),
    "trace_resnet50_v100_2steps.json.gz": (3086, 4028, 2, 0),
    "alexnet_a100_critical_path.json.gz": (98, 361, 0, 0),
}


@pytest.mark.parametrize("name", REAL)
def test_counts_of_real_traces(name):
    if not (TRACES / name).exists():
        pytest.skip("shared/ is absent: real traces are not part of the repository")
    trace = read_kineto(TRACES / name)
    assert (len(trace.device), len(trace.calls), len(trace.steps), len(trace.collectives)) == REAL[name]
