"""`python -m perfmodel` is the command."""

import subprocess
import sys


def test_the_module_runs_as_the_command() -> None:
    found = subprocess.run([sys.executable, "-m", "perfmodel", "--help"], capture_output=True, text=True, check=True)
    assert found.stdout.startswith("Usage: python -m perfmodel") or found.stdout.startswith("Usage: perfmodel")
    assert "predict" in found.stdout
