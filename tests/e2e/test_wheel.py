"""The wheel, installed apart from the repository: it has its data and answers as the checkout does."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with nothing but the wheel's content; what it depends on comes from the environment of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    build = "import os, sys; from hatchling.build import build_wheel; os.chdir(sys.argv[1]); print(build_wheel(sys.argv[2]))"
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    done = subprocess.run(
        [sys.executable, "-c", build, str(ROOT), str(folder)], capture_output=True, text=True, check=True
    )
    with zipfile.ZipFile(folder / done.stdout.split()[-1]) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def run(site, *arguments):
    # -P and another folder: nothing of the checkout is on the path but by the editable install, which `site` goes before.
    env = {**os.environ, "PYTHONPATH": str(site), "PERFMODEL_CACHE": str(site.parent / "cache")}
    done = subprocess.run(
        [sys.executable, "-P", *arguments], capture_output=True, text=True, check=False, cwd=site.parent, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_the_wheel_that_answers(site):
    where = run(site, "-c", "import perfmodel, calibrate; print(perfmodel.__file__, calibrate.__file__)").split()
    assert all(Path(place).is_relative_to(site) for place in where)


def test_it_predicts_from_its_own_data_and_writes_a_page(site):
    answer = run(
        site, "-m", "perfmodel.cli", "predict", "--model", "dlrm_small", "--topo", "dgx", "--json", "--html", "p.html"
    )
    assert json.loads(answer)["n_ranks"] == 8
    assert "</html>" in (site.parent / "p.html").read_text()
    doctor = json.loads(run(site, "-m", "perfmodel.cli", "doctor", "--device", "h100_sxm", "--json"))
    assert Path(doctor["database"]).is_relative_to(site)
    assert "gemm" in doctor["devices"][0]["fitted"]


def test_types_and_schemas_are_shipped(site):
    assert (site / "perfmodel" / "py.typed").exists()
    names = sorted(path.name for path in (site / "perfmodel" / "config" / "schemas").iterdir())
    assert names == ["device.schema.json", "model.schema.json", "plan.schema.json", "topology.schema.json"]
    metadata = next(site.glob("perfmodel-*.dist-info")) / "METADATA"
    extras = {line.split()[1] for line in metadata.read_text().splitlines() if line.startswith("Provides-Extra")}
    assert {"plot", "report", "dask", "docs"} <= extras
