"""Search against brute force: the same ranking, whatever was never simulated; spaces, objectives and reasons."""

import json
from functools import lru_cache

import pytest

import perfmodel
from perfmodel.api import Predictor
from perfmodel.autotune.budget import Budget, as_budget
from perfmodel.autotune.front import PredictorJudge, load_space
from perfmodel.autotune.judge import OBJECTIVES, as_objective
from perfmodel.autotune.search import find_best, why_behind
from perfmodel.autotune.space import Candidate, Refused, Space, candidates, default_space
from perfmodel.errors import ConfigError, InfeasiblePlanError
from perfmodel.pipeline.prediction import Prediction
from perfmodel.pipeline.run import Evaluation

SMALL = {
    "kind": "transformer", "name": "small", "architecture": "gpt2", "batch_size": 1, "precision": "bf16", "optimizer": "adamw",
    "vocab_size": 512, "hidden_size": 256, "layers": 4, "heads": 4, "max_positions": 128,
}  # fmt: skip
SPACE = Space(
    keys={"tp": (1, 2), "pp": (1, 2), "shard": ("nothing", "optimizer"), "micro_batch": (1, 2)}, global_batch=16
)


@lru_cache
def judge(machine="dgx_h100"):
    return PredictorJudge(Predictor(SMALL, machine))


def plans():
    return [row for row in candidates(SPACE, 8) if isinstance(row, Candidate)]


@pytest.mark.parametrize("objective", list(OBJECTIVES))
@pytest.mark.parametrize("machine", ["dgx_h100", "dgx_a100"])
def test_search_ranks_as_brute_force_does(objective, machine) -> None:
    aim = OBJECTIVES[objective]
    every = sorted((aim.value(judge(machine).predict(c)), c.label) for c in plans())
    found = find_best(plans(), judge(machine), aim, top=4)
    assert [(row.value, row.candidate.label) for row in found.ranked] == every[:4]
    assert found.is_proven
    assert found.n_plans == len(every)


def test_the_ten_best_under_slowdown_are_those_of_brute_force() -> None:
    """Kernels that outlast their launches, so that collectives beside them cost time: hardly an evaluation is exact."""
    wide = PredictorJudge(
        Predictor(SMALL | {"hidden_size": 2048, "heads": 16, "max_positions": 1024, "layers": 2}, "dgx_a100")
    )
    keys = {"tp": (1, 2, 4), "pp": (1, 2), "shard": ("nothing", "optimizer", "parameters"), "micro_batch": (1, 2)}
    rows = [row for row in candidates(Space(keys=keys, global_batch=32), 8) if isinstance(row, Candidate)]
    every = sorted((OBJECTIVES["throughput"].value(wide.predict(c)), c.label) for c in rows)
    found = find_best(rows, wide, OBJECTIVES["throughput"], top=10)
    assert [(row.value, row.candidate.label) for row in found.ranked] == every[:10]
    assert found.is_proven
    assert found.n_simulated < len(rows) / 2
    assert sum(wide.evaluate(row.candidate).is_exact for row in found.ranked) <= 2, "plain DDP has no segments"


def test_what_is_ruled_out_is_not_simulated() -> None:
    found = find_best(plans(), judge(), OBJECTIVES["throughput"], top=2)
    assert found.n_simulated < found.n_plans


class Table:
    """A judge with given evaluations and values; `asked` says in which order it was asked for predictions."""

    def __init__(self, rows, prediction) -> None:
        self.rows, self.prediction, self.asked = rows, prediction, []

    def evaluate(self, candidate) -> Evaluation:
        time_s, _ = self.rows[candidate.micro_batch - 1]
        return Evaluation(
            iteration_time_s=time_s,
            compute_s=time_s,
            host_bound_s=0.0,
            wait_s=0.0,
            memory_bytes=1,
            samples=1,
            is_exact=False,
        )

    def predict(self, candidate) -> Prediction:
        from dataclasses import replace

        self.asked.append(candidate.micro_batch)
        return replace(self.prediction, iteration_time_s=self.rows[candidate.micro_batch - 1][1])


