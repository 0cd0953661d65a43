"""The choice of a kernel as features: shares against scikit-learn's own, and a choice that a made-up library makes."""

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingClassifier

from calibrate import fit_choice
from perfmodel.db import load_device
from perfmodel.kernels.correction import Floats
from perfmodel.kernels.gemm_choice import TILES, kernel_shares, n_kernels, tile_features, with_choice


@pytest.fixture(scope="module")
def sizes() -> tuple[Floats, Floats, Floats, Floats]:
    draw = np.random.default_rng(3)
    m, n, k = (np.round(2 ** draw.uniform(4, 12, 900)) for _ in range(3))
    return m, n, k, np.ones(900)


def test_shares_are_the_classifiers_probabilities(sizes: tuple[Floats, Floats, Floats, Floats]) -> None:
    features = tile_features(sizes, load_device("p4"))
    kernels = (np.log2(sizes[0]) // 3).astype(int) - 1  # three of them, by rows
    kernels = np.unique(kernels, return_inverse=True)[1]
    count = int(kernels.max()) + 1
    model = HistGradientBoostingClassifier(
        max_iter=fit_choice.ROUNDS,
        learning_rate=0.15,
        min_samples_leaf=5,
        random_state=fit_choice.SEED,
        early_stopping=False,
    ).fit(features, kernels)
    arrays = fit_choice.fit_choice(features, kernels, count)
    assert n_kernels(arrays) == count
    assert kernel_shares(arrays, features) == pytest.approx(model.predict_proba(features), abs=1e-3)


def test_a_choice_by_waves_is_learned_for_rows_not_seen(sizes: tuple[Floats, Floats, Floats, Floats]) -> None:
    # A library that takes the tile of three with the least padded work over the SMs of the card.
    device = load_device("p4")
    m, n, _, _ = sizes
    work = [
        np.ceil(np.ceil(m / a) * np.ceil(n / b) / device.n_sms) * a * b for a, b in ((128, 128), (64, 64), (32, 128))
    ]
    kernels = np.argmin(work, axis=0)
    shares = fit_choice.unseen_shares(tile_features(sizes, device), kernels, 3)
    assert (shares.argmax(axis=1) == kernels).mean() > 0.9


def test_tile_features_of_one_product_by_hand() -> None:
    device = load_device("p4")  # 20 SMs
    one = tuple(np.array([float(value)]) for value in (200, 100, 64, 3))
    row = tile_features(one, device)[0]  # type: ignore[arg-type]  # four sizes
    # Tile 128 x 128: 2 x 1 x 3 = 6 blocks, 6 of 20 SMs in the only wave, 200 x 100 x 3 of 6 x 128 x 128 elements.
    assert row[:5] == pytest.approx([6, 6 / 20, 60000 / 98304, np.log(1), np.log(1)])
    # Tile 32 x 32 is the seventh: 7 x 4 x 3 = 84 blocks, five waves of one block an SM, three of two.
    seventh = row[5 * TILES.index((32, 32)) :][:5]
    assert seventh == pytest.approx([84, 84 / 20 / 5, 60000 / (84 * 1024), np.log(5), np.log(3)])


def test_without_a_choice_the_features_stay(sizes: tuple[Floats, Floats, Floats, Floats]) -> None:
    features = np.ones((900, 4))
    assert with_choice({}, features, sizes, load_device("p4")) is features


def test_rare_kernels_are_one() -> None:
    numbers, count = fit_choice.grouped(["a"] * 600 + ["b"] * 390 + ["c", "d"] * 5)
    assert count == 3
    assert len(set(numbers[-10:].tolist())) == 1
