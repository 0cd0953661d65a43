"""Measuring sessions: what a killed run leaves, how rounds become a row, cases and ops as text, the device clock's sums."""

from pathlib import Path
from typing import Any

import pytest

from calibrate.build import Prepared, prepare, recorded_op, zipf_indices
from calibrate.cases import PLANS, Case, TensorArg, draw_cases
from calibrate.measure_cpu import Timing
from calibrate.measure_cuda import LAUNCHES, time_prepared
from calibrate.session import (
    MAX_SPREAD,
    OpLog,
    Round,
    RoundLog,
    combine,
    op_from_json,
    op_to_json,
    write_table,
)

CASE = Case(family="gemm", op="aten.mm", args=(TensorArg(shape=(4, 8)), TensorArg(shape=(8, 2), order=(1, 0))))


def timing(quartile_s: float) -> Timing:
    return Timing(least_s=quartile_s * 0.9, quartile_s=quartile_s, median_s=quartile_s * 1.1, n_calls=10)


def rounds(*quartiles: float) -> list[Round]:
    return [Round(key=CASE.key, number=i, timing=timing(q)) for i, q in enumerate(quartiles)]


def test_an_unfinished_line_is_dropped_and_the_rest_is_kept(tmp_path: Path) -> None:
    log = RoundLog(tmp_path, "gemm")
    with log.appending() as append:
        for item in rounds(1e-5, 2e-5):
            append.write(item)
    with log.path.open("a", encoding="utf-8") as file:
        file.write(f"{CASE.key},2,1e-0")  # the process was killed here
    again = RoundLog(tmp_path, "gemm")
    assert [item.number for item in again.read()] == [0, 1]
    with again.appending() as append:
        append.write(Round(key=CASE.key, number=2, timing=None, failed="refused, with a comma"))
    assert RoundLog(tmp_path, "gemm").read()[-1].failed == "refused, with a comma"


def test_the_best_round_counts_if_another_agrees() -> None:
    assert combine(CASE, None, rounds(3e-5, 1e-5, 1.1e-5)).time_s == 1e-5
    assert combine(CASE, None, rounds(3e-5, 1e-5, 1.1e-5)).next_s == 1.1e-5
    assert combine(CASE, None, rounds(1e-5)).next_s is None
    disturbed = combine(CASE, None, rounds(3e-5, 1e-5, 1e-5 * (MAX_SPREAD + 0.1)))
    assert disturbed.time_s is None
    assert "disturbed" in disturbed.failed


def test_a_case_that_failed_is_a_row_with_its_reason(tmp_path: Path) -> None:
    failed = combine(CASE, None, [Round(key=CASE.key, number=0, timing=None, failed="no such kernel")])
    path, n_rows = write_table(tmp_path, "gemm", [failed], 2)
    assert n_rows == 1
    assert "no such kernel" in path.read_text(encoding="utf-8")


def test_a_table_keeps_rows_of_an_earlier_plan(tmp_path: Path) -> None:
    other = Case(family="gemm", op="aten.mm", args=(TensorArg(shape=(2, 2)), TensorArg(shape=(2, 2))))
    write_table(tmp_path, "gemm", [combine(other, None, rounds(1e-5, 1e-5))], 2)
    _, n_rows = write_table(tmp_path, "gemm", [combine(CASE, None, rounds(1e-5, 1e-5))], 2)
    assert n_rows == 2
    assert not list(tmp_path.glob("*.tmp"))


def test_ops_survive_their_text_and_have_the_layout_of_the_tensors(tmp_path: Path) -> None:
    op = recorded_op(CASE, prepare(CASE, "cpu", 0), "cpu")
    assert op.inputs[1].strides == (1, 8)
    again = op_from_json(op_to_json(op))
    assert [s.shape for s in again.inputs] == [(4, 8), (8, 2)]
    assert again.outputs[0].shape == (4, 2)
    log = OpLog(tmp_path, "gemm")
    log.add(CASE.key, op)
    assert OpLog(tmp_path, "gemm").known[CASE.key].input_names == op.input_names


@pytest.mark.parametrize("family", sorted(PLANS))
def test_every_generator_makes_a_call_that_torch_runs(family: str) -> None:
    seen: set[str] = set()
    for case in draw_cases(family, share=0.01):
        if case.bytes > 4e6 or case.op in seen:
            continue
        seen.add(case.op)
        assert recorded_op(case, prepare(case, "cpu", 0), "cpu").name == case.op


def test_plans_are_the_same_at_every_draw() -> None:
    assert [case.key for case in draw_cases("norm")] == [case.key for case in draw_cases("norm")]
    assert {c.key for c in draw_cases("norm", stage=1)} != {c.key for c in draw_cases("norm")}


def test_skewed_indices_follow_their_law() -> None:
    drawn = zipf_indices(20000, 1000, 1.05)
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < 1000
    hottest = drawn.bincount(minlength=1000).max().item() / 20000
    # Rank 1 has 1 / sum over ranks of r^-1.05, about 0.15; the continuous draw gives it a little less or more.
    assert hottest == pytest.approx(1 / sum(r**-1.05 for r in range(1, 1001)), rel=0.35)


class FakeClock:
    """A device on which every call takes 3 us in a graph and 10 us eagerly."""

    def __init__(self, *, capturable: bool) -> None:
        self.capturable = capturable
        self.calls = 0
        self.replays = 0

    def elapsed_s(self, work: Any) -> float:
        calls, replays = self.calls, self.replays
        work()
        return (self.calls - calls) * 10e-6 + (self.replays - replays) * LAUNCHES * 3e-6

    def issue_s(self, work: Any) -> float:
        work()
        return 0.0

    def captured(self, work: Any) -> Any:
        def replay() -> None:
            self.replays += 1

        return replay if self.capturable else None

    def call(self, *_: Any) -> None:
        self.calls += 1


@pytest.mark.parametrize(("capturable", "expected_s"), [(True, 3e-6), (False, 10e-6)])
def test_device_time_is_that_of_the_graph_where_there_is_one(*, capturable: bool, expected_s: float) -> None:
    clock = FakeClock(capturable=capturable)
    prepared = Prepared(call=clock.call, arguments=((), ()), kwargs={}, moved_bytes=0)
    assert time_prepared(prepared, 1e-3, clock).median_s == pytest.approx(expected_s)
