"""`pipeline.scatter_gather`: tensor-parallel ranks send a part each and gather (Narayanan et al. 2021, section 4.1)."""

from collections import Counter

import pytest

from perfmodel.api import Predictor

HIDDEN_BYTES = 1 * 64 * 128 * 2  # one sample a micro-batch, 64 tokens, width 128, bf16
MICRO = 4
MODEL = {
    "kind": "transformer", "name": "gpt", "architecture": "gpt2", "implementation": "megatron", "batch_size": MICRO,
    "precision": "bf16", "optimizer": "sgd", "vocab_size": 512, "hidden_size": 128, "layers": 4, "heads": 4,
    "max_positions": 64, "attention": "eager",
}  # fmt: skip
PLAN = f"tp=2,pp=2,micro_batches={MICRO}"


def moved(plan: str) -> list[Counter[tuple[str, int, int]]]:
    """What ranks of each class send and gather of activations: (collective, bytes, ranks) by how often."""
    found = []
    for lowered in Predictor(model=MODEL, topology="dgx_a100").run(plan).classes:
        collectives = [e.collective for e in lowered.rank_class.events if e.collective is not None]
        crossing = [c for c in collectives if c.purpose in ("activations", "gradients of activations")]
        found.append(Counter((c.op, c.bytes, len(c.ranks)) for c in crossing))
    return found


def test_parts_are_sent_and_gathered() -> None:
    first, last = moved(f"{PLAN},pipeline.scatter_gather=true")
    sent = {("send_recv", HIDDEN_BYTES // 2, 2): 2 * MICRO}  # of each micro-batch the activations and their gradients
    gathered = {("all_gather", HIDDEN_BYTES, 2): MICRO}  # the first stage receives gradients, the last activations
    assert first == sent | gathered
    assert last == first


def test_all_of_it_is_sent_without() -> None:
    assert moved(PLAN) == [{("send_recv", HIDDEN_BYTES, 2): 2 * MICRO}] * 2


def test_divided_tokens_are_sent_as_they_are() -> None:
    plain, scattered = (
        moved(f"{PLAN},tensor_parallel.sequence=true{end}") for end in ("", ",pipeline.scatter_gather=true")
    )
    assert plain == scattered


def test_wide_activations_between_nodes_take_less_time() -> None:
    model = {**MODEL, "hidden_size": 4096, "heads": 32, "max_positions": 2048, "layers": 2}
    predictor = Predictor(model=model, topology="dgx_a100_80gb_4nic", nodes=2)
    plan = f"tp=8,pp=2,micro_batches={MICRO}"
    whole, parts = (predictor.predict(plan + end).iteration_time_s for end in ("", ",pipeline.scatter_gather=true"))
    assert parts < whole


@pytest.mark.parametrize("text", ["tp=1,pp=2", "tp=2,pp=1"])
def test_nothing_changes_without_a_group_or_a_cut(text: str) -> None:
    assert moved(f"{text},micro_batches={MICRO},pipeline.scatter_gather=true") == moved(f"{text},micro_batches={MICRO}")
