"""What the rows of `megatron_a100_single_node.csv` are: sums that the source's simulator made, not clocked iterations.

Its code (VIA-Research/vTrain @f8dda84, src/predictor.py) lets every micro-batch through stages of equal layers and prices a
transfer between stages as twice the activations over a quarter of 800 Gbit/s (`_compute_p2p_latency`, in units of 2^30).
"""

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from calibrate.score_megatron import is_composed, model_of, plan_of

DATA = Path(__file__).parents[2].parent / "shared" / "data"
GIBI = 2**30
MS = 1e-3
TRANSFER_BYTES_PER_S = 800 * GIBI / 8 / 4 / 2  # of activations
HALF_BYTES = 2


def rows(kind: str) -> list[dict[str, str]]:
    path = DATA / f"megatron_a100_{kind}_node.csv"
    if not path.exists():
        pytest.skip(f"needs {path}")
    with path.open() as file:
        return list(csv.DictReader(file))


def sums() -> dict[tuple[int, ...], tuple[np.ndarray, float]]:
    """By width, tensor ranks, micro-batch, stages, without replicas: the four terms of time, and what is left over (ms)."""
    found = defaultdict(list)
    for row in rows("single"):
        if row["dp"] == "1":
            micro = int(row["micro_batch"])
            key = (int(row["hidden_size"]), int(row["tp"]), micro, int(row["pp"]))
            n, layers = int(row["global_batch"]) // micro, int(row["num_layers"])
            found[key].append(((n * layers, layers, n, 1), float(row["measured_ms_per_iter"])))
    solved = {}
    for key, lines in found.items():
        terms, times = (np.array(part, dtype=float) for part in zip(*lines, strict=True))
        if len(lines) > terms.shape[1] and np.linalg.matrix_rank(terms) == terms.shape[1]:
            terms_ms = np.linalg.lstsq(terms, times, rcond=None)[0]
            solved[key] = terms_ms, float(np.abs(terms @ terms_ms - times).max())
    return solved


def test_times_are_sums_to_the_last_digit() -> None:
    solved = sums()
    assert len(solved) > 20
    assert max(residual for _, residual in solved.values()) < 1e-9  # digits are 1e-6 ms


def test_a_layer_takes_the_same_on_one_stage_and_on_more() -> None:
    solved = sums()
    pairs = [(key, (*key[:3], 1)) for key in solved if key[3] > 1 and (*key[:3], 1) in solved]
    assert len(pairs) > 5
    for several, one in pairs:
        assert solved[several][0][0] * several[3] == pytest.approx(solved[one][0][0], rel=1e-9)


def test_transfers_have_the_simulators_rate() -> None:
    solved = sums()
    pairs = [(key, (*key[:3], 4)) for key in solved if key[3] == 2 and (*key[:3], 4) in solved]
    assert len(pairs) >= 8
    for two, four in pairs:
        sent = two[2] * 1024 * two[0] * HALF_BYTES
        # two cuts more, each crossed forward and backward while the pipeline fills and drains
        assert (solved[four][0][3] - solved[two][0][3]) * MS == pytest.approx(4 * sent / TRANSFER_BYTES_PER_S, rel=1e-6)


def test_rows_of_one_node_alone_are_predicted_as_composed() -> None:
    assert all(is_composed(row) for row in rows("single"))
    assert not any(is_composed(row) for row in rows("multi"))


def test_a_composed_row_has_its_part_of_the_vocabulary() -> None:
    row = next(r for r in rows("single") if r["tp"] == "4")
    assert model_of(row)["vocab_size"] == 12564  # 50257 / 4, rounded down
    assert not plan_of(row, 2).tensor_parallel.vocabulary_parallel
    assert plan_of(rows("multi")[0], 2).pipeline.scatter_gather
