"""Levels of utilisation against hand counts, counter files in the three formats, and the rendered table and picture."""

import json
from pathlib import Path

import pytest

from perfmodel.api import predict_run
from perfmodel.cli import main
from perfmodel.db import load_device
from perfmodel.errors import ConfigError
from perfmodel.report.utilisation import render_utilisation, write_picture
from perfmodel.traces.export import traces_of_run
from perfmodel.traces.kineto import read_kineto
from perfmodel.traces.spans import HostSpan, LaunchShape, OpArguments
from perfmodel.utilisation.counters import read_counters, with_counters
from perfmodel.utilisation.devices import device_of
from perfmodel.utilisation.families import pipe_of
from perfmodel.utilisation.levels import utilisation_of
from perfmodel.utilisation.occupancy import residency
from perfmodel.utilisation.work import op_work

TRACES = Path(__file__).parents[2].parent / "shared" / "data" / "traces"
A100 = load_device("a100_sxm_40gb")


GPT = {
    "kind": "transformer", "architecture": "gpt2", "name": "tiny_gpt", "vocab_size": 8000, "hidden_size": 1024, "layers": 2,
    "heads": 16, "max_positions": 1024, "sequence_length": 1024, "batch_size": 8, "precision": "amp_bf16",
    "optimizer": "adamw",
}  # fmt: skip


@pytest.fixture(scope="module")
def recsys():
    path = TRACES / "recsys_a100x8_rank3_6steps.json.gz"
    if not path.exists():
        pytest.skip("shared/ is absent: real traces are not part of the repository")
    return read_kineto(path)


def op(name, shapes, dtypes, values=()):
    arguments = OpArguments(shapes=shapes, dtypes=dtypes, values=values)
    return HostSpan(name=name, thread="1", start_s=0.0, end_s=1.0, arguments=arguments)


@pytest.mark.parametrize(
    ("case", "flops", "n_bytes"),
    [
        (op("aten::mm", ((8, 32), (32, 16)), ("float", "float")), 2 * 8 * 32 * 16, 4 * (8 * 32 + 32 * 16 + 8 * 16)),
        (op("aten::addmm", ((16,), (8, 32), (32, 16)), ("c10::Half",) * 3), 8192, 2 * (16 + 256 + 512 + 128)),
        (op("aten::bmm", ((3, 8, 32), (3, 32, 16)), ("float", "float")), 3 * 8192, 4 * 3 * (256 + 512 + 128)),
        # ResNet's first layer: 7x7 of stride 2 on 224x224, 112x112 out: 2 * 64 * 112^2 * 3 * 49 FLOPs a picture.
        (
            op("aten::convolution", ((2, 3, 224, 224), (64, 3, 7, 7), ()), ("float", "float", ""),
               ("", "", "", "[2, 2]", "[3, 3]", "[1, 1]", "False", "[0, 0]", "1")),
            2 * 2 * 64 * 112 * 112 * 147, 4 * (2 * 3 * 224 * 224 + 64 * 147 + 2 * 64 * 112 * 112),
        ),
        (op("aten::relu", ((10, 10),), ("float",)), 100, 800),
        (op("aten::mm", ((8, 32), (31, 16)), ("float", "float")), None, None),
        (op("aten::nonsense", ((8, 32),), ("float",)), None, None),
    ],
)  # fmt: skip
def test_work_of_ops_by_hand(case, flops, n_bytes):
    found = op_work(case)
    assert (found.flops, found.bytes) == (flops, n_bytes) if flops else found is None


def test_occupancy_and_waves_by_hand():
    """256 threads of 128 registers: 8 warps of 4096 registers, so 65536 / 4096 / 8 = 2 blocks an SM: 16 of 64 warps.

    Of 300 blocks on 108 SMs, 216 fill the first wave; 84 are left: 300/216 waves, and 84 of 108 SMs active in the second.
    """
    launch = LaunchShape(grid=(300, 1, 1), block=(256, 1, 1), registers=128)
    found = residency(launch, 108, "8.0", A100.smem_per_sm_bytes)
    assert found.occupancy_frac == pytest.approx(16 / 64)
    assert found.wave_frac == pytest.approx(300 / 216 / 2)
    assert found.sm_active_frac == pytest.approx((1 + 84 / 108) / 2)
    small = residency(LaunchShape(grid=(27, 1, 1), block=(64, 1, 1)), 108, "8.0", 0)
    assert (small.sm_active_frac, small.occupancy_frac) == (pytest.approx(0.25), pytest.approx(0.25 * 2 / 64))


def test_occupancy_agrees_with_the_profilers_own_estimate(recsys):
    """Kineto writes its estimate beside each kernel (0 where a kernel opts in to more shared memory); ours must agree."""
    launches = {s.launch for s in recsys.device if s.launch and s.launch.occupancy_frac}
    close = [
        abs(residency(launch, 108, "8.0", 167936).occupancy_frac - launch.occupancy_frac) < 0.011 for launch in launches
    ]
    assert len(close) > 100
    assert sum(close) / len(close) > 0.98


def test_pipes():
    assert pipe_of("ampere_sgemm_128x64_nn", "float") == "fp32"
    assert pipe_of("cutlass_80_tensorop_s1688gemm_64x64_16x6_nn_align4", "float") == "tf32_tensor"
    assert pipe_of("ampere_fp16_s16816gemm_fp16_64x64", "c10::Half") == "fp16_tensor"


