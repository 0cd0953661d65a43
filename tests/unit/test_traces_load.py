"""Traces as people have them: damaged, incomplete, of several ranks with clocks apart; and small ones with known answers."""

import gzip
import json
from pathlib import Path

import pytest

from perfmodel.cli import main
from perfmodel.errors import ConfigError
from perfmodel.traces.explain import explain_lateness, explain_steps
from perfmodel.traces.kineto import read_kineto, read_processes
from perfmodel.traces.link import find_steps, link
from perfmodel.traces.nccl import KernelName, parse_kernel_name
from perfmodel.traces.ranks import load_job, make_job

SHARED = Path(__file__).parents[2].parent / "shared"
TRACES = SHARED / "data" / "traces"
US = 1e-6


def case(number, *names):
    folders = list((SHARED / "cases").glob(f"{number}-*"))
    if not folders:
        pytest.skip("shared/ is absent: cases are not part of the repository")
    return [folders[0] / name for name in names]


def event(cat, name, ts, dur, tid=1, pid=0, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}


def write(folder, events, name="t.json", **header):
    path = folder / name
    path.write_text(json.dumps({**header, "traceEvents": events}))
    return path


def busy_us(trace):
    return sum(span.duration_s for span in trace.device) / US


# Case 50: damaged files.


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cut.json", r"cut\.json: not JSON: Unterminated string.* at byte \d+$"),
        ("missing_quote.json", r"missing_quote\.json: not JSON: .* at byte 289$"),
        ("cut.json.gz", r"cut\.json\.gz: gzip data cut off at byte \d+$"),
    ],
)
def test_a_damaged_file_is_refused_with_its_position(name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_kineto(case(50, name)[0])
    assert len(caught.value.problems) == 1


def test_whole_events_of_a_cut_file_are_kept_on_request_and_the_loss_is_said():
    trace = read_kineto(case(50, "cut.json")[0], salvage=True)
    assert len([s for s in trace.device if s.kind == "kernel"]) == 2
    assert busy_us(trace) == pytest.approx(50)
    assert any(note.kind == "dropped" and "Unterminated string" in note.text for note in trace.notes)


def test_a_raw_control_character_is_accepted():
    trace = read_kineto(case(50, "control_char.json")[0])
    assert (len(trace.device), busy_us(trace)) == (3, pytest.approx(100))


def test_salvage_goes_on_behind_one_broken_event(tmp_path):
    """Six events, the third without its closing quote: the other five are whole."""
    lines = [json.dumps(event("kernel", f"k{i}", 10 * i, 5, stream=7, correlation=i + 1)) for i in range(6)]
    lines[2] = lines[2].replace('"name": "k2"', '"name": "k2')
    (tmp_path / "t.json").write_text('{"traceEvents": [\n' + ",\n".join(lines) + "\n]}")
    trace = read_kineto(tmp_path / "t.json", salvage=True)
    assert [span.name for span in trace.device] == ["k0", "k1", "k3", "k4", "k5"]
    assert any(note.kind == "dropped" for note in trace.notes)


# Case 51: something is missing.


def test_launches_without_kernels_are_said_and_not_measured_as_no_time():
    job = load_job(case(51, "cpu_only.json"))
    assert not explain_steps(job)[0].device_known
    assert [(n.count, n.text.split(":")[0]) for n in job.traces[0].notes if "launches" in n.text] == [(3, "kernels")]


def test_a_trace_of_only_metadata_says_that_it_holds_no_events():
    with pytest.raises(ConfigError, match="no host or device spans among 2 events"):
        load_job(case(51, "metadata_only.json"))


@pytest.mark.parametrize("name", ["no_memset_no_memcpy.json", "bare_list.json", "missing_distributed_info.json"])
def test_incomplete_traces_have_all_their_kernels(name):
    trace = load_job(case(51, name)).traces[0]
    assert (len(trace.device), busy_us(trace)) == (3, pytest.approx(100))
    assert (trace.rank, trace.world_size) == (0, 1)
    assert any("as the trace names none" in n.text for n in trace.notes) == (name != "no_memset_no_memcpy.json")


# Case 54: two ranks, clocks 11.56 s apart.


def test_clocks_are_aligned_by_the_ends_of_collectives():
    expected = json.loads(case(54, "expected.json")[0].read_text())
    job = load_job(case(54, "rank0.json", "rank1.json"))
    assert job.skew_s[1] == pytest.approx(expected["true_clock_offset_us"] * US, abs=1e-6)
    (shared,) = job.collectives
    assert (shared.info.op, shared.info.bytes) == ("all_reduce", expected["bytes"])
    assert shared.transfer_s == pytest.approx(expected["transfer_us"] * US)
    assert shared.wait_s(0) == pytest.approx(expected["wait_us_rank0"] * US)
    assert (shared.last_rank, shared.lateness_s) == (1, pytest.approx(expected["true_start_skew_us"] * US))
    assert shared.info.bytes / shared.transfer_s / 1e9 == pytest.approx(expected["algbw_GBps_from_transfer"], rel=1e-3)


# Real traces.

# Steps as the files mark them (ProfilerStep), in us.
STEPS = {
    "recsys_a100x8_rank3_6steps.json.gz": [75473, 76940, 76212, 76727, 78473, 81120],
    "resnet50_ddp_a100x2_rank0_3steps.json.gz": [222442.191, 219726.905, 224936.243],
    "trace_resnet50_v100_2steps.json.gz": [126824, 126272],
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_real_traces_last_as_recorded_and_their_parts_add_up(name):
    if not TRACES.exists():
        pytest.skip("shared/ is absent: real traces are not part of the repository")
    rows = explain_steps(load_job([TRACES / name]))
    assert [row.step.duration_s for row in rows] == pytest.approx([us * US for us in STEPS[name]], rel=1e-6)
    for row in rows:
        assert sum(row.parts.values()) == pytest.approx(row.step.duration_s, rel=1e-6)


def test_eight_ranks_of_dlrm_wait_for_rank_7_which_began_its_step_last():
    """The truth file (a second reading by others) has rank 7's step begin last and its first kernel run 10 us."""
    paths = sorted((TRACES / "dlrm_v100x8_kineto").glob("*.json.gz"))
    if not paths:
        pytest.skip("shared/ is absent: real traces are not part of the repository")
    truth = json.loads((TRACES / "dlrm_v100x8_truth.json").read_text())
    last_to_begin = max(truth, key=lambda row: row["step_start"])["rank"]
    first_of = {row["rank"]: row["nccl"][0] for row in truth}
    job = load_job(paths)
    worst = max(explain_lateness(job), key=lambda row: row.waited_s)
    assert worst.rank == last_to_begin == min(first_of, key=lambda rank: first_of[rank][2])
    assert worst.cause.startswith("work before its step began")
    waited_us = sum(duration - first_of[last_to_begin][2] for _, _, duration in first_of.values())
    assert worst.waited_s / US == pytest.approx(waited_us, rel=1e-6)
    assert max(abs(skew) for skew in job.skew_s.values()) < 2 * US  # one machine, one clock


# Small traces with known answers.

NAMES = [  # one of each family of NCCL versions, as profilers wrote them
    ("ncclAllReduceRingLLKernel_sum_f32(ncclColl)", ("all_reduce", "ring", "ll")),
    ("ncclAllReduceTreeLL128Kernel_sum_f16(ncclColl)", ("all_reduce", "tree", "ll128")),
    ("ncclReduceScatterRingKernel_sum_f32(ncclColl)", ("reduce_scatter", "ring", "simple")),
    ("ncclBroadcastRingLLKernel_copy_i8(ncclColl)", ("broadcast", "ring", "ll")),
    ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", ("all_reduce", "ring", "ll")),
    ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", ("send_recv", "ring", "simple")),
    ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)", ("all_gather", "ring", "ll")),
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)", ("all_reduce", "ring", "ll")),
    ("ncclDevKernel_AllReduce_Sum_bf16_NVLS_SIMPLE", ("all_reduce", "nvls", "simple")),
    ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", ("all_gather", "ring", "ll")),
    ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", ("reduce_scatter", "ring", "ll")),
    ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", ("send_recv", "", "")),
    ("ncclDevKernel_Generic_4(ncclDevKernelArgs)", ("unknown", "", "")),
    ("ncclSymDevKernel_AllReduce_AGxLL_R_sum_bf16", ("all_reduce", "", "")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "expected"), NAMES)
