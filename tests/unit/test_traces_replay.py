"""Truth tests: real traces replayed with every device start left to the simulator, and small traces with a known answer."""

import dataclasses
import json
from pathlib import Path

import pytest

from perfmodel.db import load_device
from perfmodel.errors import ConfigError
from perfmodel.pipeline.contention import RING_CROSSINGS
from perfmodel.sim import simulate
from perfmodel.sim.check import check_timeline
from perfmodel.traces.kineto import read_kineto
from perfmodel.traces.overlap import measure_by_channels, measure_overlap
from perfmodel.traces.replay import compare_collectives, compare_steps, replay_programs
from perfmodel.traces.spans import DeviceSpan, HostSpan, KinetoTrace, Step, SyncRecord

TRACES = Path(__file__).parents[2].parent / "shared" / "data" / "traces"
COLLECTIVE_LIMIT_S = 100e-6
STEP_LIMIT_FRAC = 0.03
US = 1e-6
OVERLAPPING = (TRACES / "recsys_a100x8_rank3_6steps.json.gz", TRACES / "resnet50_ddp_a100x2_rank0_3steps.json.gz")
A100 = load_device("a100_sxm_40gb")
# Of a group's narrowest lane, by the shipped topologies: NVLink 3 of a DGX A100, PCIe 4.0 x16. Sends of the recommender go
# between hosts, in bytes too few to count here.
BUS_BYTES_PER_S = {("send_recv", 8): 0.0, ("send_recv", 24): 0.0, ("all_reduce", 24): 228e9, ("all_reduce", 8): 26e9}


def traces(*paths):
    if not all(path.exists() for path in paths) or not paths:
        pytest.skip("shared/ is absent: real traces are not part of the repository")
    return [read_kineto(path) for path in paths]


@pytest.fixture(scope="module")
def dlrm():
    return traces(*sorted((TRACES / "dlrm_v100x8_kineto").glob("*.json.gz")))


def test_eight_ranks_of_dlrm_meet_as_measured(dlrm):
    ranks = replay_programs(dlrm)
    timeline = simulate([rank.program for rank in ranks])
    assert check_timeline(timeline) == []
    steps, collectives = compare_steps(ranks, timeline), compare_collectives(ranks, timeline)
    assert (len(steps), len(collectives)) == (8, 64)
    assert max(abs(row.duration_error_frac) for row in steps) < STEP_LIMIT_FRAC
    assert max(abs(row.end_error_s) for row in collectives) < COLLECTIVE_LIMIT_S
    assert max(abs(row.start_error_s) for row in collectives) < COLLECTIVE_LIMIT_S


def test_the_measured_truth_file_says_the_same_as_the_traces(dlrm):
    """A second reading of the same run, made by others: start and duration of each collective in us."""
    truth = json.loads((TRACES / "dlrm_v100x8_truth.json").read_text())
    first = min(trace.origin_us + 1e6 * trace.steps[0].start_s for trace in dlrm)
    for trace, expected in zip(dlrm, truth, strict=True):
        found = [
            (round(trace.origin_us + 1e6 * s.start_s - first), round(1e6 * s.duration_s)) for s in trace.collectives
        ]
        assert found == [(start, duration) for _, start, duration in expected["nccl"]]
        assert round(1e6 * trace.steps[0].duration_s) == expected["step_dur_us"]


def test_the_replay_is_not_told_when_ranks_meet(dlrm):
    """Holding one rank's host back by 5 ms must delay the collectives and the steps of all."""
    ranks = replay_programs(dlrm)
    before = simulate([rank.program for rank in ranks])
    late, delay_ps = ranks[2].program, 5 * 10**9
    tasks = [dataclasses.replace(late.tasks[0], duration_ps=late.tasks[0].duration_ps + delay_ps), *late.tasks[1:]]
    programs = [rank.program for rank in ranks]
    programs[2] = dataclasses.replace(late, tasks=tasks)
    after = simulate(programs)
    moved = [
        late.simulated_end_s - early.simulated_end_s
        for late, early in zip(compare_collectives(ranks, after), compare_collectives(ranks, before), strict=True)
    ]
    # Rank 2 came to the first collective 0.5 ms before the last rank did (their kernels ran 518 us and 10 us).
    assert min(moved) > 4e-3


@pytest.mark.parametrize(
    ("name", "n_steps", "slowdown"),
    [
        # The slowdown of compute beside NCCL on A100, as counted once by an independent script over the same files.
        ("resnet50_ddp_a100x2_rank0_3steps.json.gz", 3, 1.239),
        ("recsys_a100x8_rank3_6steps.json.gz", 6, 1.196),
        ("trace_resnet50_v100_2steps.json.gz", 2, None),
    ],
)
def test_steps_of_single_ranks_take_as_long_as_measured(name, n_steps, slowdown):
    (trace,) = traces(TRACES / name)
    ranks = replay_programs([trace])
    timeline = simulate([ranks[0].program])
    assert check_timeline(timeline) == []
    rows = compare_steps(ranks, timeline)
    assert len(rows) == n_steps
    assert max(abs(row.duration_error_frac) for row in rows) < STEP_LIMIT_FRAC
    if slowdown:
        assert measure_overlap(trace).time_weighted == pytest.approx(slowdown, abs=0.005)


