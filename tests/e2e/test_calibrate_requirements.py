"""Calibration runs where nothing is installed but what it says it needs: every other package is out of its reach."""

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

# What the project's user allows a calibration to need; pydantic reads device.yaml.
NEEDED = ("torch", "numpy", "scipy", "scikit-learn", "pyyaml", "click", "rich", "pydantic")
ROOT = Path(__file__).parents[2]
# A module that exists and cannot be imported: torch asks for specs of modules that it never loads.
BLOCKED = """
import sys
from importlib.machinery import ModuleSpec
blocked = set({blocked!r})
class Blocker:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name.partition(".")[0] in blocked else None
    def create_module(self, spec):
        raise ModuleNotFoundError(f"blocked: {{spec.name}}", name=spec.name)
    def exec_module(self, module):
        pass
sys.meta_path.insert(0, Blocker())
"""


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(names: tuple[str, ...]) -> set[str]:
    """The distributions named and those that they need, by what is installed."""
    found: set[str] = set()
    queue = [normalised(name) for name in names]
    while queue:
        name = queue.pop()
        if name in found:
            continue
        try:
            wanted = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        queue += [normalised(re.split(r"[ <>=!~;\[(]", line)[0]) for line in wanted if "extra ==" not in line]
    return found


def other_modules() -> list[str]:
    """Modules of every installed distribution that is not needed, this project apart."""
    needed = closure(NEEDED)
    return sorted(
        module
        for module, owners in metadata.packages_distributions().items()
        if module not in {"perfmodel", "calibrate"} and not any(normalised(owner) in needed for owner in owners)
    )


def run_blocked(code: str) -> subprocess.CompletedProcess[str]:
    program = BLOCKED.format(blocked=other_modules()) + code
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)


def test_the_blocker_blocks() -> None:
    assert "blocked: hypothesis" in run_blocked("import hypothesis").stderr
    assert run_blocked("import torch, scipy, sklearn, yaml, click, rich").returncode == 0


def test_a_calibration_measures_fits_and_reports_with_its_few_packages(tmp_path: Path) -> None:
    arguments = [
        "calibrate", "kernels", "--device", "cpu", "--families", "random", "--share", "0.6", "--minutes", "1",
        "--out", str(tmp_path),
    ]  # fmt: skip
    done = run_blocked(f"from perfmodel.cli import main\nmain({json.dumps(arguments)})")
    assert done.returncode == 0, done.stderr
    assert "random" in done.stdout
    assert (tmp_path / "random.fit.yaml").is_file()


def test_the_code_for_gpus_needs_no_more() -> None:
    done = run_blocked("import calibrate.run, calibrate.fit_cuda, calibrate.measure_cuda, calibrate.host_cuda\n")
    assert done.returncode == 0, done.stderr
