"""Copies of inputs: in line with kernels, with the host waiting, or during the step before; closed forms of made-up steps."""

import json
from functools import lru_cache

import pytest
import torch
from torch import nn

from perfmodel.api import predict_run
from perfmodel.cli import main
from perfmodel.errors import ConfigError
from perfmodel.sim.path import critical_path
from perfmodel.units import PS_PER_S

# Kernels of milliseconds behind launches of microseconds. WIDE computes longer than it copies, THIN copies longer.
WIDE, THIN = (8192, 4096, 8192), (4096, 65536, 1)
TABLES = {
    "kind": "dlrm", "name": "tables", "batch_size": 8192, "dense_features": 13, "bottom_mlp": [512, 64], "top_mlp": [512, 1],
    "embedding_dim": 64, "tables": [100000] * 8,
}  # fmt: skip


@lru_cache
def run(shape, copies=None, mode="eager"):
    n, wide, out = shape
    inputs = (torch.empty(n, wide, device="meta"), torch.empty(n, out, device="meta"))
    model = Regression(wide, out)
    return predict_run(model, "a100", inputs=inputs, input_copies=copies, mode=mode, check=True, bounds=False)


class Regression(nn.Module):
    def __init__(self, wide, out):
        super().__init__()
        self.layer = nn.Linear(wide, out, device="meta")

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layer(x), y)


def spent_ps(found, category):
    return sum(round(info.estimate.time_s * PS_PER_S) for info in found.classes[0].tasks if info.category == category)


@pytest.mark.parametrize("mode", ["eager", "cuda_graph", "compile"])
@pytest.mark.parametrize("shape", [WIDE, THIN])
def test_a_pinned_copy_stands_in_line_with_the_kernels(shape, mode):
    """The host is ahead: copies and kernels one after the other."""
    found = run(shape, "pinned", mode)
    copy_ps, kernel_ps = spent_ps(found, "copy"), spent_ps(found, "kernel")
    assert copy_ps > 0
    assert found.steady.iteration_ps == copy_ps + kernel_ps
    assert found.prediction.breakdown.exposed_copy_s == pytest.approx(copy_ps / PS_PER_S)
    assert found.prediction.breakdown.compute_s == pytest.approx(kernel_ps / PS_PER_S)
    on_path = {share.cause: share.time_s for share in found.prediction.critical_path}
    assert on_path["transfer"] == pytest.approx(copy_ps / PS_PER_S)


@pytest.mark.parametrize("mode", ["eager", "cuda_graph", "compile"])
@pytest.mark.parametrize("shape", [WIDE, THIN])
def test_a_prefetched_copy_hides_behind_the_step_before(shape, mode):
    found = run(shape, "prefetch", mode)
    copy_ps, kernel_ps = spent_ps(found, "copy"), spent_ps(found, "kernel")
    assert (copy_ps > kernel_ps) == (shape == THIN)
    assert found.steady.iteration_ps == max(copy_ps, kernel_ps)


@pytest.mark.parametrize("shape", [WIDE, THIN])
def test_a_pageable_copy_drains_the_device_and_launches_start_from_zero(shape):
    """From each copy's end to what is launched next lie the host work up to that launch, and the launch's own way."""
    found = run(shape, "pageable")
    lowered = found.classes[0]
    infos = list(lowered.tasks)
    syncs = [i for i, info in enumerate(infos) if info.category == "sync"]
    duration_ps, latency_ps = lowered.program.duration_ps, round(lowered.device.host.launch_latency_s * PS_PER_S)
    gap_ps = 0
    for sync in syncs:
        launched = next(i for i in range(sync + 1, len(infos)) if infos[i].category in ("copy", "kernel"))
        gap_ps += int(duration_ps[sync:launched].sum()) + latency_ps
    assert len(syncs) == 2
    busy_ps = spent_ps(found, "copy") + spent_ps(found, "kernel")
    assert found.steady.iteration_ps == busy_ps + gap_ps
    assert spent_ps(found, "kernel") == spent_ps(run(shape, "pinned"), "kernel")
    # Twice through memory: 0.4 of the link's rate instead of 0.78 (`kernels.transfer`).
    assert spent_ps(found, "copy") / spent_ps(run(shape, "pinned"), "copy") == pytest.approx(0.78 / 0.4, rel=1e-2)