def test_names_of_communication_kernels(name, expected):
    op, algorithm, protocol = expected
    assert parse_kernel_name(name) == KernelName(op=op, algorithm=algorithm, protocol=protocol)


def process(pid, rank, shift=0):
    base = 1000 + shift
    return [
        event("cpu_op", "aten::mm", base, 40, pid=pid, tid=pid),
        event("cuda_runtime", "cudaLaunchKernel", base + 10, 5, pid=pid, tid=pid, correlation=10 + rank),
        event(
            "kernel", f"gemm_of_{rank}", base + 20, 30, pid=rank, tid=7, stream=7, device=rank, correlation=10 + rank
        ),
    ]


def test_two_processes_in_one_file_are_two_traces(tmp_path):
    path = write(tmp_path, [*process(400, 0), *process(500, 1, 7)])
    first, second = read_processes(path)
    assert [span.name for span in first.device] == ["gemm_of_0"]
    assert [span.name for span in second.device] == ["gemm_of_1"]
    assert (first.rank, second.rank) == (0, 1)
    assert any(note.kind == "guessed" for note in first.notes)


def test_kernels_of_a_cuda_graph_belong_to_its_launch(tmp_path):
    events = [
        event("cpu_op", "graph_replay", 0, 30),
        event("cuda_runtime", "cudaGraphLaunch", 5, 10, correlation=9),
        *(
            event("kernel", f"k{i}", 20 + 10 * i, 8, tid=7, stream=7, correlation=9, **{"graph node id": 100 + i})
            for i in range(3)
        ),
    ]
    trace = read_kineto(write(tmp_path, events))
    assert [(w.call, trace.ops[w.op].name) for w in link(trace).work] == [(0, "graph_replay")] * 3
    assert [span.graph_node for span in trace.device] == [100, 101, 102]