def test_kernels_beside_collectives_by_channels():
    """Time-weighted, as counted by an independent script. What send and receive take is the share of the SMs they hold.

    `overlap.scale` of A100 is the pace lost over what `pipeline.contention` says of a kernel half bound by memory.
    """
    found = {(row.op, row.n_channels): row for trace in traces(*OVERLAPPING) for row in measure_by_channels(trace)}
    expected = {("send_recv", 8): 1.073, ("send_recv", 24): 1.278, ("all_reduce", 24): 2.483, ("all_reduce", 8): 1.259}
    assert {key: found[key].ratio for key in expected} == pytest.approx(expected, abs=0.02)
    for channels in (8, 24):
        assert found["send_recv", channels].ratio == pytest.approx(1 / (1 - channels / 108), rel=0.02)
    lost_s = said_s = 0.0
    for (op, channels), bus_bytes_per_s in BUS_BYTES_PER_S.items():
        row = found[op, channels]
        wanted = RING_CROSSINGS * bus_bytes_per_s / A100.memory_bytes_per_s
        lost_s += row.beside_s - row.alone_s
        said_s += row.beside_s * (channels / A100.n_sms + 0.5 * wanted / (1 + wanted))
    assert lost_s / said_s == pytest.approx(A100.overlap.scale, rel=0.02)


def test_ranks_of_different_runs_are_refused(dlrm):
    fewer = dataclasses.replace(dlrm[1], device=tuple(s for s in dlrm[1].device if not s.is_collective))
    with pytest.raises(ConfigError, match="different numbers of collectives"):
        replay_programs([dlrm[0], fewer])
    spans = [dataclasses.replace(s, name="ncclOther") if s.is_collective else s for s in dlrm[1].device]
    with pytest.raises(ConfigError, match="collective 0 differs between ranks"):
        replay_programs([dlrm[0], dataclasses.replace(dlrm[1], device=tuple(spans))])


def test_a_trace_without_launches_is_refused(dlrm):
    with pytest.raises(ConfigError, match="no call launches device work"):
        replay_programs([dataclasses.replace(dlrm[0], device=())])


def call(name, start, end, correlation):
    return HostSpan(name=name, thread="1", start_s=start * US, end_s=end * US, correlation=correlation)


def kernel(stream, start, end, correlation):
    return DeviceSpan(
        name="k", kind="kernel", stream=stream, start_s=start * US, end_s=end * US, correlation=correlation
    )


def two_streams(syncs):
    """A long kernel on stream 7, an event, a short kernel after it on 7; stream 20 waits for the event, not for the last."""
    calls = [
        call("cudaLaunchKernel", 0, 5, 1),
        call("cudaEventRecord", 5, 6, 2),
        call("cudaLaunchKernel", 6, 10, 3),
        call("cudaStreamWaitEvent", 10, 11, 4),
        call("cudaLaunchKernel", 11, 15, 5),
    ]
    device = [kernel(7, 8, 58, 1), kernel(20, 59, 70, 5), kernel(7, 59, 90, 3)]
    return KinetoTrace(
        path="t.json",
        rank=0,
        world_size=1,
        origin_us=0.0,
        ops=(),
        calls=tuple(calls),
        device=tuple(device),
        steps=(Step(name="ProfilerStep#0", start_s=0.0, end_s=20 * US),),
        syncs=syncs,
    )


@pytest.mark.parametrize("recorded", [True, False])
def test_a_stream_waits_for_the_event_and_not_for_what_comes_after_it(recorded):
    record = SyncRecord(kind="Stream Wait Event", correlation=4, stream=20, on_stream=7, record_correlation=2)
    (rank,) = replay_programs([two_streams((record,) if recorded else ())])
    timeline = simulate([rank.program])
    ends = {c: int(timeline.ends(0)[task]) for c, task in rank.device_tasks.items()}
    starts = {c: int(timeline.starts(0)[task]) for c, task in rank.device_tasks.items()}
    # Kernel 1 starts 8 us after its call and runs 50; the others follow it after the one gap the trace shows, 1 us.
    assert ends[1] == 58_000_000
    assert starts[5] == starts[3] == 59_000_000


def test_a_recorded_wait_for_another_stream_is_believed_over_the_clock():
    record = SyncRecord(kind="Stream Wait Event", correlation=4, stream=21, on_stream=7, record_correlation=2)
    (rank,) = replay_programs([two_streams((record,))])
    timeline = simulate([rank.program])
    assert int(timeline.starts(0)[rank.device_tasks[5]]) == (11 + 8) * 1_000_000  # its launch alone holds it back