def test_a_plain_script_copies_in_line():
    assert run(WIDE).steady.iteration_ps == run(WIDE, "pinned").steady.iteration_ps


def test_the_path_goes_through_kernels_and_copies_in_turn():
    found = run(WIDE, "pinned")
    infos = list(found.classes[0].tasks)
    stretches = [infos[s.task].category for s in critical_path(found.steady.timeline)]
    assert stretches.count("copy") == 2
    assert set(stretches) == {"copy", "kernel"}


def test_micro_batches_are_copied_between_each_other():
    """Each micro-batch brings its own; the kernels of all and all copies one after the other."""
    model = {"kind": "vision", "name": "small", "depth": 18, "batch_size": 64, "image_size": 224}
    found = predict_run(model, "a100", "ddp,accumulate=3", bounds=False)
    ahead = predict_run(model, "a100", "ddp,accumulate=3", bounds=False, input_copies="prefetch")
    assert found.steady.iteration_ps == spent_ps(found, "copy") + spent_ps(found, "kernel")
    assert ahead.steady.iteration_ps == spent_ps(found, "kernel")


def test_tables_fed_a_batch_ahead_keep_a_stream_of_their_own_for_it():
    placement = {f"t{i}": {"sharding": "table_wise", "ranks": [i]} for i in range(8)}
    plain, ahead = (
        predict_run(TABLES, "dgx", {"embeddings": {"placement": placement, "pipeline": name}}, bounds=False)
        for name in ("none", "sparse_dist")
    )

    def behind_kernels(found):
        infos = [list(lowered.tasks) for lowered in found.classes]
        return any(
            infos[i][dep.task].category == "copy" and infos[i][dep.on].category == "kernel"
            for i, lowered in enumerate(found.classes)
            for dep in lowered.carry
        )

    assert behind_kernels(plain)
    assert not behind_kernels(ahead)


def test_a_model_file_says_how_its_loop_copies(tmp_path, capsys):
    """`loop.input_copies` is what a run without the option does; the option goes before it."""
    model = {"kind": "vision", "name": "r18", "depth": 18, "batch_size": 256, "loop": {"input_copies": "prefetch"}}
    file = tmp_path / "r18.yaml"
    file.write_text(json.dumps(model))
    times = {}
    for option in ((), ("--input-copies", "pinned"), ("--input-copies", "prefetch"), ("--input-copies", "pageable")):
        with pytest.raises(SystemExit) as done:
            main(["predict", "--model", str(file), "--topo", "h100", "--json", *option])
        assert done.value.code == 0
        times[option[-1] if option else None] = json.loads(capsys.readouterr().out)["iteration_time_s"]
    assert times[None] == times["prefetch"] < times["pinned"] < times["pageable"]


def test_a_way_that_no_loop_copies():
    with pytest.raises(ConfigError, match=r"loop\.input_copies"):
        predict_run(
            {"kind": "vision", "name": "r", "depth": 18, "batch_size": 1, "loop": {"input_copies": "pin"}}, "a100"
        )


def test_nothing_is_copied_on_a_cpu():
    model = {"kind": "vision", "name": "r18", "depth": 18, "batch_size": 2, "image_size": 64}
    found = {
        way: predict_run(model, "cpu", input_copies=way, bounds=False) for way in ("pinned", "pageable", "prefetch")
    }
    assert len({run.steady.iteration_ps for run in found.values()}) == 1


def test_what_whole_tables_have_no_use_for_is_named():
    """A batch ahead and single travel are of TorchRec's kernels: tables of the model's own operators are predicted without."""
    options = {"pipeline": "sparse_dist", "gradient_precision": "bf16"}
    plain, asked = (
        predict_run(TABLES, "dgx", {"embeddings": {"strategy": "table_wise", **more}}, bounds=False).prediction
        for more in ({}, options)
    )
    assert asked.iteration_time_s == plain.iteration_time_s
    (note,) = set(asked.notes) - set(plain.notes)
    assert note.startswith("embeddings.gradient_precision, embeddings.pipeline: left out")
    placement = {f"t{i}": {"sharding": "table_wise", "ranks": [i]} for i in range(8)}
    sharded = predict_run(TABLES, "dgx", {"embeddings": {"placement": placement, **options}}, bounds=False).prediction
    assert not [note for note in sharded.notes if "left out" in note]
