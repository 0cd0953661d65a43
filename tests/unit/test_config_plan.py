import pytest

from perfmodel.config import list_configs, load_plan
from perfmodel.errors import ConfigError


def test_the_default_plan_is_ddp_as_torch_does_it():
    plan = load_plan("ddp")
    assert (plan.data_parallel.bucket_cap, plan.data_parallel.first_bucket) == (25 * 2**20, 2**20)
    assert (plan.embeddings.strategy, plan.accumulate) == ("table_wise", 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ddp,bucket_cap=50MiB", {"bucket_cap": 50 * 2**20}),
        ("ddp, data_parallel.bucket_cap=50 MiB", {"bucket_cap": 50 * 2**20}),
        ("bucket_cap=1 MB,first_bucket=10 kB", {"bucket_cap": 10**6, "first_bucket": 10**4}),
        ("gradient_as_bucket_view=true", {"gradient_as_bucket_view": True}),
    ],
)
def test_inline_data_parallel(text, expected):
    plan = load_plan(text)
    assert {key: getattr(plan.data_parallel, key) for key in expected} == expected


def test_inline_embeddings_and_accumulation():
    assert load_plan("embeddings=data_parallel,accumulate=4").embeddings.strategy == "data_parallel"
    plan = load_plan("embeddings.t0=3,embeddings.t1=data_parallel,accumulate=4")
    placement = plan.embeddings.placement
    assert (placement["t0"].sharding, placement["t0"].ranks, placement["t0"].kernel) == ("table_wise", (3,), "own")
    assert (placement["t1"].sharding, placement["t1"].ranks) == ("data_parallel", ())
    assert (plan.embeddings.strategy, plan.accumulate) == ("explicit", 4)


def test_a_plan_file_may_be_changed_inline():
    plan = load_plan("dlrm_mlperf_8,accumulate=2")
    assert plan.accumulate == 2
    assert plan.embeddings.placement["t21"].ranks == (7,)


@pytest.mark.parametrize("name", list_configs("plans"))
def test_shipped_plans_load(name):
    assert load_plan(name).name == name


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("dpp", "no such file, and no shipped plan has this name .*did you mean 'ddp'"),
        ("dpp,accumulate=2", "no such plan, allowed .*did you mean 'ddp'"),
        ("ddp,accumulate", "found 'accumulate', allowed key=value"),
        ("ddp,bucket_cap=50", "data_parallel.bucket_cap: found 50 .a bare number has no unit"),
        ("ddp,bucket_cap=0 B", "data_parallel.bucket_cap: found 0, allowed more than 0"),
        ("embeddings=tablewise", "embeddings: found 'tablewise', allowed table_wise, .*did you mean 'table_wise'"),
        ({"embeddings": {"t0": -1}}, "embeddings.placement.t0: found -1, allowed a rank"),
        ({"embeddings": {"t0": "row_wise"}}, "embeddings.placement.t0: found 'row_wise', allowed a rank"),
        ({"deepspeed": 4}, "deepspeed: unknown key, allowed name, mesh, data_parallel, "),
        ({"mesh": {"tq": 4}}, "mesh: found 'tq', allowed pp, dp, ep, cp, tp; did you mean 'tp'"),
        ({"mesh": {"tp": 0}}, "mesh.tp: found 0, allowed more than 0"),
        (
            {"pipeline": {"chunks": 2}},
            "pipeline: chunks: found 2 with schedule 1f1b, allowed more than 1 with interleaved",
        ),
        ({"accumulate": 2, "micro_batches": 2}, "accumulate: found 2 with micro_batches 2, allowed one of them"),
        ({"fsdp": {"ranks": 2}}, "fsdp: found with data_parallel.shard nothing, allowed with parameters"),
        ("zero1,compression=fp16", "compression: found fp16 with shard optimizer .* communication hook"),
        ("schedule=zero_bubble", "pipeline.schedule: found zero_bubble with one stage"),
        ({"accumulate": 0}, "accumulate: found 0, allowed more than 0"),
        ({"data_parallel": {"bucket_kap": "1 MiB"}}, "data_parallel.bucket_kap: unknown key, .*'bucket_cap'"),
    ],
)
def test_bad_plans_give_one_clear_line(source, says):
    with pytest.raises(ConfigError, match=says) as caught:
        load_plan(source)
    assert len(caught.value.problems) == 1
