"""A process that runs one short command neither collects garbage meanwhile nor looks through what is left at its end."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Registered first, so run last of all: after what the command registered.
SCRIPT = """
import atexit, gc, sys
atexit.register(lambda: sys.stderr.write(f"enabled={gc.isenabled()} frozen={gc.get_freeze_count() > 1000}"))
sys.argv = ["perfmodel", *sys.argv[1:]]
from perfmodel.cli import main
main()
"""


@pytest.mark.parametrize(("command", "is_enabled"), [("models", False), ("sweep", True)])
def test_short_commands_collect_nothing(command: str, is_enabled: bool) -> None:
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, command, "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert f"enabled={is_enabled} frozen=True" in found.stderr
    assert "Usage: perfmodel" in found.stdout
