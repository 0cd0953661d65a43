"""Activations that a rank keeps against closed forms (Korthikanti et al. 2022, arXiv:2205.05198), and over a schedule.

Sizes: s tokens, b samples, h wide, a heads, t tensor-parallel ranks; bytes of 16-bit models.
"""

from functools import cache

import pytest

from perfmodel.api import Predictor, extract_graph
from perfmodel.config import load_plan
from perfmodel.plan.holding import Holding
from perfmodel.plan.schedule import Step, schedule
from perfmodel.plan.stage_memory import kept_bytes
from perfmodel.plan.tensor_parallel import tensor_parallel

S, B, H, A = 64, 2, 64, 4
GPT = {
    "kind": "transformer", "name": "gpt", "architecture": "gpt2", "implementation": "megatron", "batch_size": B,
    "precision": "bf16", "optimizer": "sgd", "vocab_size": 128, "hidden_size": H, "heads": A, "max_positions": S,
    "attention": "eager", "hidden_dropout": 0.1, "attention_dropout": 0.1, "embedding_dropout": 0.1,
}  # fmt: skip
FFN, GROUPS = 96, 2
LLAMA = {
    "kind": "transformer", "name": "llama", "architecture": "llama", "implementation": "megatron", "batch_size": 1,
    "precision": "bf16", "optimizer": "sgd", "vocab_size": 128, "hidden_size": H, "heads": A, "kv_heads": GROUPS,
    "ffn_size": FFN, "max_positions": S,
}  # fmt: skip
ROW_STATISTICS = 2 * 2 * 4 * S * B  # mean and inverse deviation in fp32 of two layer norms


@cache
def graphs(model):
    return tuple(extract_graph({**dict(model), "layers": layers}) for layers in (1, 2))


def kept_by_layer(model, tp=1, sequence=False):
    """What one more layer makes forward leave for backward."""
    sizes = []
    for whole in graphs(tuple(model.items())):
        graph = whole
        if tp > 1:
            plan = load_plan(f"tp={tp},tensor_parallel.sequence={str(sequence).lower()}")
            graph = tensor_parallel(whole, plan.tensor_parallel, tp)
        sizes.append(kept_bytes(graph))
    return sizes[1] - sizes[0]


def test_a_gpt_layer_keeps_what_korthikanti_counts() -> None:
    # Table 2, first row: s b h (34 + 5 a s / h); they leave out the statistics of the norms.
    assert kept_by_layer(GPT) == S * B * H * 34 + 5 * A * S * S * B + ROW_STATISTICS


def test_tensor_parallel_ranks_keep_what_korthikanti_counts() -> None:
    t = 2
    # Table 2, second row: s b h (10 + 24 / t + 5 a s / (h t)).
    assert kept_by_layer(GPT, tp=t) == S * B * H * (10 + 24 // t) + 5 * A * S * S * B // t + ROW_STATISTICS


def test_with_sequence_parallelism_all_of_it_is_divided() -> None:
    t = 2
    # Table 2, third row: s b h / t (34 + 5 a s / h).
    expected = (S * B * H * 34 + 5 * A * S * S * B + ROW_STATISTICS) // t
    assert kept_by_layer(GPT, tp=t, sequence=True) == expected


def test_recomputed_layers_keep_their_input() -> None:
    # Table 2, last row: 2 s b h.
    assert kept_by_layer({**GPT, "gradient_checkpointing": True}) == 2 * S * B * H


@pytest.mark.parametrize("t", [1, 2])
def test_a_llama_layer_keeps_what_a_count_by_hand_says(t) -> None:
    """Inputs and outputs of two norms, QKV (the value is a view of it), turned queries and keys, the attention's output and
    fp32 log-sum, gate and up, their product: with sequence parallelism each of them is divided by t.
    """
    head = H // A
    elems = 2 * H + 2 * H + (A + 2 * GROUPS) * head + (A + GROUPS) * head + H + 2 * FFN + FFN
    rows = 2 * elems * S + 4 * A * S  # one sample: more are copied once from samples first to tokens first
    kept = kept_by_layer(LLAMA, tp=t, sequence=t > 1)
    assert kept == pytest.approx(rows / t, abs=64)  # and the state of the attention's random numbers


@pytest.mark.parametrize(("kind", "in_flight"), [("1f1b", [4, 3, 2, 1]), ("gpipe", [8] * 4)])
def test_a_schedule_holds_its_micro_batches_in_flight_and_one_pass(kind, in_flight) -> None:
    for stage, n in enumerate(in_flight):
        holding = Holding(steps=schedule(kind, stage, 4, 8), kept_bytes=(100,), above_bytes=(7,))
        assert holding.peak_bytes() == 100 * n + 7


def test_interleaved_chunks_hold_the_passes_of_the_warm_up_and_one_more() -> None:
    # Narayanan et al. 2021: stage 0 of p runs 2 (p - 1) + (v - 1) p forwards before the steady state.
    p, v, m = 4, 2, 16
    holding = Holding(steps=schedule("interleaved", 0, p, m, v), kept_bytes=(10, 10), above_bytes=(0, 0))
    assert holding.peak_bytes() == 10 * (2 * (p - 1) + (v - 1) * p + 1)


def test_lifetimes_are_the_peak_taken_apart() -> None:
    holding = Holding(steps=schedule("zero_bubble", 1, 4, 8), kept_bytes=(100,), above_bytes=(7,))
    by_step = [0] * len(holding.steps)
    for size, begin, end in holding.lifetimes():
        for step in range(begin, end + 1):
            by_step[step] += size
    assert max(by_step) == holding.peak_bytes()
    assert by_step[-1] == 107


def test_chunks_of_unequal_size_do_not_peak_together() -> None:
    steps = (Step("forward", 0, 0), Step("backward", 0, 0), Step("forward", 0, 1), Step("backward", 0, 1))
    assert Holding(steps=steps, kept_bytes=(5, 9), above_bytes=(1, 2)).peak_bytes() == 11


@pytest.mark.parametrize("plan", ["pp=2,micro_batches=2", "tp=2", "zero1,accumulate=2"])
def test_pages_show_memory_over_time_of_spread_plans(plan) -> None:
    from perfmodel.report.evidence import memory_curves

    predictor = Predictor(model={**GPT, "layers": 2}, topology="dgx_a100")
    run = predictor.run(plan)
    curves = memory_curves(run)
    assert curves
    peaks = {lowered.rank_class.ranks: lowered.rank_class.memory.total_bytes for lowered in run.classes}
    for curve in curves:
        assert max(curve.bytes) == peaks[curve.ranks]
        assert curve.base_bytes > 0