def test_a_low_floor_does_not_win_and_a_high_one_does_not_hide_the_winner() -> None:
    rows = [(1.0, 9.0), (2.0, 5.0), (3.0, 3.5), (3.6, 3.7), (8.0, 8.0)]
    table = Table(rows, judge().predict(plans()[0]))
    given = [Candidate(plan="ddp", micro_batch=n + 1) for n in range(len(rows))]
    found = find_best(given, table, OBJECTIVES["time"], top=1)
    assert (found.best.value, table.asked) == (3.5, [1, 2, 3])
    assert find_best(given, table, OBJECTIVES["time"], top=1, budget=Budget(plans=2)).is_proven is False


def test_a_budget_of_time_leaves_what_it_has_no_time_for_and_says_so() -> None:
    """One second a look: three floors fit into a little over half of four seconds, and simulations go on to the end."""
    rows = [(5.0, 9.0), (2.0, 5.0), (3.0, 3.5), (1.0, 1.0)]
    table = Table(rows, judge().predict(plans()[0]))
    given = [Candidate(plan="ddp", micro_batch=n + 1) for n in range(len(rows))]
    ticks = iter(range(100))
    found = find_best(given, table, OBJECTIVES["time"], top=1, budget=Budget(time_s=4.0, clock=lambda: next(ticks)))
    assert (found.n_plans, found.n_unseen, found.is_proven) == (3, 1, False)
    assert table.asked[0] == 2, "the lowest floor of those looked at first"
    assert "1 more combinations were not looked at" in " ".join(found.summary())


def test_budgets_are_counts_or_times() -> None:
    assert as_budget(64).plans == as_budget("64").plans == 64
    assert as_budget("2 min").time_s == 120
    assert as_budget(None).plans is None
    assert as_budget(None).time_s is None
    for wrong in (0, "-3", "soon", "0 s"):
        with pytest.raises(ConfigError, match="budget: found"):
            as_budget(wrong)


def test_a_function_of_a_prediction_is_an_objective_without_floors() -> None:
    def most_waiting(prediction):
        return -prediction.breakdown.wait_s

    found = find_best(plans(), judge(), as_objective(most_waiting), top=1)
    every = [judge().predict(c).breakdown.wait_s for c in plans()]
    assert found.best.prediction.breakdown.wait_s == max(every)
    assert found.n_simulated == len(every)


def test_every_candidate_has_the_global_batch_and_is_there_once() -> None:
    rows = plans()
    assert len(set(rows)) == len(rows)
    samples = {judge().evaluate(c).samples for c in rows}
    assert samples == {16}


def test_keys_without_effect_make_no_second_plan() -> None:
    space = Space(keys={"tp": (1,), "sequence": (True, False), "schedule": ("1f1b", "gpipe")}, global_batch=8)
    assert [row.plan for row in candidates(space, 8)] == ["ddp"]


def test_what_is_no_plan_is_refused_with_its_reason() -> None:
    space = Space(keys={"tp": (3, 8), "micro_batch": (1, 3)}, global_batch=8)
    found = list(candidates(space, 8))
    reasons = [row.reason for row in found if isinstance(row, Refused)]
    assert len(reasons) == 3
    assert any("3" in reason and "divisor" in reason for reason in reasons)
    assert any("do not divide the global batch 8" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("keys", "batch", "words"),
    [
        ({"tq": (1,)}, 8, ("tq", "tp")),
        ({"tp": ()}, 8, ("tp", "no values")),
        ({"micro_batch": (0,)}, 8, ("micro_batch", "0")),
        ({"accumulate": (2,)}, 8, ("accumulate", "follows")),
        ({"tp": (1,)}, 0, ("global_batch", "0")),
    ],
)
def test_a_space_that_makes_no_sense_is_refused(keys, batch, words) -> None:
    with pytest.raises(ConfigError) as caught:
        list(candidates(Space(keys=keys, global_batch=batch), 8))
    for word in words:
        assert word in str(caught.value)


