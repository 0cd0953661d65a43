"""Fits on disk: what is written is read back, nothing is half-written, what does not belong is refused."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perfmodel.db import Fit, read_fit, write_fit
from perfmodel.errors import ConfigError
from perfmodel.estimate import Source

PROVENANCE = {
    "source": "an example",
    "commit": "none",
    "licence": "none",
    "date": "2026-11-29",
    "rows": "10",
    "heldout_rows": "3",
    "software": "none",
}
FIT = Fit(
    family="gemm",
    law="gemm/1",
    parameters={"eff": 0.75, "floor_s": 2e-6, "zero": 0.0},
    arrays={"tree_value": np.array([0.5, -1.25, 3.0]), "tree_feature": np.array([1, 255], dtype=np.uint8)},
    fit_range={"m": (1.0, 4096.0)},
    heldout={"all": {"n_rows": 3.0, "median": 0.04, "p90": 0.1}},
    low_frac=0.9,
    high_frac=1.2,
    provenance=PROVENANCE,
)


def assert_same(one: Fit, other: Fit) -> None:
    assert replace(one, arrays={}) == replace(other, arrays={})
    assert one.arrays.keys() == other.arrays.keys()
    for key, value in one.arrays.items():
        assert value.dtype == other.arrays[key].dtype
        np.testing.assert_array_equal(value, other.arrays[key])


def test_a_fit_is_read_back_as_written(tmp_path: Path) -> None:
    write_fit(tmp_path, FIT)
    assert_same(read_fit(tmp_path, "gemm"), FIT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gemm.fit.npz", "gemm.fit.yaml"]


def test_writing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    write_fit(tmp_path, FIT)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write_fit(tmp_path, FIT)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first


def test_a_fit_that_loses_its_arrays_leaves_none_behind(tmp_path: Path) -> None:
    write_fit(tmp_path, FIT)
    write_fit(tmp_path, replace(FIT, arrays={}))
    assert [path.name for path in tmp_path.iterdir()] == ["gemm.fit.yaml"]


def test_an_inherited_fit_reads_as_derived(tmp_path: Path) -> None:
    write_fit(tmp_path, replace(FIT, provenance={**PROVENANCE, "inherited_from": "a100_sxm_80gb"}))
    assert read_fit(tmp_path, "gemm").source is Source.DERIVED


@pytest.mark.parametrize("key", sorted(PROVENANCE))
def test_provenance_is_required_to_write_and_to_read(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"provenance: missing {key}"):
        write_fit(tmp_path, replace(FIT, provenance={k: v for k, v in PROVENANCE.items() if k != key}))
    assert list(tmp_path.iterdir()) == []
    path = write_fit(tmp_path, FIT)
    lines = [line for line in path.read_text().splitlines() if not line.startswith(f"  {key}:")]
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=f"provenance: missing {key}"):
        read_fit(tmp_path, "gemm")


def test_a_failed_rename_leaves_the_old_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fit(tmp_path, FIT)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    real = os.replace
    calls = []

    def fails_on_the_second(source: str, target: str) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", fails_on_the_second)
    with pytest.raises(OSError, match="No space left"):
        write_fit(tmp_path, replace(FIT, parameters={"eff": 0.5}, arrays={"tree_value": np.zeros(2)}))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_arrays_of_another_fit_are_refused(tmp_path: Path) -> None:
    write_fit(tmp_path, FIT)
    other = tmp_path / "other"
    write_fit(other, replace(FIT, arrays={"tree_value": np.zeros(3)}))
    os.replace(other / "gemm.fit.npz", tmp_path / "gemm.fit.npz")
    with pytest.raises(ConfigError, match="does not belong to"):
        read_fit(tmp_path, "gemm")


def test_a_pickle_in_the_arrays_is_refused(tmp_path: Path) -> None:
    import hashlib

    write_fit(tmp_path, FIT)
    path = tmp_path / "gemm.fit.npz"
    old = hashlib.sha256(path.read_bytes()).hexdigest()
    np.savez(path, evil=np.array([{"a": 1}], dtype=object))
    yaml = tmp_path / "gemm.fit.yaml"
    yaml.write_text(yaml.read_text().replace(old, hashlib.sha256(path.read_bytes()).hexdigest()))
    with pytest.raises(ConfigError, match="not an npz of plain arrays"):
        read_fit(tmp_path, "gemm")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("law: gemm/1", "", "law: missing"),
        ("family: gemm", "family: conv", "family: found 'conv', allowed 'gemm'"),
        ("low_frac: 0.9", "low_frac: 1.9", "low_frac: found 1.9, allowed at most 1"),
        ("high_frac: 1.2", "high_frac: x", "high_frac: found 'x'"),
        ("  eff: 0.75", "  eff: .nan", "eff: found nan, allowed a finite number"),
        ("law: gemm/1", "law: gemm/1\nlow: 3", "low: unknown key"),
    ],
)
def test_a_broken_file_says_what_and_where(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = write_fit(tmp_path, FIT)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        read_fit(tmp_path, "gemm")
