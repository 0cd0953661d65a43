"""Recomputation by a plan: the kernels that the model's own checkpointing dispatches; what is kept by the papers' counts."""

from functools import cache

import pytest

from perfmodel.config import load_model
from perfmodel.errors import InfeasiblePlanError
from perfmodel.extract import trace
from perfmodel.graph import Graph
from perfmodel.models import build
from perfmodel.plan.facts import facts_of
from perfmodel.plan.memory import dense_memory
from perfmodel.plan.recompute import recomputed

BATCH, TOKENS, WIDTH, LAYERS, HEADS = 2, 128, 64, 3, 4
MODEL = {
    "kind": "transformer", "name": "tiny", "architecture": "gpt2", "batch_size": BATCH, "precision": "bf16",
    "optimizer": "adamw", "vocab_size": 512, "hidden_size": WIDTH, "layers": LAYERS, "heads": HEADS,
    "max_positions": TOKENS, "attention": "eager", "hidden_dropout": 0.1, "attention_dropout": 0.1,
}  # fmt: skip
SCALARS = 2 * LAYERS  # the scale of the scores, of 2 bytes
VIEWS = {
    "view",
    "detach",
    "t",
    "transpose",
    "expand",
    "_unsafe_view",
    "split",
    "alias",
    "permute",
    "unsqueeze",
    "slice",
}


@cache
def model(**changes) -> Graph:
    return trace(build(load_model({**MODEL, **changes})))


def kernels(graph: Graph) -> list[tuple]:
    """What runs on the device in order, views apart."""
    return [
        (op.name, op.phase, op.recompute, op.module, [s.shape for s in op.outputs])
        for op in graph.ops
        if op.name.partition(".")[2] not in VIEWS
    ]


@pytest.mark.parametrize("changes", [{}, {"architecture": "opt"}, {"attention": "sdpa"}, {"hidden_dropout": 0.0}])
def test_full_recomputation_runs_what_checkpointed_blocks_run(changes) -> None:
    ours = kernels(recomputed(model(**changes), "full"))
    torchs = kernels(model(gradient_checkpointing=True, **changes))
    assert ours == torchs


def test_every_op_reads_what_was_made_before() -> None:
    for how in ("full", "selective"):
        graph = recomputed(model(), how)
        kinds = {s.id: s for s in graph.storages}
        known = {s.id for s in graph.storages if s.kind in ("parameter", "buffer", "input", "optimizer_state")}
        for number, op in enumerate(graph.ops):
            assert op.id == number
            for spec in op.inputs:
                if op.phase != "optimizer":
                    assert spec.storage in known, (how, op.name, op.module)
                    assert kinds[spec.storage].dies >= number or kinds[spec.storage].kind != "activation"
            known |= {spec.storage for spec in op.outputs}


def kept_bytes(graph: Graph) -> int:
    """Activations that are alive when backward begins."""
    begin = next(op.id for op in graph.ops if op.phase == "backward")
    return sum(s.bytes for s in graph.storages if s.kind == "activation" and s.born < begin <= s.dies)


def test_a_checkpointed_block_keeps_its_input_alone() -> None:
    # One hidden state of 2 bytes an element for each block more; everything else stands outside the blocks.
    deeper = recomputed(model(layers=LAYERS + 2), "full")
    assert kept_bytes(deeper) - kept_bytes(recomputed(model(), "full")) == 2 * BATCH * TOKENS * WIDTH * 2


def test_selective_recomputation_keeps_no_scores() -> None:
    # arXiv:2205.05198, section 4.1: 5 a s^2 b bytes a layer are the scores' (softmax output 2, dropout mask 1 and output 2).
    saved = kept_bytes(model()) - kept_bytes(recomputed(model(), "selective"))
    scores = 5 * HEADS * TOKENS**2 * BATCH * LAYERS
    # Copies of query, key and value for the batched products go, their source stays; the mask stays, for all layers.
    assert saved == scores - BATCH * TOKENS**2 * 2 + SCALARS


def test_selective_recomputation_runs_no_linear_again() -> None:
    again = [op.name for op in recomputed(model(), "selective").ops if op.recompute]
    assert "aten._softmax" in again
    assert again.count("aten.bmm") == LAYERS  # scores; their product with the values is an input of what follows
    assert "aten.addmm" not in again


def test_recomputation_lowers_the_peak() -> None:
    def peak(graph: Graph) -> int:
        return dense_memory(facts_of(graph), frozenset()).activations_bytes

    found = [peak(graph) for graph in (model(), recomputed(model(), "selective"), recomputed(model(), "full"))]
    assert found == sorted(found, reverse=True)
    assert found[2] == pytest.approx(
        peak(model(gradient_checkpointing=True)), rel=0.03
    )  # torch holds the mask a little longer


def test_gradients_complete_after_the_same_ops() -> None:
    before, after = model(), recomputed(model(), "full")
    for old, new in zip(before.parameters, after.parameters, strict=True):
        a, b = before.ops[old.grad_op], after.ops[new.grad_op]
        assert (a.name, a.module) == (b.name, b.module)


def test_what_cannot_be_recomputed_is_refused_with_the_reason() -> None:
    with pytest.raises(InfeasiblePlanError, match="recomputes whole blocks by itself"):
        recomputed(model(gradient_checkpointing=True), "selective")
    assert recomputed(model(gradient_checkpointing=True), "full") is model(gradient_checkpointing=True)
    assert recomputed(model(), None) is model()