def test_work_without_a_launch_is_linked_by_external_id_and_counted(tmp_path):
    events = [
        event("cpu_op", "aten::relu", 0, 30, **{"External id": 4}),
        event("kernel", "relu", 20, 8, tid=7, stream=7, **{"External id": 4}),
    ]
    trace = read_kineto(write(tmp_path, events))
    assert trace.ops[link(trace).work[0].op].name == "aten::relu"
    assert any(n.kind == "missing" and n.count == 1 and "correlation ids" in n.text for n in trace.notes)


def test_phase_and_module_follow_from_what_is_around(tmp_path):
    backward = {"Sequence number": 3, "Fwd thread id": 1}
    events = [
        event("python_function", "nn.Module: Net_0", 0, 50),
        event("python_function", "nn.Module: Linear_1", 5, 40),
        event("cpu_op", "aten::linear", 10, 20, **{"Sequence number": 3, "Fwd thread id": 0}),
        event("cuda_runtime", "cudaLaunchKernel", 12, 5, correlation=1),
        event("kernel", "fwd", 20, 5, tid=7, stream=7, correlation=1),
        event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 60, 30, tid=2, **backward),
        event("cuda_runtime", "cudaLaunchKernel", 65, 5, tid=2, correlation=2),
        event("kernel", "bwd", 75, 5, tid=7, stream=7, correlation=2),
        event("user_annotation", "Optimizer.step#SGD.step", 100, 30),
        event("cpu_op", "aten::add_", 105, 20),
        event("cuda_runtime", "cudaLaunchKernel", 110, 5, correlation=3),
        event("kernel", "opt", 120, 5, tid=7, stream=7, correlation=3),
    ]
    found = [(w.span.name, w.phase, w.module) for w in link(read_kineto(write(tmp_path, events))).work]
    assert found == [
        ("fwd", "forward", "Net_0.Linear_1"),
        ("bwd", "backward", "Net_0.Linear_1"),
        ("opt", "optimizer", ""),
    ]


def test_steps_without_marks_are_guessed_from_the_optimizer(tmp_path):
    events = [event("user_annotation", "Optimizer.step#Adam.step", 100 * i + 80, 10) for i in range(4)]
    trace = read_kineto(write(tmp_path, [event("cpu_op", "aten::mm", 0, 5), *events]))
    steps, how = find_steps(trace)
    assert [step.duration_s / US for step in steps] == pytest.approx([100, 100, 100])
    assert "guessed" in how


def test_ranks_that_miss_are_said(tmp_path):
    path = write(tmp_path, process(1, 2), distributedInfo={"rank": 2, "world_size": 4})
    job = make_job([read_kineto(path)])
    assert any(n.kind == "missing" and n.count == 3 and "(0, 1, 3)" in n.text for n in job.notes)


def test_the_command_prints_what_was_dropped_and_json(tmp_path, capsys):
    path = write(
        tmp_path, [*process(1, 0), event("kernel", "odd", "soon", 3), {"ph": "X", "cat": "newthing", "name": "n"}]
    )
    for flags in ([], ["--json"]):
        with pytest.raises(SystemExit) as stopped:
            main(["trace", "load", str(path), *flags])
        assert not stopped.value.code
    out = capsys.readouterr().out
    assert "dropped: 1 without a start (ts)" in out
    assert "dropped: 1 of unknown category 'newthing'" in out
    assert json.loads(out[out.index("{") :])["ranks"][0]["kernels"] == 1


def test_gzip_of_two_members_is_read_whole(tmp_path):
    text = json.dumps({"traceEvents": process(1, 0)}).encode()
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(text[:100]) + gzip.compress(text[100:]))
    assert len(read_kineto(tmp_path / "t.json.gz").device) == 1
