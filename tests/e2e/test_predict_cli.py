"""`perfmodel predict` as a user runs it."""

import subprocess
import sys

PREDICT = ["predict", "--model", "dlrm_small", "--topo", "dgx", "--json"]
# Runs the command line, then says on stderr whether torch was imported.
RUNNER = (
    "import sys\nfrom perfmodel.cli import main\ntry:\n    main(sys.argv[1:])\nfinally:\n"
    "    print('torch' in sys.modules, file=sys.stderr)"
)


def run(*args):
    done = subprocess.run([sys.executable, "-c", RUNNER, *args], capture_output=True, text=True, check=True)
    return done.stdout, done.stderr.strip() == "True"


def test_the_second_run_takes_the_graph_from_the_cache_without_torch(monkeypatch, tmp_path):
    monkeypatch.setenv("PERFMODEL_CACHE", str(tmp_path))
    first, with_torch = run(*PREDICT)
    assert with_torch
    assert run(*PREDICT) == (first, False)
    assert run(*PREDICT, "--no-cache") == (first, True)