def event(cat, name, ts, dur, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": tid, "args": args}


@pytest.fixture
def small(tmp_path):
    """A step of 100 us: a product at half the FP32 peak for 40 us, a copy of 10 us at a fifth of the link, then nothing."""
    flops = A100.peak_flops_per_s["fp32"] * 40e-6 / 2
    work = {"family": "gemm", "flops": int(flops), "bytes": int(A100.memory_bytes_per_s * 10e-6), "pipe": "fp32"}
    shape = {"grid": [54, 1, 1], "block": [256, 1, 1]}
    events = [
        event("user_annotation", "ProfilerStep#1", 0, 100),
        event("cpu_op", "aten::mm", 0, 25),
        event("cuda_runtime", "cudaLaunchKernel", 5, 10, correlation=1),
        event("cuda_runtime", "cudaStreamSynchronize", 30, 60, correlation=3),
        event("kernel", "gemm", 20, 40, tid=7, stream=7, correlation=1, perfmodel={**work, "phase": "forward"}, **shape),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 60, 10, tid=7, stream=7, correlation=2,
              bytes=int(A100.host_link_bytes_per_s * 2e-6)),
    ]  # fmt: skip
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return read_kineto(path)


def test_every_level_of_a_small_step(small):
    found = utilisation_of(small, A100)
    whole = found.rows[0].levels
    assert whole["device_busy"] == pytest.approx(0.5)
    assert whole["fp32_pipe"] == pytest.approx(0.2, rel=1e-3)
    assert whole["memory_bandwidth"] == pytest.approx(0.1, rel=1e-3)
    assert whole["host_link"] == pytest.approx(0.02, rel=1e-3)
    assert whole["main_thread"] == pytest.approx(0.25)
    assert whole["tensor_pipe"] == 0
    gemm = next(row for row in found.rows if row.name == "gemm")
    assert gemm.levels["fp32_pipe"] == pytest.approx(0.5, rel=1e-3)
    assert gemm.levels["sm_activity"] == pytest.approx(0.5)
    assert gemm.share_frac == pytest.approx(0.4)


def test_a_prediction_has_the_same_rows_as_a_trace():
    run = predict_run(GPT, "dgx_a100", "ddp", bounds=False)
    found = utilisation_of(traces_of_run(run)[0], run.classes[0].device)
    kinds = {row.kind for row in found.rows}
    assert kinds == {"whole", "phase", "module", "family"}
    whole = found.rows[0].levels
    assert all(whole[name] is not None and 0 <= whole[name] <= 1.01 for name in whole)
    # FLOPs over peak, counted from the prediction's own totals (FLOPs of 8 ranks, 312 TFLOP/s of bf16).
    share = run.prediction.work_flops / 8 / run.prediction.iteration_time_s / 312e12
    assert whole["tensor_pipe"] == pytest.approx(share, rel=0.1)


NCU = '''"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","1","ampere_sgemm","sm__warps_active.avg.pct_of_peak_sustained_active","%","20"
"0","1","ampere_sgemm","gpu__time_duration.sum","usecond","30"
"1","1","vectorized_elementwise_kernel","sm__warps_active.avg.pct_of_peak_sustained_active","%","80"
"1","1","vectorized_elementwise_kernel","gpu__time_duration.sum","usecond","10"
'''  # fmt: skip
DCGM = """#Entity   GRACT        SMACT        SMOCC        TENSO        DRAMA        PCITX        PCIRX
ID
GPU 0     0.600        0.500        0.300        0.100        0.200        1000         2000
GPU 0     0.400        0.300        0.100        0.300        0.400        3000         4000
"""
SMI = """# gpu     sm    mem    enc    dec  rxpci  txpci
# Idx      %      %      %      %   MB/s   MB/s
    0     90     40      0      0    100     50
    0     70     20      -      0    300    150
"""


def test_counters_replace_estimates(small, tmp_path):
    files = {}
    for name, text in (("ncu", NCU), ("dcgm", DCGM), ("smi", SMI)):
        files[name] = tmp_path / name
        files[name].write_text(text)
    found = utilisation_of(small, A100)
    ncu = with_counters(found, [read_counters(files["ncu"])])
    assert ncu.rows[0].levels["occupancy"] == pytest.approx((20 * 30 + 80 * 10) / 40 / 100)
    assert next(row for row in ncu.rows if row.name == "gemm").levels["occupancy"] == pytest.approx(0.2)
    dcgm = with_counters(found, [read_counters(files["dcgm"])]).rows[0]
    assert (dcgm.levels["device_busy"], dcgm.levels["tensor_pipe"]) == (pytest.approx(0.5), pytest.approx(0.2))
    assert dcgm.link_bytes_per_s == pytest.approx(5000)
    smi = with_counters(found, [read_counters(files["smi"])]).rows[0]
    assert (smi.levels["device_busy"], smi.link_bytes_per_s) == (pytest.approx(0.8), pytest.approx(300e6))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "found neither a column"),
        ("# a b\n1 2\n", "no column of use"),
        ('"ID","Kernel Name"\n1,k\n', "no metric"),
    ],
)
def test_other_counter_files_are_refused(tmp_path, text, message):
    (tmp_path / "f").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_counters(tmp_path / "f")


def test_table_and_picture(small, tmp_path, capsys):
    found = utilisation_of(small, A100)
    assert "whole step" in render_utilisation(found, 160)
    write_picture(found, tmp_path / "u.png")
    assert (tmp_path / "u.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(SystemExit) as stopped:
        main(["trace", "utilisation", small.path, "--device", "a100_sxm_40gb", "--json"])
    assert not stopped.value.code
    assert json.loads(capsys.readouterr().out)[0]["rows"][0]["levels"]["device_busy"] == pytest.approx(0.5)


def test_a_device_that_is_not_known_must_be_said(small):
    with pytest.raises(ConfigError, match="does not name its device; say --device"):
        device_of(small)


def test_a_board_name_is_known_by_its_sms_and_memory(recsys):
    assert device_of(recsys).name == "a100_sxm_40gb"
