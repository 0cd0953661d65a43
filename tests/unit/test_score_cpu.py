"""The shipped CPU fits on their held-out rows: the errors are those that the fit wrote down when it was made."""

import numpy as np
import pytest

from calibrate.fit_cpu import read_table
from calibrate.score_cpu import score_family
from perfmodel.db import db_root, load_device


@pytest.mark.parametrize(("name", "family"), [("cpu", "pool"), ("cpu_1t", "embedding"), ("cpu_1t", "index")])
def test_errors_are_those_of_the_fit_file(name: str, family: str) -> None:
    device = load_device(name)
    rows = read_table(db_root() / name / f"{family}.csv", device)
    report = score_family(rows, device, family)
    assert report is not None
    written = device.fits[family].heldout
    assert set(report.by_operator) == set(written)
    for key, (_, error) in report.by_operator.items():
        assert error.size == written[key]["n_rows"]
        assert float(np.median(error)) == pytest.approx(written[key]["median"], rel=1e-3)
