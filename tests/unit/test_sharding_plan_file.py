"""A plan written to a file is read back whole: the placement of tables and everything else."""

import pytest

from perfmodel.config import load_plan
from perfmodel.sharding.plan import write_plan

PLANS = [
    "ddp",
    "ddp,bucket_cap=50MiB,first_bucket=2MiB",
    "embeddings=table_wise",
    "ddp,compression=fp16,static_graph=true",
    "tp=4,pp=2,accumulate=8,shard=optimizer,sequence=true",
    "fsdp,reshard_after_forward=false",
    "dlrm_mlperf_8",
]


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
@pytest.mark.parametrize("text", PLANS)
def test_nothing_is_lost(text, suffix, tmp_path):
    plan = load_plan(text)
    path = tmp_path / f"plan{suffix}"
    write_plan(plan, path)
    assert load_plan(path) == plan
