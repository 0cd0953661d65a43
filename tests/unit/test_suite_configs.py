"""Files that only suites name: every one loads, and the suites name nothing else."""

from pathlib import Path

import pytest

from perfmodel.config import find_config, load_model, load_plan, load_topology
from perfmodel.topology import build_topology
from perfmodel.validate.suite import load_suite

SUITES = Path(__file__).parents[2] / "configs" / "suites"


@pytest.mark.parametrize("path", sorted((SUITES / "models").glob("*.yaml")), ids=lambda path: path.stem)
def test_models(path):
    assert load_model(str(path)).name == path.stem


@pytest.mark.parametrize("path", sorted((SUITES / "topologies").glob("*.yaml")), ids=lambda path: path.stem)
def test_topologies(path):
    spec = load_topology(str(path))
    assert spec.name == path.stem
    if spec.nodes == 1:
        assert build_topology(spec).n_ranks == sum(group.count for group in spec.node.gpus)


@pytest.mark.parametrize("path", sorted((SUITES / "plans").glob("*.yaml")), ids=lambda path: path.stem)
def test_plans_place_every_joint_table_once(path):
    placement = load_plan(str(path)).embeddings.placement
    n_ranks = int(path.stem.rpartition("_")[2])
    assert list(placement) == [f"joint{number}" for number in range(len(placement))]
    assert sorted(where.ranks for where in placement.values()) == [(rank,) for rank in range(1, n_ranks)]


@pytest.mark.parametrize("path", sorted((SUITES / "models").glob("dlrm_*joint_*.yaml")), ids=lambda path: path.stem)
def test_groups_have_every_table_once(path):
    spec = load_model(str(path))
    tables = [name for group in spec.joint for name in group]
    assert sorted(tables) == sorted(f"t{number}" for number in range(26))


@pytest.mark.parametrize("path", sorted(SUITES.glob("*.csv")), ids=lambda path: path.stem)
def test_suites_name_what_exists(path):
    cases = load_suite(path).cases
    for model in {case.model for case in cases}:
        find_config("models", model)
    for topology in {case.topology for case in cases}:
        find_config("topologies", topology)
