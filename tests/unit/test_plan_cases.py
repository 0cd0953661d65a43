"""Ratios that people measured with DDP and FSDP (shared/cases/26 to 36), predicted from the plan and the machine alone.

Nothing is fitted to them. Where a ratio falls outside, the test holds what is predicted and says why it differs.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from perfmodel.api import Predictor
from perfmodel.config import TopologySpec, load_topology
from perfmodel.heap import uncollected

CASES = Path(__file__).parents[2].parent / "shared" / "cases"
GPT2 = {
    "kind": "transformer", "name": "case", "architecture": "gpt2", "vocab_size": 50257, "hidden_size": 768, "layers": 12,
    "heads": 12, "max_positions": 1024, "attention": "eager", "optimizer": "adamw", "precision": "fp32", "batch_size": 1,
}  # fmt: skip
BERT = {
    "kind": "transformer", "name": "case", "architecture": "bert", "vocab_size": 30522, "hidden_size": 768, "layers": 12,
    "heads": 12, "max_positions": 512, "sequence_length": 128, "attention": "eager", "optimizer": "adamw", "precision": "fp32",
    "batch_size": 32,
}  # fmt: skip
# 4.0 million parameters at 256 wide, 5 blocks, 65 characters.
CHARACTERS = {
    **GPT2,
    "vocab_size": 65,
    "hidden_size": 256,
    "layers": 5,
    "heads": 4,
    "max_positions": 256,
    "batch_size": 8,
}
LLAMA_7B = {
    "kind": "transformer", "name": "case", "architecture": "llama", "vocab_size": 32000, "hidden_size": 4096, "layers": 32,
    "heads": 32, "ffn_size": 11008, "max_positions": 4096, "attention": "sdpa", "optimizer": "adamw", "precision": "bf16",
    "batch_size": 2,
}  # fmt: skip
# Rows of the Terabyte data set's tables, no more than 10 million each (counts of facebookresearch/dlrm's preprocessing).
TERABYTE = (
    9980333, 36084, 17217, 7378, 20134, 3, 7112, 1442, 61, 9758201, 1333352, 313829, 10, 2208, 11156, 122, 4, 970, 14,
    9994222, 7267859, 9946608, 415421, 12420, 101, 36,
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _heap_is_left_alone() -> Iterator[None]:
    """Graphs pile up and stay: collecting among them takes a third of the time."""
    with uncollected():
        yield


@cache
def case(number: int) -> dict[str, Any]:
    found = sorted(CASES.glob(f"{number}-*"))
    if not found:
        pytest.skip(f"needs shared/cases/{number}-*")
    return yaml.safe_load(next(found[0].glob("*.yaml")).read_text())


def with_node(name: str, **changes: Any) -> TopologySpec:
    spec = load_topology(name)
    return spec.model_copy(update={"name": f"{name}_changed", "node": spec.node.model_copy(update=changes)})


def with_nic(name: str, bandwidth: str) -> TopologySpec:
    """The same hosts with one Ethernet card of a given speed."""
    nics = type(load_topology(name).node.nics).model_validate({"count": 1, "kind": "tcp", "bandwidth": bandwidth})
    return with_node(name, nics=nics)


def test_26_ddp_is_slower_without_the_bridge() -> None:
    measured = case(26)["measured_s"]
    assert measured["ddp_2_no_nvlink"] / measured["ddp_2_nvlink"] == pytest.approx(1.30, abs=0.01)
    predictor = Predictor({**GPT2, "sequence_length": 512}, "2xtitan_rtx")
    bridge = predictor.predict("ddp").iteration_time_s
    none = predictor.predict("ddp", topology=with_node("2xtitan_rtx", nvlink=None)).iteration_time_s
    # Outside: even at one sequence of 512 tokens, where communication weighs most, only the bucket of the tied embedding (154
    # MB), ready last, stays exposed. The thread's script has 4 samples a GPU, which is 1.02 here; 101 to 131 s in its 200
    # steps are 0.15 s more each, as if gradients crossed host memory at 1 GB/s (13 here). The run without the bridge had
    # NCCL_P2P_DISABLE=1, so its bytes did cross host memory; the cards' slots are not told.
    assert 1.05 < none / bridge < 1.30


def test_27_the_second_node_costs_more_than_the_first_eight_gpus() -> None:
    rate = case(27)["samples_per_s_per_gpu"]
    predictor = Predictor(BERT, "dgx1_v100")
    one, eight = (predictor.predict("ddp", topology=name).iteration_time_s for name in ("v100", "dgx1_v100"))
    # The network is not stated: 25 Gbit/s a host, what cloud machines of that year had.
    two_nodes = predictor.predict(
        "ddp", topology=with_nic("cluster_8xv100_1nic", "25 Gbit/s").with_nodes(2)
    ).iteration_time_s
    assert one / eight == pytest.approx(rate["1x8"] / rate["1x1"], abs=0.12)
    assert one / two_nodes == pytest.approx(rate["2x8"] / rate["1x1"], abs=0.2)
    assert one / two_nodes < one / eight - 0.1  # not flat across nodes


def test_30_a_tiny_gpt_is_slower_on_two_t4() -> None:
    measured = case(30)["measured_ms"]
    predictor = Predictor(CHARACTERS, "2xt4")
    two, one = predictor.predict("ddp"), predictor.predict("ddp", topology="t4")
    slower = two.iteration_time_s / one.iteration_time_s
    assert 1.0 < slower < measured["ddp_2"] / measured["one_gpu"]
    assert sum(p.tensor.bytes for p in predictor.graph().parameters) == pytest.approx(4 * 4e6, rel=0.05)
    # Nothing but the exchange of gradients tells the two apart.
    assert two.breakdown.exposed_communication_s > 0


def test_32_a_network_explains_the_gap_and_the_model_does_not() -> None:
    rate = case(32)["tokens_per_s_per_gpu"]
    hybrid = {"data_parallel": {"shard": "parameters"}, "fsdp": {"ranks": 8}}
    predictor = Predictor({**LLAMA_7B, "layers": 4}, load_topology("dgx_h100").with_nodes(8), mode="compile")
    healthy = predictor.predict(hybrid)
    slow = predictor.predict(hybrid, topology=with_nic("dgx_h100", "25 Gbit/s").with_nodes(8))
    assert healthy.breakdown.exposed_communication_s < 0.1 * healthy.iteration_time_s
    assert slow.iteration_time_s / healthy.iteration_time_s > rate["published"] / rate["observed"] / 3
    assert slow.breakdown.exposed_communication_s > 0.5 * slow.iteration_time_s


def tokens_per_s(machine: TopologySpec, plan: Any, mode: Any) -> float:
    """Of a GPU, for the 32 layers of Llama 7B: what 3 layers take and 29 times what 1 more adds."""
    three, four = (
        Predictor({**LLAMA_7B, "layers": n}, machine, mode=mode).predict(plan).iteration_time_s for n in (3, 4)
    )  # fmt: skip
    return 2 * 4096 / (three + 29 * (four - three))


def test_32_levels_of_the_same_code_on_healthy_clusters() -> None:
    rate = case(32)["tokens_per_s_per_gpu"]
    # PyTorch blog, "Maximizing training throughput using PyTorch FSDP" (2024-03-13), table 1: eager, 7B, batch 2, nothing
    # computed again: 3,700 on 128 A100 with 400 Gbit/s a host, 7,500 on 96 H100 with 800 Gbit/s. Issue 89 has 9,600 compiled.
    node = load_topology("dgx_h100").node
    nics = type(node.nics)
    slow = nics.model_validate({"count": 2, "kind": "roce", "bandwidth": "200 Gbit/s"})
    fast = nics.model_validate({"count": 4, "kind": "infiniband", "bandwidth": "200 Gbit/s"})
    a100 = with_node("dgx_a100_80gb_4nic", nics=slow).with_nodes(16)
    h100 = with_node("dgx_h100", nics=fast).with_nodes(12)
    hybrid = {"data_parallel": {"shard": "parameters"}, "fsdp": {"ranks": 8}}
    assert tokens_per_s(a100, "fsdp", "eager") == pytest.approx(3700, rel=0.05)
    # Outside on H100: 9,700 predicted. The blog calls its H100 figure low, with a gap of 10 % for the network.
    assert rate["published"] < tokens_per_s(h100, hybrid, "eager") < 1.35 * rate["published"]
    assert tokens_per_s(h100, hybrid, "compile") == pytest.approx(9600, rel=0.2)


def test_34_the_ledger_adds_up_and_answers_both_ceilings() -> None:
    told = case(34)
    assert told["busy_noncollective_s"] + told["exposed_collective_s"] == pytest.approx(told["step_s"], abs=0.01)
    # The model is not named: one block of a 7B model, fully recomputed, over 64 GPUs of one NVLink domain.
    machine = load_topology("gb200_nvl72").with_nodes(16)
    model = {**LLAMA_7B, "layers": 2, "vocab_size": 1000}
    predictor = Predictor(model, machine)
    found = predictor.predict("fsdp,recompute=full")
    ledger = found.breakdown
    spent = (
        ledger.compute_s + ledger.exposed_communication_s + ledger.exposed_copy_s + ledger.wait_s + ledger.host_bound_s
        + ledger.idle_s
    )  # fmt: skip
    assert spent == pytest.approx(found.iteration_time_s, rel=1e-6)
    kept = predictor.predict("fsdp")
    # Forward again costs a quarter of the FLOPs of forward, forward again and backward: 5.09 of 21.91 s of kernels there.
    share = 1.0 - kept.breakdown.compute_s / ledger.compute_s
    assert share == pytest.approx(told["recompute_s"] / 21.91, abs=0.06)


def test_36_a_small_dlrm_leaves_the_gpu_idle() -> None:
    given = case(36)
    tables = [{"name": f"t{i}", "rows": rows, "pooling_factor": given["pooling"]} for i, rows in enumerate(TERABYTE)]
    model = {
        "kind": "dlrm", "name": "terabyte", "batch_size": given["batch"], "dense_features": given["dense_features"],
        "bottom_mlp": given["bottom_mlp"][1:], "top_mlp": given["top_mlp"], "interaction": "dot",
        "embedding_dim": given["embedding_dim"], "tables": tables, "optimizer": "sgd", "sparse_optimizer": "sgd",
        "precision": "tf32",  # the thread is of September 2021: torch 1.7 to 1.11 multiply so on A100 unless told not to
    }  # fmt: skip
    found = Predictor(model, "a100_pcie_40gb").predict("ddp")
    busy = found.breakdown.compute_s / found.iteration_time_s
    assert found.breakdown.host_bound_s > found.breakdown.compute_s
    assert busy < 0.15  # the case's own bound; 7 to 8 % there
    assert 5e-3 < found.iteration_time_s < 10e-3  # 5, 7.9 and 10 ms, as three people quote
