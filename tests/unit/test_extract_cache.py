"""The graph cache: content decides the key, damage means a re-trace, a hit needs no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from perfmodel.extract import cache
from perfmodel.graph import Graph, Op, TensorSpec

SPEC = {"kind": "dlrm", "name": "d", "batch_size": 8}
OPTIONS = {"target": "cuda", "values": "meta"}


def small_graph() -> Graph:
    x = TensorSpec(id=0, shape=(2, 3), dtype="float32", strides=(3, 1), storage=0)
    y = TensorSpec(id=1, shape=(2, 3), dtype="float32", strides=(3, 1), storage=1)
    op = Op(id=0, name="aten.relu", inputs=(x,), input_names=("self",), outputs=(y,))
    return Graph(model="m", target="cuda", precision="fp32", batch_size=2, ops=(op,))


def test_a_stored_graph_comes_back_equal_and_is_made_once(tmp_path):
    made = []

    def make() -> Graph:
        made.append(1)
        return small_graph()

    key = cache.graph_key(SPEC, OPTIONS)
    assert cache.cached(key, make, tmp_path) == small_graph()
    assert cache.cached(key, make, tmp_path) == small_graph()
    assert len(made) == 1
    assert [path.name for path in tmp_path.iterdir()] == [f"{key}.graph.json.gz"]


def test_the_key_follows_spec_options_files_and_versions(tmp_path, monkeypatch):
    code = tmp_path / "model.py"
    code.write_text("a = 1")
    keys = {
        cache.graph_key(SPEC, OPTIONS),
        cache.graph_key({**SPEC, "batch_size": 16}, OPTIONS),
        cache.graph_key(SPEC, {**OPTIONS, "target": "cpu"}),
        cache.graph_key(SPEC, OPTIONS, [code]),
    }
    code.write_text("a = 2")
    keys.add(cache.graph_key(SPEC, OPTIONS, [code]))
    monkeypatch.setattr(cache.metadata, "version", lambda package: f"{package}-other")
    keys.add(cache.graph_key(SPEC, OPTIONS))
    assert len(keys) == 6
    assert cache.graph_key(dict(reversed(SPEC.items())), OPTIONS) in keys


@pytest.mark.parametrize("content", [b"", b"not gzip", b"\x1f\x8b\x08\x00broken"])
def test_a_damaged_entry_is_made_again(tmp_path, content, caplog):
    path = tmp_path / f"k{cache._SUFFIX}"
    path.write_bytes(content)
    assert cache.load("k", tmp_path) is None
    assert "extracting again" in caplog.text
    assert cache.cached("k", small_graph, tmp_path) == small_graph()
    assert cache.load("k", tmp_path) == small_graph()


def test_a_truncated_entry_is_made_again(tmp_path):
    cache.store("k", small_graph(), tmp_path)
    path = tmp_path / f"k{cache._SUFFIX}"
    path.write_bytes(path.read_bytes()[:-20])
    assert cache.load("k", tmp_path) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, caplog):
    occupied = tmp_path / "file"
    occupied.write_text("")
    assert cache.cached("k", small_graph, occupied / "below") == small_graph()
    assert "cannot write" in caplog.text


def test_the_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PERFMODEL_CACHE", str(tmp_path / "mine"))
    assert cache.cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("PERFMODEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "perfmodel"


def test_a_hit_imports_no_torch(tmp_path):
    key = cache.graph_key(SPEC, OPTIONS)
    cache.store(key, small_graph(), tmp_path)
    code = (
        "import sys, pathlib\n"
        "from perfmodel.extract import cache, trace\n"
        f"graph = cache.load(cache.graph_key({SPEC!r}, {OPTIONS!r}), pathlib.Path({str(tmp_path)!r}))\n"
        "assert graph is not None\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
