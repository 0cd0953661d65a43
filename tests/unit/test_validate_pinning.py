"""Pinned threads of torch have a core each, whatever else brings an OpenMP runtime of its own."""

import os
import subprocess
import sys

import pytest

CHECK = """
from pathlib import Path
from perfmodel.validate.train import pin_threads
pin_threads(1)
import sklearn.ensemble
import torch
torch.set_num_threads(2)
torch.randn(600, 600) @ torch.randn(600, 600)
allowed = [line.split()[1] for task in Path("/proc/self/task").iterdir()
           for line in (task / "status").read_text().splitlines() if line.startswith("Cpus_allowed_list")]
print(len({cores for cores in allowed if cores.isdigit()}))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and two cores of its own"
)
def test_two_threads_of_torch_are_on_two_cores_beside_scikit_learn() -> None:
    plain = {name: text for name, text in os.environ.items() if not name.startswith("OMP_")}
    found = subprocess.run([sys.executable, "-c", CHECK], env=plain, capture_output=True, text=True, check=True)
    assert int(found.stdout) >= 2
