"""Fits on disk: `<family>.fit.yaml`, in base units, and `<family>.fit.npz` for arrays. Never a pickle.

The YAML names the SHA-256 of its npz, so that a pair from two different fits is refused instead of mixed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import Field

from perfmodel.config.loading import Spec, validate
from perfmodel.config.reading import read_mapping
from perfmodel.db.device import Fit
from perfmodel.errors import ConfigError
from perfmodel.estimate import Source

FIT_SUFFIX = ".fit.yaml"
ARRAYS_SUFFIX = ".fit.npz"
# What every fit must say of itself (STYLE section 6; ADR 0003). A key that does not apply says so ("none").
INHERITED_KEY = "inherited_from"  # provenance of a fit that was made for another device
PROVENANCE_KEYS = ("source", "commit", "licence", "date", "rows", "heldout_rows", "software")


class _FitSpec(Spec):
    family: str = Field(min_length=1)
    law: str = Field(min_length=1, description="name and version of the law")
    parameters: dict[str, float]
    fit_range: dict[str, tuple[float, float]] = Field(default_factory=dict)
    heldout: dict[str, dict[str, float]] = Field(default_factory=dict)
    low_frac: float = Field(gt=0.0, le=1.0)
    high_frac: float = Field(ge=1.0)
    provenance: dict[str, str] = Field(description="source, commit, licence, date, rows, heldout_rows, software")
    arrays_sha256: str = ""


def fit_path(device_dir: Path, family: str) -> Path:
    """Where the fit of `family` lies in a device's folder."""
    return device_dir / f"{family}{FIT_SUFFIX}"


def list_fits(device_dir: Path) -> list[str]:
    """Families that have a fit in a device's folder, sorted."""
    return sorted(path.name.removesuffix(FIT_SUFFIX) for path in device_dir.glob(f"*{FIT_SUFFIX}"))


def read_fit(device_dir: Path, family: str) -> Fit:
    """Reads one fit. Raises ConfigError with every mistake: schema, provenance, name, arrays that do not belong."""
    path = fit_path(device_dir, family)
    spec = validate(_FitSpec, _floats(read_mapping(path)), str(path))
    problems = (
        [] if spec.family == family else [f"{path}: family: found {spec.family!r}, allowed {family!r} (its name)"]
    )
    problems += [
        f"{path}: provenance: missing {key}, needs text" for key in PROVENANCE_KEYS if not spec.provenance.get(key)
    ]
    if problems:
        raise ConfigError(problems)
    return Fit(
        family=spec.family,
        law=spec.law,
        parameters=spec.parameters,
        arrays=_read_arrays(path, spec.arrays_sha256),
        fit_range=spec.fit_range,
        heldout=spec.heldout,
        low_frac=spec.low_frac,
        high_frac=spec.high_frac,
        provenance=spec.provenance,
        source=Source.DERIVED if INHERITED_KEY in spec.provenance else Source.FITTED,
    )


def write_fit(device_dir: Path, fit: Fit) -> Path:
    """Writes a fit whole or not at all, and returns the path of its YAML.

    Both files are written beside their targets first and then renamed; what was there before stays if anything fails.
    Raises ConfigError if the fit would not load again.
    """
    path = fit_path(device_dir, fit.family)
    missing = [key for key in PROVENANCE_KEYS if not fit.provenance.get(key)]
    if missing:
        raise ConfigError([f"{path}: provenance: missing {key}, needs text" for key in missing])
    archive = _pack(fit.arrays) if fit.arrays else b""
    body = {
        "family": fit.family,
        "law": fit.law,
        "parameters": _plain(fit.parameters),
        "fit_range": {key: [float(low), float(high)] for key, (low, high) in sorted(fit.fit_range.items())},
        "heldout": {subset: _plain(errors) for subset, errors in sorted(fit.heldout.items())},
        "low_frac": float(fit.low_frac),
        "high_frac": float(fit.high_frac),
        "provenance": {key: str(value) for key, value in sorted(fit.provenance.items())},
        **({"arrays_sha256": hashlib.sha256(archive).hexdigest()} if archive else {}),
    }
    validate(_FitSpec, body | {"fit_range": {k: tuple(v) for k, v in fit.fit_range.items()}}, str(path))
    text = yaml.safe_dump(body, sort_keys=False, width=120, allow_unicode=True)
    files = {path: text.encode()} | ({_arrays_path(path): archive} if archive else {})
    device_dir.mkdir(parents=True, exist_ok=True)
    _replace_together(files)
    if not archive:
        _arrays_path(path).unlink(missing_ok=True)
    return path


def _arrays_path(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(FIT_SUFFIX) + ARRAYS_SUFFIX)


def _pack(arrays: Mapping[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{key: np.asarray(value) for key, value in sorted(arrays.items())})  # type: ignore[arg-type]  # numpy types its options, not the arrays
    return buffer.getvalue()


def _read_arrays(path: Path, sha256: str) -> dict[str, np.ndarray]:
    if not sha256:
        return {}
    arrays_path = _arrays_path(path)
    try:
        archive = arrays_path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{arrays_path}: cannot be read: {error.strerror}") from error
    if hashlib.sha256(archive).hexdigest() != sha256:
        raise ConfigError(f"{arrays_path}: does not belong to {path.name} (its SHA-256 differs): fit again")
    try:
        with np.load(io.BytesIO(archive), allow_pickle=False) as loaded:
            return {name: loaded[name] for name in loaded.files}
    except (ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{arrays_path}: not an npz of plain arrays: {error}") from error


def _plain(values: Mapping[str, float]) -> dict[str, float]:
    return {key: float(value) for key, value in sorted(values.items())}


def _floats(value: Any) -> Any:
    """Whole numbers as floats, at any depth: a fit has no integers, and YAML writes 2.0 as it likes."""
    if isinstance(value, Mapping):
        return {key: _floats(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_floats(item) for item in value)
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _replace_together(files: Mapping[Path, bytes]) -> None:
    """Replaces all files or none: new contents go to temporary names first, old ones come back if a rename fails."""
    with _temporary_names(files) as staged:
        old = {path: path.read_bytes() if path.exists() else None for path in files}
        done: list[Path] = []
        try:
            for path, temporary in staged.items():
                os.replace(temporary, path)
                done.append(path)
        except OSError:
            for path in done:
                content = old[path]
                if content is None:
                    path.unlink(missing_ok=True)
                else:
                    path.write_bytes(content)
            raise


@contextlib.contextmanager
def _temporary_names(files: Mapping[Path, bytes]) -> Iterator[dict[Path, Path]]:
    staged = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in files}
    try:
        for path, temporary in staged.items():
            temporary.write_bytes(files[path])
        yield staged
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)
