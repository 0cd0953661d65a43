"""Rounds of slowdown: compiled and plain agree, edges are put in order, and what goes to and fro settles."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.api import predict_run
from perfmodel.pipeline import contention, overlap
from perfmodel.pipeline.contention import overlap_model
from perfmodel.pipeline.overlap import rounds, simulate_with_overlap
from perfmodel.pipeline.overlap_rounds import MOST_MOVES, links_of, settle, sort_edges
from perfmodel.pipeline.programs import compile_classes
from perfmodel.sim.loops import has_numba
from perfmodel.sim.steady import seam_of, simulate_steady_compiled

MODEL = {
    "kind": "transformer", "architecture": "gpt2", "name": "gpt", "hidden_size": 1024, "layers": 3, "heads": 8,
    "max_positions": 512, "vocab_size": 1024, "batch_size": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def run():
    return predict_run(MODEL, "dgx", "ddp,bucket_cap=5MiB", bounds=False)


@pytest.fixture(scope="module")
def slowed(run):
    """(programs, their seam, shares) of a model whose gradients travel beside its backward pass."""
    compiled, carry = compile_classes(run.classes)
    model = overlap_model(run.classes, compiled, run.collectives, run.topology)
    assert model is not None
    return compiled, seam_of(compiled, carry), model


@pytest.mark.skipif(not has_numba(), reason="needs numba")
def test_compiled_rounds_are_the_plain_ones(slowed) -> None:
    compiled, seam, model = slowed
    plain = simulate_steady_compiled(compiled, seam=seam)
    steady, settled = rounds(compiled, seam, model, plain)
    durations = compiled.duration_ps[None, :].copy()
    growth, span, is_settled, *before = settle(links_of(compiled, seam, model), durations)[0].tolist()
    assert steady.iteration_ps > plain.iteration_ps
    assert (growth, span) == (steady.iteration_ps.numerator * span // steady.iteration_ps.denominator, span)
    assert before[0] == plain.iteration_ps * before[1]
    assert is_settled == settled
    assert durations[0].tolist() == steady.timeline.duration_ps.tolist()


def test_whole_steps_that_go_to_and_fro_are_halved(slowed, monkeypatch) -> None:
    """Tasks that take as long as alone or twice that, whichever they did not take before, end between the two."""
    compiled, seam, model = slowed

    def other(timeline, _):
        took = timeline.duration_ps / np.maximum(compiled.duration_ps, 1)
        return np.where(took > 1.25, 0.0, 0.5)  # from 1 to 2 times as long and back

    monkeypatch.setattr(overlap, "lost_frac", other)
    plain = simulate_steady_compiled(compiled, seam=seam)
    steady, _ = rounds(compiled, seam, model, plain)
    assert plain.iteration_ps < steady.iteration_ps < 2 * plain.iteration_ps


def test_a_note_says_that_it_did_not_settle(run, monkeypatch) -> None:
    monkeypatch.setattr(
        "perfmodel.pipeline.run.simulate_with_overlap",
        lambda *given: replace(simulate_with_overlap(*given), settled=False),
    )
    notes = predict_run(MODEL, "dgx", "ddp,bucket_cap=5MiB", bounds=False).prediction.notes
    assert any(f"not settled after {contention.MAX_ROUNDS} rounds" in note for note in notes)
    assert not any("not settled" in note for note in run.prediction.notes)


@pytest.mark.parametrize("n_far", [0, 3, 40])
def test_edges_are_sorted_and_summed_up(n_far) -> None:
    """Levels and areas against a sum over every instant; `n_far` edges stand far from their place."""
    chosen = np.random.default_rng(n_far)
    at = np.sort(chosen.integers(0, 500, 40))
    at = np.concatenate([at[len(at) - n_far :], at[: len(at) - n_far]])
    change = chosen.integers(-5, 6, 40)
    edges = np.zeros((50, 4), dtype=np.int64)
    edges[:40, 0], edges[:40, 1] = at, change
    sort_edges(edges, 40)
    assert edges[:40, 0].tolist() == sorted(at.tolist())
    for time, _, level, area in edges[:40].tolist():
        assert area == sum(int(change[at <= instant].sum()) for instant in range(time))
        if (edges[:40, 0] == time).sum() == 1:
            assert level == int(change[at <= time].sum())


def test_edges_in_reverse_are_sorted_too() -> None:
    n = 4 * MOST_MOVES
    edges = np.zeros((n, 4), dtype=np.int64)
    edges[:, 0], edges[:, 1] = np.arange(n)[::-1], 1
    sort_edges(edges, n)
    assert edges[:, 0].tolist() == list(range(n))
    assert edges[:, 2].tolist() == list(range(1, n + 1))
