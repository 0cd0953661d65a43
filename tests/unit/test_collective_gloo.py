"""What gloo's collectives cost a rank's processor: from measured rows by hand to estimates."""

from dataclasses import replace

import pytest

from calibrate.fit_gloo import host_parameters
from perfmodel.collectives import CollectiveCall, estimate_collective
from perfmodel.collectives.gloo import with_host_costs
from perfmodel.config import load_topology
from perfmodel.db.fabric import load_fabric
from perfmodel.topology import build_topology

MIB = 2**20
HEAD = "system,nccl_dir_version,nccl_version_col,collective,dtype,num_gpus,bytes,repeat,us,issue_us,cpu_us\n"


def rows(*cases):
    return HEAD + "".join(f"gloo_loopback,1,1,{op},float,{n},{b},0,100,{i},{c}\n" for op, n, b, i, c in cases)


def test_a_constant_from_small_messages_and_a_cost_of_each_byte_from_large_ones(tmp_path):
    table = tmp_path / "rows.csv"
    cases = ((1024, 50, 200), (2048, 70, 400), (4 * MIB, 164, 4494.304))
    table.write_text(rows(*(("alltoall", 2, *case) for case in cases)))
    found = host_parameters([table])
    # Medians of 50 and 70 us, 200 and 400 us; then 104 us and 4194.304 us over 4 MiB: 1 ns a byte.
    assert found["issue_s.all_to_all.n2"] == pytest.approx(60e-6)
    assert found["busy_s.all_to_all.n2"] == pytest.approx(300e-6)
    assert found["issue_s_per_byte.all_to_all.n2"] == pytest.approx(104e-6 / (4 * MIB))
    assert found["busy_s_per_byte.all_to_all.n2"] == pytest.approx(1e-9)


def test_tables_without_those_columns_say_nothing(tmp_path):
    table = tmp_path / "rows.csv"
    table.write_text("system,collective,dtype,num_gpus,bytes,us\ngloo_loopback,alltoall,float,2,1024,5\n")
    assert host_parameters([table]) == {}


def call(op="all_reduce", n_ranks=2, n_bytes=4 * MIB, **more):
    return CollectiveCall(op=op, bytes=n_bytes, ranks=tuple(range(n_ranks)), dtype="float32", **more)


def test_host_costs_are_of_the_nearest_group_and_the_smallest_ones_issue():
    fit = load_fabric("gloo_loopback")
    values = {
        "issue_s.all_reduce.n2": 1e-4, "issue_s_per_byte.all_reduce.n2": 0.0, "issue_s.all_reduce.n4": 9.0,
        "busy_s.all_reduce.n2": 1.0, "busy_s.all_reduce.n4": 2e-3,
        "busy_s_per_byte.all_reduce.n2": 0.0, "busy_s_per_byte.all_reduce.n4": 1e-9,
    }  # fmt: skip
    fit = replace(fit, fit=replace(fit.fit, parameters=values))
    machine = build_topology(load_topology("cpu_x4"))
    bare = estimate_collective(call(n_ranks=4), machine, fits={})
    found = with_host_costs(bare, call(n_ranks=4), fit)
    assert found.issue_s == 1e-4
    assert found.busy_frac == pytest.approx((2e-3 + 4 * MIB * 1e-9) / bare.time_s)
    assert with_host_costs(bare, call("broadcast", n_ranks=4), fit) == bare  # not measured


def test_estimates_on_a_cpu_have_them_and_others_do_not():
    cpu, gpus = (build_topology(load_topology(name)) for name in ("cpu_x4", "dgx_h100"))
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        found = estimate_collective(call(op, 4), cpu)
        assert 1e-5 < found.issue_s < 1e-2
        assert 0.05 < found.busy_frac < 1.5
    for machine, n_ranks in ((gpus, 4), (cpu, 1)):
        found = estimate_collective(call(n_ranks=n_ranks), machine)
        assert (found.issue_s, found.busy_frac) == (0.0, 0.0)
