"""Whatever a trace file holds, reading and explaining it gives an answer or one clear line, never another exception."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from perfmodel.db import load_device
from perfmodel.diagnose.diagnose import diagnose
from perfmodel.errors import ConfigError
from perfmodel.traces.explain import explain_lateness, explain_steps
from perfmodel.traces.link import link
from perfmodel.traces.ranks import load_job
from perfmodel.utilisation.levels import utilisation_of

SHARED = Path(__file__).parents[2].parent / "shared"
A100 = load_device("a100_sxm_40gb")
SOURCES = ("cuda_event_sync_multi_stream_a100.json.gz",)

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
times = st.integers(0, 500) | st.floats(0, 500, allow_nan=False)
names = st.sampled_from(
    ["aten::mm", "ProfilerStep#1", "Optimizer.step#SGD.step", "cudaLaunchKernel", "cudaStreamSynchronize", "[memory]",
     "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "enumerate(DataLoader)#x", "Memcpy HtoD (Pageable -> Device)",
     "nn.Module: A_0"]
)  # fmt: skip
categories = st.sampled_from(
    ["cpu_op", "user_annotation", "cuda_runtime", "kernel", "gpu_memcpy", "gpu_memset", "cuda_sync", "python_function"]
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "correlation": st.integers(0, 6) | values,
        "External id": st.integers(0, 6) | values,
        "stream": st.integers(0, 3) | values,
        "Input Dims": values,
        "Input type": values,
        "grid": values,
        "block": values,
        "Collective name": values,
        "In msg nelems": values,
        "Process Group Ranks": values,
        "Sequence number": values,
        "bytes": values,
        "perfmodel": values,
    },
)
events = st.fixed_dictionaries(
    {"ph": st.sampled_from(["X", "X", "X", "i", "M"]), "cat": categories, "name": names, "ts": times, "dur": times},
    optional={"args": arguments | values, "tid": st.integers(0, 3) | values, "pid": st.integers(0, 2) | values},
)


def survives(*paths, salvage=False):
    try:
        job = load_job(paths, salvage=salvage)
    except ConfigError:
        return  # one clear line for each mistake
    for row in explain_steps(job):
        assert sum(row.parts.values()) == pytest.approx(row.step.duration_s, abs=1e-9)
    explain_lateness(job)
    for trace in job.traces:
        link(trace)
    diagnose(job, A100)
    utilisation_of(job.traces[0], A100)


EVENT = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 0}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    st.lists(events | values, max_size=14),
    st.dictionaries(st.sampled_from(["distributedInfo", "deviceProperties"]), values),
)
@example([{**EVENT, "pid": 0}, EVENT, {**EVENT, "cat": "kernel"}], {})  # one process with a device, one without
def test_any_list_of_events(tmp_path_factory, listed, header):
    path = tmp_path_factory.mktemp("fuzz") / "t.json"
    path.write_text(json.dumps({**header, "traceEvents": listed}))
    survives(path)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda t: ('{"traceEvents": [' + t).encode()), st.booleans())
def test_any_bytes(tmp_path_factory, body, salvage):
    path = tmp_path_factory.mktemp("fuzz") / "t.json"
    path.write_bytes(body)
    survives(path, salvage=salvage)


def mutations(text, number):
    """One damaged copy of a text: cut, bytes changed, a piece doubled or removed, numbers or words replaced."""
    rng = random.Random(number)
    body = bytearray(text)
    a, b = sorted(rng.randrange(len(body)) for _ in range(2))
    kind = number % 6
    if kind == 0:
        return bytes(body[:a])
    if kind == 1:
        for _ in range(rng.randrange(1, 20)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        return bytes(body)
    if kind == 2:
        return bytes(body[:a] + body[min(b, a + 300) :])
    if kind == 3:
        return bytes(body[:a] + body[a : a + 400] + body[a:])
    if kind == 4:
        return bytes(body).replace(rng.choice([b'"dur"', b'"ts"', b'"correlation"', b'"cat"', b'"tid"']), b'"x"')
    return bytes(body).replace(
        b"1", rng.choice([b"-1", b"1e300", b"null", b'"z"', b"9999999999999999999999", b"11"]), rng.randrange(1, 60)
    )


def sources():
    folder = SHARED / "data" / "traces"
    found = [folder / name for name in SOURCES if (folder / name).exists()]
    found += sorted((SHARED / "cases").glob("54-*/rank0.json"))
    return found


@pytest.mark.parametrize("salvage", [False, True])
def test_mutated_real_traces(tmp_path, salvage):
    import gzip

    if not sources():
        pytest.skip("shared/ is absent: real traces are not part of the repository")
    path = tmp_path / "t.json"
    for source in sources():
        raw = source.read_bytes()
        text = gzip.decompress(raw) if source.suffix == ".gz" else raw
        for number in range(90):
            path.write_bytes(mutations(text, number))
            survives(path, salvage=salvage)
