"""Choosing more cases: they come from where held-out cases err most, and do not crowd."""

from pathlib import Path

import numpy as np
import pytest

from calibrate import adaptive
from calibrate.adaptive import choose, chosen, distance, expected_error, extend, spread
from calibrate.cases import PLANS, Case, TensorArg, draw_cases
from calibrate.cases.case import case_from_json


def product(m: int, k: int, n: int, state: str = "warm") -> Case:
    args = (TensorArg(shape=(m, k)), TensorArg(shape=(k, n)))
    return Case(family="gemm", op="aten.mm", args=args, state=state)  # type: ignore[arg-type]  # the two states


def test_distance_is_in_octaves_of_sizes() -> None:
    assert distance(product(8, 8, 8), product(8, 8, 8)) == 0.0
    # m differs by two octaves: of the first tensor alone, and there are two tensors.
    assert distance(product(8, 8, 8), product(32, 8, 8)) == pytest.approx(1.0)
    assert distance(product(8, 8, 8), product(8, 8, 8, "cold")) == pytest.approx(adaptive.STATE_OCTAVES)


def test_a_candidate_errs_as_its_neighbours_do() -> None:
    small, large = product(8, 8, 8), product(1024, 1024, 1024)
    known = [(small, 0.5)] * 4 + [(large, 0.0)] * 4
    assert expected_error(product(8, 8, 16), known) == pytest.approx(0.5)
    assert expected_error(product(1024, 512, 1024), known) == pytest.approx(0.0)
    assert expected_error(Case(family="gemm", op="aten.bmm"), known) == 0.0


def test_a_second_case_of_the_same_kind_counts_less() -> None:
    cases = [product(8, 8, 8), product(8, 8, 8), product(512, 512, 512)]
    assert spread(cases, np.array([1.0, 0.99, 0.5]), 2) == [0, 2]


def test_more_cases_lie_where_the_law_errs() -> None:
    held = [case for case in draw_cases("softmax") if case.op == "aten._softmax"]
    errors = {case.to_json(): 0.4 if case.args[0].shape[1] < 128 else 0.01 for case in held}
    narrow = [case.args[0].shape[1] < 200 for case in choose("softmax", errors, 10) if case.op == "aten._softmax"]
    assert sum(narrow) / len(narrow) > 0.75


def test_the_choice_is_made_once_and_read_back(tmp_path: Path) -> None:
    errors = {case.to_json(): 0.1 for case in draw_cases("pool")[:20]}
    total = sum(count for _, count in PLANS["pool"].values())
    n_cases = extend(tmp_path, "pool", errors)
    assert n_cases == round(adaptive.EXTRA_SHARE * total)
    first = chosen(tmp_path, "pool")
    assert extend(tmp_path, "pool", {}) == n_cases
    assert chosen(tmp_path, "pool") == first


@pytest.mark.parametrize("family", PLANS)
def test_cases_come_back_from_their_text(family: str) -> None:
    for case in draw_cases(family):
        assert case_from_json(case.to_json()).to_json() == case.to_json()
