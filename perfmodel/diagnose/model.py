"""Diagnosis of a model that was never run: its prediction is looked at as a trace, and each fix is predicted anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from perfmodel.diagnose.diagnose import LEAST_GAIN_FRAC, diagnose
from perfmodel.diagnose.finding import Finding
from perfmodel.errors import PerfModelError
from perfmodel.pipeline.run import Run
from perfmodel.traces.export import job_of_run

Again = Callable[[Mapping[str, Any]], Run]
PREDICTED = "predicted with the change"


def diagnose_run(run: Run, again: Again) -> tuple[Finding, ...]:
    """Findings of a prediction; `again` predicts the same model with some options of `api.predict_run` changed."""
    device = run.classes[0].device
    found = [_predicted(finding, run, again) for finding in diagnose(job_of_run(run), device)]
    kept = [finding for finding in found if finding.gain_frac >= LEAST_GAIN_FRAC]
    return tuple(sorted(kept, key=lambda finding: (-finding.gain_s, finding.cause.id)))


def _options(finding: Finding, run: Run) -> tuple[dict[str, Any], str]:
    """What to predict with for a fix, and in words what that leaves open; nothing where the predictor has no such option."""
    peak = run.classes[0].device.peak_flops_per_s
    half = "amp_bf16" if "bf16_tensor" in peak else "amp_fp16"
    by_cause: dict[str, tuple[dict[str, Any], str]] = {
        "small_batch": ({"batch": 2 * run.prediction.batch_per_rank}, ", per sample at twice the batch"),
        "tiny_kernels": ({"mode": "compile"}, ""),
        "launch_bound": ({"mode": "cuda_graph"}, ""),
        "wrong_precision": ({"precision": half}, ""),
        "unused_tensor_cores": ({"precision": "tf32"}, ""),
        "pageable_copies": ({"input_copies": "pinned"}, ""),
        "exposed_communication": ({"what_if": ("no comm",)}, "; at most, if all is hidden"),
    }
    return by_cause.get(finding.cause.id, ({}, ""))


def _predicted(finding: Finding, run: Run, again: Again) -> Finding:
    options, caveat = _options(finding, run)
    if not options:
        return finding
    try:
        changed = again(options).prediction
    except (
        PerfModelError
    ):  # the change is not possible here (does not fit, cannot be captured): the replay's answer stays
        return finding
    now = run.prediction
    per_sample = now.batch_per_rank / changed.batch_per_rank
    gain_s = now.iteration_time_s - changed.iteration_time_s * per_sample
    return replace(finding, gain_s=max(gain_s, 0.0), step_s=now.iteration_time_s, basis=f"{PREDICTED}{caveat}")
