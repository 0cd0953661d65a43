"""A prediction in a terminal, a notebook and a data frame."""

import pytest

import perfmodel
from perfmodel.errors import ConfigError
from perfmodel.units import format_time


@pytest.fixture(scope="module")
def prediction():
    return perfmodel.predict("dlrm_small", "dgx")


def test_print_gives_the_answer_with_its_range(prediction):
    lines = str(prediction).splitlines()
    assert lines[0] == "dlrm_small on dgx (8 ranks, plan ddp, fp32)"
    for time_s in (prediction.iteration_time_s, prediction.low_s, prediction.high_s):
        assert format_time(time_s) in lines[1]
    assert max(map(len, lines)) < 200


def test_a_notebook_shows_the_same_and_escapes_names(prediction):
    from dataclasses import replace
    from xml.etree import ElementTree

    shown = replace(prediction, model="<b>x</b>")._repr_html_()
    table = ElementTree.fromstring(shown)  # noqa: S314 -- our own text
    words = " ".join(table.itertext())
    assert "<b>x</b>" in words
    assert format_time(prediction.iteration_time_s) in words


def test_tables_are_frames_in_si_units(prediction):
    ranks = prediction.to_pandas()
    assert len(ranks) == len(prediction.ranks)
    assert ranks["breakdown.compute_s"].tolist() == [rank.breakdown.compute_s for rank in prediction.ranks]
    assert prediction.to_pandas("critical_path")["time_s"].sum() == pytest.approx(prediction.iteration_time_s)
    with pytest.raises(ConfigError, match="allowed ranks, top_ops, critical_path"):
        prediction.to_pandas("rank")


def test_a_file_of_another_version_says_what_to_do(prediction):
    import json

    for version, remedy in ((99, "upgrade perfmodel, or predict again"), (0, "reads 1: predict again")):
        text = json.dumps({**prediction.to_dict(), "schema_version": version})
        with pytest.raises(ConfigError, match=remedy):
            perfmodel.Prediction.from_json(text)


def test_plain_values_are_those_of_dataclasses(prediction):
    from dataclasses import asdict

    plain = prediction.to_dict()
    assert {name: plain[name] for name in asdict(prediction)} == asdict(prediction)
    plain["coverage"].clear()
    assert prediction.coverage
