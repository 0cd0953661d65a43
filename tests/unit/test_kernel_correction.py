"""The stored correction: trees as arrays give scikit-learn's own predictions, and fade outside the fit range."""

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingRegressor

from calibrate import fitting
from perfmodel.estimate import Source
from perfmodel.kernels.correction import (
    FADE_OCTAVES,
    MAX_LOG_CORRECTION,
    LawResult,
    Segment,
    corrected_s,
    evaluate_trees,
    octaves_outside,
)


def data(seed=0, rows=600):
    generator = np.random.default_rng(seed)
    features = generator.uniform(-2.0, 2.0, (rows, 3))
    target = 0.3 * np.sign(features[:, 0]) + 0.2 * features[:, 1] ** 2
    return features, target


def segment(arrays, value_range=(1.0, 8.0), **parameters):
    return Segment(
        name="s",
        parameters=parameters,
        arrays=arrays,
        fit_range={"m": value_range},
        low_frac=0.9,
        high_frac=1.1,
        source=Source.FITTED,
        corrected=bool(arrays),
    )


def constant_tree(value):
    return {
        "tree_roots": np.array([0], np.uint32),
        "tree_feature": np.array([255], np.uint8),
        "tree_child": np.array([0], np.uint16),
        "tree_value": np.array([value], np.float32),
    }


def test_arrays_predict_what_scikit_learn_predicts(monkeypatch):
    monkeypatch.setattr(fitting, "SOME_TREES", 20)
    features, target = data()
    weight = np.ones(len(target))
    arrays = fitting.fit_trees(features, target, weight)
    model = HistGradientBoostingRegressor(
        random_state=fitting.SEED, early_stopping=False, max_iter=fitting.SOME_TREES, **fitting.TREES
    ).fit(features, target, sample_weight=weight)
    unseen, _ = data(seed=1)
    np.testing.assert_allclose(evaluate_trees(arrays, unseen), model.predict(unseen), atol=2e-5)


def test_a_tree_by_hand():
    # root: feature 1 <= 0.5 ? leaf 10 : (feature 0 <= 2 ? leaf 20 : leaf 30); plus a lone leaf of 1
    arrays = {
        "tree_roots": np.array([0, 5], np.uint32),
        "tree_feature": np.array([1, 255, 0, 255, 255, 255], np.uint8),
        "tree_child": np.array([1, 0, 3, 0, 0, 0], np.uint16),
        "tree_value": np.array([0.5, 10.0, 2.0, 20.0, 30.0, 1.0], np.float32),
    }
    features = np.array([[0.0, 0.5], [2.0, 0.6], [2.1, 0.6]])
    assert evaluate_trees(arrays, features).tolist() == [11.0, 21.0, 31.0]


def test_octaves_outside_count_factors_of_two():
    ranged = {"m": np.array([0.5, 1.0, 8.0, 32.0]), "unknown": np.array([1.0, 1.0, 1.0, 1.0])}
    found = octaves_outside(ranged, {"m": (1.0, 8.0)})
    np.testing.assert_allclose(found, [1.0, 0.0, 0.0, 2.0], atol=0.03)


def test_correction_fades_to_one_outside_the_range():
    sizes = np.array([4.0, 8.0 * 2 ** (FADE_OCTAVES / 2), 8.0 * 2**FADE_OCTAVES * 1.1])
    result = LawResult(time_s=np.ones(3), features=np.zeros((3, 1)), ranged={"m": sizes})
    times, _ = corrected_s(segment(constant_tree(0.4)), result)
    assert times[0] == pytest.approx(np.exp(0.4))
    assert 1.0 < times[1] < times[0]
    assert times[2] == 1.0


def test_correction_is_bounded():
    result = LawResult(time_s=np.ones(1), features=np.zeros((1, 1)), ranged={"m": np.array([2.0])})
    times, _ = corrected_s(segment(constant_tree(9.0)), result)
    assert times[0] == pytest.approx(np.exp(MAX_LOG_CORRECTION))


def test_a_row_that_is_mostly_launch_floor_weighs_little():
    rows = fitting.Rows(
        calls=[None, None], measured_s=np.array([1e-3, 42e-6]), heldout=np.zeros(2, bool), place=np.full(2, 0.5)
    )
    target, weight = fitting.targets(np.array([0.9e-3, 4e-6]), rows, {"measurement_floor_s": 40e-6})
    assert target[0] == pytest.approx(np.log(0.96 / 0.9))
    assert weight[0] > 0.9
    assert weight[1] < 0.01
