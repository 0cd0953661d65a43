"""How fast a step is extracted, and in how much memory. Goals: 175B parameters in 20 s and 2 GB; a cache hit without torch."""

import subprocess
import sys
import time

import pytest

from perfmodel.config import load_model
from perfmodel.extract import cache, trace
from perfmodel.models import build

pytestmark = pytest.mark.bench

ALONE = """
import resource, time
from perfmodel.config import load_model
from perfmodel.extract import trace
from perfmodel.models import build
start = time.perf_counter()
built = build(load_model({name!r}))
middle = time.perf_counter()
graph = trace(built)
end = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
print(f"{name}: {{built.n_parameters / 1e9:.1f}}B parameters built in {{middle - start:.1f}} s, "
      f"{{len(graph.ops)}} ops in {{end - middle:.1f}} s, {{peak:.2f}} GB resident at most")
"""


@pytest.mark.parametrize("name", ["dlrm", "gpt2_large", "resnet50", "llama3_8b", "gpt3_175b"])
def test_time_and_memory_of_one_model_in_a_new_process(name):
    print(
        "\n"
        + subprocess.run(
            [sys.executable, "-c", ALONE.format(name=name)], check=True, capture_output=True, text=True
        ).stdout.strip()
    )


def test_a_warm_cache(tmp_path):
    graph = trace(build(load_model("gpt2_large")))
    cache.store("k", graph, tmp_path)
    start = time.perf_counter()
    assert cache.load("k", tmp_path) == graph
    size = next(tmp_path.iterdir()).stat().st_size
    print(f"\ngpt2_large: {len(graph.ops)} ops read in {time.perf_counter() - start:.2f} s from {size / 1e6:.2f} MB")