def test_a_space_is_read_from_a_file(tmp_path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text("global_batch: 32\ntp: [1, 2]\nrecompute: [null, full]\n")
    space = load_space(path)
    assert (space.global_batch, dict(space.keys)) == (32, {"tp": (1, 2), "recompute": (None, "full")})
    path.write_text("global_batch: 32\ntp: 2\n")
    with pytest.raises(ConfigError, match="tp: found 2, allowed a list"):
        load_space(path)


def test_the_default_space_keeps_tensor_parallel_groups_inside_a_host() -> None:
    assert default_space(128, 8, 512).keys["tp"] == (1, 2, 4, 8)


def test_nothing_that_works_is_an_error_with_reasons() -> None:
    with pytest.raises(InfeasiblePlanError, match="no plan works; 1 x"):
        find_best(candidates(Space(keys={"tp": (3,)}, global_batch=8), 8), judge(), OBJECTIVES["time"])


def test_reasons_add_up() -> None:
    """With so many parts named, the signed times are the whole difference (times of one global batch)."""
    first, other = judge().predict(Candidate(plan="ddp,accumulate=2", micro_batch=1)), judge().predict(plans()[-1])
    parts = ("compute_s", "exposed_communication_s", "exposed_copy_s", "wait_s", "host_bound_s", "idle_s")
    differences = [getattr(other.breakdown, p) - getattr(first.breakdown, p) for p in parts]
    assert sum(differences) == pytest.approx(other.iteration_time_s - first.iteration_time_s, rel=1e-9)
    largest = max(zip(differences, parts, strict=True))[1]
    words = {"compute_s": "compute", "wait_s": "waiting", "host_bound_s": "host", "exposed_communication_s": "exposed"}
    assert words[largest] in why_behind(first, other).split(",")[0]


def test_the_front_door_is_deterministic_and_goes_to_json() -> None:
    texts = [
        perfmodel.search(SMALL, "dgx_h100", {"tp": [1, 2], "micro_batch": [1]}, global_batch=8, top=2).to_json()
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    body = json.loads(texts[0])
    read = Prediction.from_json(json.dumps(body["ranked"][0]["prediction"]))
    assert read.samples_per_s == pytest.approx(1 / body["ranked"][0]["value"])


def test_fsdp_and_compression_make_plans_only_where_they_matter() -> None:
    keys = {
        "shard": ("nothing", "optimizer", "parameters"), "reshard_after_forward": (True, False),
        "compression": ("none", "bf16"), "offload": (False, True),
    }  # fmt: skip
    found = list(candidates(Space(keys=keys, global_batch=8), 8))
    assert not [row for row in found if isinstance(row, Refused)]
    shards = [row.spec().data_parallel for row in found]
    counts = {s: sum(ddp.shard == s for ddp in shards) for s in keys["shard"]}
    assert counts == {"nothing": 2, "optimizer": 2, "parameters": 4}


def test_experts_and_rings_are_axes_and_keep_the_global_batch() -> None:
    """Ranks along `ep` have samples of their own, those along `cp` share theirs."""
    space = Space(keys={"ep": (1, 2, 4), "cp": (1, 2), "imbalance": (1.0, 1.25)}, global_batch=16)
    for row in candidates(space, 8):
        spec = row.spec()
        replicas = 8 // spec.size("cp")
        assert spec.accumulate * replicas * row.micro_batch == 16
        assert spec.size("ep") > 1 or spec.expert_parallel.imbalance == 1.0


def test_the_default_space_shares_out_experts_where_a_model_has_them() -> None:
    assert default_space(16, 8, 64, experts=4).keys["ep"] == (1, 2, 4)
    assert "ep" not in default_space(16, 8, 64).keys
