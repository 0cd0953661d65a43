"""Changes that make a plan fit: cheapest first, several together where one is not enough, each tried."""

import pytest

import perfmodel
from perfmodel.config import PlanSpec, load_plan
from perfmodel.errors import InfeasiblePlanError
from perfmodel.plan.advice import cheapest_changes, table_changes
from perfmodel.plan.least import Least

SMALL = {
    "kind": "transformer", "name": "small", "architecture": "gpt2", "batch_size": 1, "precision": "bf16",
    "optimizer": "adamw", "vocab_size": 512, "hidden_size": 256, "layers": 4, "heads": 4, "max_positions": 128,
}  # fmt: skip


def changes(plan: str, n_ranks: int, fits) -> tuple[list[str], list[PlanSpec]]:
    tried: list[PlanSpec] = []

    def judge(changed: PlanSpec, on: int) -> bool:
        tried.append(changed)
        return on == n_ranks and fits(changed)

    return list(cheapest_changes(load_plan(plan), n_ranks, judge).changes), tried


def test_the_three_cheapest_alone_come_first() -> None:
    found, tried = changes("ddp", 8, lambda plan: True)
    assert found == ["recompute=selective", "shard=optimizer", "shard=gradients"]
    assert len(tried) == 3


def test_what_needs_two_changes_names_both() -> None:
    def fits(plan: PlanSpec) -> bool:
        return plan.recompute == "full" and plan.data_parallel.shard == "parameters"

    found, _ = changes("ddp", 8, fits)
    assert found[0] == "recompute=full and shard=parameters"


def test_a_change_that_holds_one_that_fits_is_not_named() -> None:
    found, _ = changes("ddp", 8, lambda plan: plan.data_parallel.shard != "nothing" or plan.size("pp") > 1)
    assert found == ["shard=optimizer", "shard=gradients", "shard=parameters"]


@pytest.mark.parametrize("plan", ["pp=2,micro_batches=4", "ddp", "zero1", "fsdp", "pp=2,tp=2,cp=2,micro_batches=4"])
def test_whatever_is_tried_is_a_plan_of_the_machine(plan) -> None:
    """Model copies skip a plan's checks, so they are made here again."""
    tried: list[tuple[PlanSpec, int]] = []
    cheapest_changes(load_plan(plan), 16, lambda spec, n_ranks: bool(tried.append((spec, n_ranks))))
    assert {n_ranks for _, n_ranks in tried} == {16, 32, 64, 128}
    for spec, n_ranks in tried:
        again = PlanSpec.model_validate({name: getattr(spec, name) for name in PlanSpec.model_fields})
        assert n_ranks % (again.size("pp") * again.size("tp") * again.size("cp")) == 0


def test_states_that_cannot_fit_rule_a_change_out_without_a_try() -> None:
    tried: list[PlanSpec] = []

    def fits(plan: PlanSpec, n_ranks: int) -> bool:
        tried.append(plan)
        return True

    least = Least(parameters_bytes=800, optimizer_bytes=1600, gradients_bytes=0)
    found = cheapest_changes(load_plan("ddp"), 8, fits, least, room_bytes=301).changes
    assert found[0] == "shard=parameters"  # 2,400 over 8 ranks; optimizer states alone would leave 1,000
    assert all(p.data_parallel.shard == "parameters" or p.size("tp") * p.size("pp") > 1 for p in tried)


def test_more_ranks_come_last_and_say_so() -> None:
    def fits(plan: PlanSpec, n_ranks: int) -> bool:
        return plan.recompute == "full" or (n_ranks >= 16 and plan.data_parallel.shard == "parameters")

    advice = cheapest_changes(load_plan("ddp"), 8, fits)
    assert advice.changes == ("recompute=full", "shard=parameters on 16 ranks, 2 times the machine")
    assert str(advice).startswith(
        "it would fit with recompute=full, or shard=parameters on 16 ranks, 2 times the machine; "
    )
    assert "no other does" in str(advice)
    nothing = cheapest_changes(load_plan("ddp"), 8, lambda plan, n_ranks: False)
    assert nothing.changes == ()
    assert str(nothing).startswith(f"none of {nothing.n_combinations} combinations of micro-batches")


def test_tables_are_spread_otherwise_or_over_more_ranks() -> None:
    def fits(plan: PlanSpec, n_ranks: int) -> bool:
        return plan.embeddings.strategy == "row_wise" or n_ranks == 32

    assert table_changes(load_plan("ddp"), 8, fits).changes == (
        "embeddings=row_wise", "embeddings=table_wise on 32 ranks, 4 times the machine",
        "embeddings=column_wise on 32 ranks, 4 times the machine",
    )  # fmt: skip


def test_a_search_in_which_nothing_fits_says_what_the_nearest_plan_would_take() -> None:
    big = {**SMALL, "hidden_size": 6144, "layers": 2, "heads": 48, "name": "big", "precision": "fp32"}
    with pytest.raises(
        InfeasiblePlanError, match=r"no plan works; 1 x does not fit the memory; the nearest is ddp.*short by"
    ):
        perfmodel.search(big, "2xt4", {"shard": ["nothing"]}, global_batch=2)
    with pytest.raises(InfeasiblePlanError, match=r"short by .*; it would fit with shard=") as refused:
        perfmodel.predict(big, "2xt4", plan="ddp")
    assert str(refused.value).count(", or ") == 2


def tried_with(plan: str, n_ranks: int, batch: int, fits) -> list[str]:
    return list(cheapest_changes(load_plan(plan), n_ranks, lambda p, n: n == n_ranks and fits(p), batch=batch).changes)


def test_micro_batches_of_fewer_samples_are_tried_first() -> None:
    found = tried_with("ddp", 8, 8, lambda plan: plan.micro_batches >= 4 or plan.recompute is not None)
    assert found[:2] == ["recompute=selective", "micro_batches=4"]
    # Eight would fit too, and four with anything else: neither is another way.
    assert not any("micro_batches" in change for change in found[2:])


def test_they_are_combined_where_they_are_not_enough() -> None:
    found = tried_with("ddp", 8, 4, lambda plan: plan.micro_batches == 4 and plan.data_parallel.shard != "nothing")
    assert found[0] == "micro_batches=4 and shard=optimizer"


def test_accumulated_batches_are_divided_too_and_odd_ones_are_not() -> None:
    assert tried_with("ddp,accumulate=3", 8, 4, lambda plan: plan.accumulate == 6) == ["accumulate=6 of 2 samples each"]
    seen: list[int] = []
    tried_with("ddp", 2, 6, lambda plan: bool(seen.append(plan.micro_batches)))
    assert set(seen) == {1, 2}  # six samples divide by two once


def test_what_it_names_fits_when_predicted() -> None:
    """Each change is taken at its word: the plan with it is predicted, and is not refused."""
    wide = {**SMALL, "batch_size": 64, "hidden_size": 1024, "layers": 8, "max_positions": 1024, "name": "wide"}
    with pytest.raises(InfeasiblePlanError, match=r"it would fit with micro_batches=") as refused:
        perfmodel.predict(wide, "2xt4", plan="ddp")
    changes = str(refused.value).partition("it would fit with ")[2].split(", or ")
    assert len(changes) == 3
    for change in changes:
        assert perfmodel.predict(wide, "2xt4", plan=change.replace(" and ", ",")).iteration_time_s > 0
