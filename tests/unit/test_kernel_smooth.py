"""The smooth correction against scikit-learn's Gaussian process, and the choice between it and trees."""

import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

from calibrate.fit_smooth import JITTER, MIN_ROWS, fit_correction, fit_forest, fit_smooth, mean_of
from perfmodel.kernels.correction import correction, evaluate_trees
from perfmodel.kernels.smooth import evaluate_smooth


def rows(n: int, n_columns: int = 3) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    features = generator.uniform(0.0, 10.0, (n, n_columns))
    features = np.column_stack([features, np.ones(n)])  # a column that says nothing
    noise = generator.normal(0.0, 0.03, n)
    return features, 0.3 * np.sin(features[:, 0]) + 0.1 * features[:, 1] + noise


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")  # of noise at its least
def test_arrays_predict_what_the_library_predicts() -> None:
    features, target = rows(50)
    arrays = fit_smooth(features, target).arrays
    unseen = rows(200)[0][100:]
    z = lambda x: (x[:, :3] - features[:, :3].mean(axis=0)) / features[:, :3].std(axis=0)  # noqa: E731  # used twice
    kernel = ConstantKernel(0.02, (1e-4, 1.0)) * Matern(3.0, (0.3, 100.0), nu=1.5) + WhiteKernel(1e-3, (1e-4, 0.1))
    offset = np.median(target)
    model = GaussianProcessRegressor(kernel, alpha=JITTER).fit(z(features), target - offset)
    np.testing.assert_allclose(evaluate_smooth(arrays, unseen), model.predict(z(unseen)) + offset, atol=1e-4)


def test_left_out_rows_are_predicted_as_without_them() -> None:
    features, target = rows(30)
    left_out = fit_smooth(features, target).left_out
    # The hyperparameters hardly move without one row, so a fit without it must miss it about as the closed form says.
    for index in (3, 17):
        seen = np.arange(30) != index
        arrays = fit_smooth(features[seen], target[seen]).arrays
        missed = target[index] - evaluate_smooth(arrays, features[index : index + 1])[0]
        assert missed == pytest.approx(left_out[index], abs=0.02)


def test_far_from_every_row_only_the_offset_is_left() -> None:
    features, target = rows(30)
    arrays = fit_smooth(features, target).arrays
    assert evaluate_smooth(arrays, np.full((1, 4), 1e6))[0] == pytest.approx(np.median(target), abs=1e-6)


def test_too_few_rows_have_no_correction() -> None:
    features, target = rows(MIN_ROWS - 1)
    found = fit_correction(features, target)
    assert not found.arrays
    assert found.left_out.tolist() == target.tolist()
    assert correction(found.arrays, features).tolist() == [0.0] * len(target)


def test_half_of_each_is_stored() -> None:
    features, target = rows(120)
    smooth, trees = fit_smooth(features, target), fit_forest(features, target)
    both = mean_of(smooth, trees)
    half = (evaluate_smooth(smooth.arrays, features) + evaluate_trees(trees.arrays, features)) / 2
    np.testing.assert_allclose(correction(both.arrays, features), half, atol=1e-5)
    np.testing.assert_allclose(both.left_out, (smooth.left_out + trees.left_out) / 2)


def test_the_correction_that_leaves_less_is_taken() -> None:
    features, _ = rows(300)
    # A library's switch: noise of a smooth function at the threshold, an easy cut for a tree.
    steps = np.where(features[:, 0] > 5.0, 0.5, -0.5) * np.where(features[:, 1] > 2.0, 1.0, -1.0)
    smooth = fit_smooth(features, steps)
    found = fit_correction(features, steps)
    assert np.abs(found.left_out).mean() <= np.abs(smooth.left_out).mean()
    assert "smooth_points" in found.arrays


def test_few_rows_have_scales_of_their_own_where_one_column_tells_nearly_all() -> None:
    generator = np.random.default_rng(3)
    features = generator.uniform(0.0, 1.0, (200, 10))
    target = 0.4 * np.sin(6.0 * features[:, 4])
    seen, unseen = features[:40], features[40:]
    plain, own = (fit_correction(seen, target[:40], try_own_scales=own) for own in (False, True))
    errors = [np.abs(correction(found.arrays, unseen) - target[40:]).mean() for found in (plain, own)]
    assert errors[1] < errors[0] / 2
    # Where no column tells more than the others, one scale for all stays.
    noise = generator.normal(0.0, 0.1, 40)
    same = [fit_correction(seen, noise, try_own_scales=own).arrays["smooth_scale"] for own in (False, True)]
    np.testing.assert_array_equal(same[0], same[1])
