"""The examples in docs/examples run as they stand."""

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def test_a_module_of_ones_own(capsys) -> None:
    runpy.run_path(str(EXAMPLES / "own_module.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[1] == "ms"
    assert 1 < float(lines[0].split()[0]) < 1000
    assert any("all_reduce" in line for line in lines)
