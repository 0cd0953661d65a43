"""Which cases a CUDA calibration measures first: as many of the plan as fit into its time.

A round of a case is expected to take

    overhead + device time of its series (`measure_cuda.round_s`),   call = floor + bytes / bandwidth + FLOPs / peak

with half of the datasheet's rates. The overhead (tensors, one lap to warm up, capture, instantiation and freeing of a
graph) is an assumption; the time limit holds in any case, and what a first run leaves is measured by the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from calibrate.cases import PLANS, Case, Limits, draw_cases, tensor_args
from calibrate.cases.case import MAX_SETS
from calibrate.cases.gpu import MORE, limits_of, on_gpu
from calibrate.measure_cuda import COLD_FACTOR, round_s
from perfmodel.db.device import Device

OVERHEAD_S = 15e-3  # of a round of a case, beside its device time
REACHED_FRAC = 0.5  # of the datasheet's rates
# Of the time limit, what is left to the first plan: a second one where the law fits worst, host overheads, and fits.
FIRST_FRAC = 0.8
FIT_S = 105.0  # of fitting a whole plan once: CPU time of one core (Zen 4 at 3.6 GHz, 2026-11-30); it is done twice
# A convolution's, product's or attention's forward: 2 FLOPs a multiplication; backward: two products where forward has one,
# 2.5 of attention, whose scores are made again.
_PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten.bmm"})


def flops_of(case: Case) -> float:
    """Multiplications and additions of a product, convolution or attention; 0 for the rest, which memory bounds."""
    tensors = [math.prod(arg.shape) for arg in tensor_args(case.args)]
    shapes = [arg.shape for arg in tensor_args(case.args)]
    if case.op in _PRODUCTS:
        return 2.0 * tensors[-2] * shapes[-1][-1]
    if case.op == "aten.convolution":
        rows = float(tensors[0] / shapes[0][1] / math.prod(case.args[3]))
        return 2.0 * rows * tensors[1]
    if case.op == "aten.convolution_backward":
        return float(4.0 * tensors[0] / shapes[0][1] * tensors[2])
    if "scaled_dot_product" in case.op:
        return (10.0 if "backward" in case.op else 4.0) * tensors[0] * shapes[0][2]
    return 0.0


def case_s(case: Case, device: Device, budget_s: float) -> float:
    """Seconds that a round of the case is expected to take."""
    half = any(arg.dtype in {"bfloat16", "float16"} for arg in tensor_args(case.args))
    peaks = device.peak_flops_per_s
    peak = max((peaks.get(pipe, 0.0) for pipe in ("bf16_tensor", "fp16_tensor")), default=0.0) if half else 0.0
    rate = REACHED_FRAC * max(peak, peaks["fp32"])
    call_s = device.kernel_floor_s + 2 * case.bytes / (REACHED_FRAC * device.memory_bytes_per_s) + flops_of(case) / rate
    wanted = COLD_FACTOR * device.l2_bytes / max(2 * case.bytes, 1)
    n_sets = min(max(2, math.ceil(wanted)), MAX_SETS) if case.state == "cold" else 1
    return OVERHEAD_S + round_s(call_s, n_sets, budget_s)


def expected_s(cases: Iterable[Case], device: Device, *, rounds: int, budget_s: float) -> float:
    """Seconds that all rounds of the cases are expected to take."""
    return rounds * sum(case_s(case, device, budget_s) for case in cases)


def first_plan(
    families: Sequence[str], device: Device, *, share: float, limit_s: float, rounds: int, budget_s: float
) -> Mapping[str, Sequence[Case]]:
    """Cases of each family: `share` of the plan, or as much of it as is expected to fit into `limit_s` with its fits."""
    whole = {family: drawn(device, family, 0, share) for family in families}
    asked_s = sum(expected_s(cases, device, rounds=rounds, budget_s=budget_s) for cases in whole.values())
    left_s = FIRST_FRAC * limit_s - 2 * FIT_S * share
    fits = min(1.0, max(left_s, 0.0) / asked_s)
    if fits >= 1.0:
        return whole
    return {family: drawn(device, family, 0, share * fits) for family in families}


def drawn(device: Device, family: str, stage: int, share: float = 1.0) -> list[Case]:
    """The cases of a family at a stage of its generators, as `device` runs them."""
    cases = (on_gpu(case, device) for case in _drawn(family, limits_of(device), share, stage))
    return list({case.key: case for case in cases}.values())


@lru_cache(maxsize=4 * len(PLANS))
def _drawn(family: str, limits: Limits, share: float, stage: int) -> tuple[Case, ...]:
    return tuple(draw_cases(family, share=share, stage=stage, limits=limits, more=MORE.get(family)))
