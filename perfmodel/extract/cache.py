"""Graphs on disk, found by what they were made from. Neither this module nor a hit imports torch.

A graph's key is a hash of everything that decides it: the model's spec, the options of extraction, the contents of
files it depends on (a user's own code), the versions of perfmodel and torch and the graph's schema. Entries never
become wrong, only unused; deleting the folder is always safe.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from perfmodel.errors import GraphError
from perfmodel.graph import SCHEMA_VERSION, Graph
from perfmodel.heap import uncollected

_LOG = logging.getLogger(__name__)
_SUFFIX = ".graph.json.gz"
# Level 1 writes a 175B-parameter model's graph in a third of the default level's time and a tenth more space.
_COMPRESSION_LEVEL = 1
_SOURCES = ("extract", "models", "graph.py")


def cache_folder() -> Path:
    """`PERFMODEL_CACHE`, or `perfmodel` in the user's cache folder (`XDG_CACHE_HOME`, `~/.cache`)."""
    named = os.environ.get("PERFMODEL_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "perfmodel"


def graph_key(spec: Mapping[str, Any], options: Mapping[str, Any], files: Iterable[Path] = ()) -> str:
    """Hex digest of a model spec (as JSON data), extraction options and the contents of the files named.

    A development checkout changes without its version changing, so the code of the rooms that decide a graph counts.
    """
    digest = hashlib.sha256()
    body = {
        "spec": spec,
        "options": options,
        "schema_version": SCHEMA_VERSION,
        "perfmodel": _version("perfmodel"),
        "torch": _version("torch"),
    }
    digest.update(json.dumps(body, sort_keys=True, separators=(",", ":"), default=str).encode())
    for file in (*_own_sources(), *sorted(files)):
        digest.update(b"\0" + file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def load(key: str, folder: Path | None = None) -> Graph | None:
    """The graph under a key, or None if there is none; a damaged entry counts as none."""
    path = (folder or cache_folder()) / (key + _SUFFIX)
    try:
        with uncollected(), gzip.open(path, "rt", encoding="utf-8") as file:
            return Graph.from_json(file.read())
    except FileNotFoundError:
        return None
    except (OSError, EOFError, ValueError, GraphError) as error:
        _LOG.warning("graph cache: %s cannot be read (%s); extracting again", path, error)
        return None


def store(key: str, graph: Graph, folder: Path | None = None) -> None:
    """Writes a graph under a key, whole or not at all. A folder that cannot be written is no error."""
    folder = folder or cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".partial")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(gzip.compress(graph.to_json().encode(), compresslevel=_COMPRESSION_LEVEL, mtime=0))
            Path(name).replace(folder / (key + _SUFFIX))
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        _LOG.warning("graph cache: cannot write to %s (%s)", folder, error)


def cached(key: str, make: Callable[[], Graph], folder: Path | None = None) -> Graph:
    """The graph under a key; made and stored if it is not there."""
    found = load(key, folder)
    if found is None:
        found = make()
        store(key, found, folder)
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def _own_sources() -> list[Path]:
    room = Path(__file__).parent.parent
    files: list[Path] = []
    for name in _SOURCES:
        files += sorted((room / name).rglob("*.py")) if not name.endswith(".py") else [room / name]
    return files
