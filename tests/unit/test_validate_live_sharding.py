"""Random DLRMs for live ranking and their score; expected values by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perfmodel.errors import ConfigError
from perfmodel.report.live_ranking import render_ranking
from perfmodel.validate.live_sharding import (
    N_PLANS,
    Subject,
    add_score,
    random_subjects,
    read_scores,
    score_subject,
)  # fmt: skip

SUBJECT = Subject(name="s", model={}, n_ranks=2, plans=((0, 1), (0, 0), (0, 1)))


def test_there_are_ten_models_on_two_and_four_ranks_skewed_and_uniform():
    subjects = random_subjects()
    assert len(subjects) == 10
    kinds = {(s.n_ranks, str(s.model["tables"][0]["distribution"])) for s in subjects}
    assert kinds == {(n, d) for n in (2, 4) for d in ("uniform", "{'zipf': 1.05}")}


def test_plans_are_eight_different_ones_over_the_ranks():
    for subject in random_subjects():
        assert len(set(subject.plans)) == N_PLANS
        for owners in subject.plans:
            assert len(owners) == len(subject.model["tables"])
            assert max(owners) < subject.n_ranks
            # Numbered by first appearance: exchanging two ranks' names gives the same plan.
            assert list(dict.fromkeys(owners)) == sorted(set(owners))


def test_one_seed_gives_the_same_models():
    assert random_subjects(5) == random_subjects(5)
    assert random_subjects(5) != random_subjects(6)


def test_the_score_is_of_the_plan_ranked_first():
    # Medians 10, 11, 20; the prediction takes the second: 10 % lost; blocks spread by 5 % (quartiles of 9.5, 10, 10.5: 2.5 %).
    blocks = [[9.5, 10.0, 10.5], [11.0, 11.0, 11.0], [20.0, 20.0, 20.0]]
    score = score_subject(SUBJECT, [2.0, 1.0, 3.0], blocks)
    assert score.regret_frac == pytest.approx(0.1)
    assert not score.is_best
    # Of three pairs two are in order: tau = (2 - 1) / 3.
    assert score.tau == pytest.approx(1 / 3)


def test_a_loss_within_noise_holds():
    # The blocks of every plan spread by a tenth to each side of the median at their quartiles (8, 9, 10, 11, 12).
    blocks = [[b * f for b in (8.0, 9.0, 10.0, 11.0, 12.0)] for f in (1.0, 1.05, 3.0)]
    score = score_subject(SUBJECT, [2.0, 1.0, 3.0], blocks)
    assert score.noise_frac == pytest.approx(0.1)
    assert score.is_best


def test_tables_and_json_say_the_same():
    blocks = [[10.0], [20.0], [30.0]]
    scores = [score_subject(SUBJECT, [1.0, 2.0, 3.0], blocks), score_subject(SUBJECT, [2.0, 1.0, 3.0], blocks)]
    found = json.loads(render_ranking(scores, as_json=True))
    assert (found["top1_frac"], found["mean_regret_frac"]) == (0.5, 0.5)
    assert found["mean_tau"] == pytest.approx((1 + 1 / 3) / 2)
    for text in (render_ranking(scores), render_ranking(scores, markdown=True)):
        assert "2 models: the plan ranked first is the fastest or within noise of it in 50.0%" in text


def test_finished_models_are_read_back(tmp_path: Path):
    state = str(tmp_path / "scores.jsonl")
    assert read_scores(state) == {}
    score = score_subject(SUBJECT, [1.0, 2.0, 3.0], [[10.0], [20.0], [30.0]])
    add_score(state, score)
    assert read_scores(state) == {"s": score}


def test_a_broken_line_is_named(tmp_path: Path):
    state = tmp_path / "scores.jsonl"
    state.write_text("{}\n")
    with pytest.raises(ConfigError, match="line 1: found no score"):
        read_scores(str(state))
