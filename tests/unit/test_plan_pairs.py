"""Every pair of a plan's features is placed or refused with a reason, and docs/guides/plan_pairs.md says which.

`python tests/unit/test_plan_pairs.py` writes the page anew; the test fails where the page and the plan room differ.
"""

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from perfmodel.config import load_model, load_plan
from perfmodel.errors import ConfigError, InfeasiblePlanError
from perfmodel.extract import trace
from perfmodel.graph import Graph
from perfmodel.heap import uncollected
from perfmodel.models import build
from perfmodel.plan import RankDevice, place

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "plan_pairs.md"
RANK = RankDevice(device="a100_sxm_40gb", memory_bytes=40 * 2**30)
N = 8
COMMON = {
    "kind": "transformer", "batch_size": 8, "precision": "bf16", "optimizer": "adamw", "vocab_size": 64, "hidden_size": 32,
    "layers": 4, "heads": 4, "max_positions": 16, "attention": "sdpa",
}  # fmt: skip
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**COMMON, "name": "llama", "architecture": "llama", "kv_heads": 4, "ffn_size": 64},
    "mixtral": {
        **COMMON, "name": "mixtral", "architecture": "mixtral", "kv_heads": 4, "ffn_size": 64, "experts": 4,
        "experts_per_token": 2,
    },
    "dlrm": {
        "kind": "dlrm", "name": "dlrm", "batch_size": 8, "dense_features": 4, "bottom_mlp": [8, 4], "top_mlp": [4, 1],
        "embedding_dim": 4, "tables": [100] * 8,
    },
}  # fmt: skip


class Feature(NamedTuple):
    """Keys of a plan; `needs` are added where the other feature of a pair says nothing of them."""

    name: str
    keys: Mapping[str, Any]
    needs: Mapping[str, Any] = {}
    model: str = ""


def _shard(what: str) -> dict[str, Any]:
    return {"data_parallel": {"shard": what}}


def _stages(schedule: str, **more: Any) -> Feature:
    micro = {"micro_batches": 4}
    return Feature(f"pipeline {schedule}", {"mesh": {"pp": 2}, "pipeline": {"schedule": schedule, **more}}, micro)


FEATURES = (
    Feature("accumulation (no_sync)", {"accumulate": 2}),
    Feature("fp16 hook", {"data_parallel": {"compression": "fp16"}}),
    Feature("gradients as views", {"data_parallel": {"gradient_as_bucket_view": True}}),
    Feature("ZeRO 1", _shard("optimizer")),
    Feature("ZeRO 2", _shard("gradients")),
    Feature("FSDP2", {**_shard("parameters"), "fsdp": {"version": 2}}),
    Feature("FSDP1", {**_shard("parameters"), "fsdp": {"version": 1}}),
    Feature("FSDP not resharded", {"fsdp": {"reshard_after_forward": False}}, _shard("parameters")),
    Feature("FSDP scatter step", {"fsdp": {"scatter": "step"}}, _shard("parameters")),
    Feature("hybrid sharding", {"fsdp": {"ranks": 2}}, _shard("parameters")),
    Feature("CPU offload", {"data_parallel": {"offload": True}}, _shard("optimizer")),
    Feature("tensor", {"mesh": {"tp": 2}}),
    Feature("tensor + sequence", {"mesh": {"tp": 2}, "tensor_parallel": {"sequence": True}}),
    Feature("async_tp", {"mesh": {"tp": 2}, "tensor_parallel": {"async_tp": True, "sequence": True}}),
    Feature("context", {"mesh": {"cp": 2}}),
    Feature("experts", {"mesh": {"ep": 2}}, model="mixtral"),
    Feature("experts, capacity", {"mesh": {"ep": 2}, "expert_parallel": {"capacity_factor": 1.25}}, model="mixtral"),
    _stages("gpipe"),
    _stages("1f1b"),
    _stages("interleaved", chunks=2),
    _stages("zero_bubble"),
    _stages("zero_bubble_v"),
    Feature("uneven stages", {"mesh": {"pp": 2}, "pipeline": {"blocks": [3, 1]}}, {"micro_batches": 4}),
    Feature("recompute full", {"recompute": "full"}),
    Feature("recompute selective", {"recompute": "selective"}),
    Feature("recompute activation", {"recompute": "activation"}),
    Feature("tables on ranks", {"embeddings": {"strategy": "table_wise"}}, model="dlrm"),
)
# Keys that mean different things of one choice: two features that set one differently are one or the other.
OTHER = "-"


@cache
def graph(name: str) -> Graph:
    return trace(build(load_model(dict(MODELS[name]))))


def _joined(into: dict[str, Any], more: Mapping[str, Any], *, weak: bool = False) -> bool:
    """Adds keys; False where one is there with another value (of `weak` ones: those are left out)."""
    for key, value in more.items():
        if isinstance(value, Mapping):
            inner = into.setdefault(key, {})
            if not _joined(inner, value, weak=weak):
                return False
        elif key not in into:
            into[key] = value
        elif into[key] != value and not weak:
            return False
    return True


def verdict(one: Feature, two: Feature) -> str:
    """Empty: placed; `OTHER`: one or the other; else the reason."""
    plan: dict[str, Any] = {}
    models = {f.model for f in (one, two) if f.model} or {"llama"}
    if len(models) > 1 or not (_joined(plan, deepcopy(one.keys)) and _joined(plan, two.keys)):
        return OTHER
    if "accumulate" not in plan or one.name == two.name:
        for feature in (one, two):
            _joined(plan, feature.needs, weak=True)
    else:
        for feature in (one, two):
            _joined(plan, {k: v for k, v in feature.needs.items() if k != "micro_batches"}, weak=True)
    try:
        spec = load_plan(plan)
        source = graph(models.pop())
        from perfmodel.plan.recompute import recomputed

        place(recomputed(source, spec.recompute), spec, [RANK] * N)
    except (ConfigError, InfeasiblePlanError) as refusal:
        return str(refusal).removeprefix("plan (from Python): ").split("\n")[0]
    return ""


def page() -> str:
    reasons: dict[str, int] = {}
    rows = []
    with uncollected():
        found = {(a.name, b.name): verdict(a, b) for a, b in combinations(FEATURES, 2)}
    for number, feature in enumerate(FEATURES):
        cells = []
        for other in FEATURES[:number]:
            said = found[other.name, feature.name]
            if said in ("", OTHER):
                cells.append("yes" if not said else "")
            else:
                cells.append(str(reasons.setdefault(said, len(reasons) + 1)))
        rows.append(f"| {number + 1} {feature.name} | " + " | ".join([*cells, *[""] * (len(FEATURES) - number)]) + " |")
    head = "| | " + " | ".join(str(i + 1) for i in range(len(FEATURES))) + " |"
    line = "| --- |" + " --- |" * len(FEATURES)
    n_yes = sum(said == "" for said in found.values())
    n_no = sum(said not in ("", OTHER) for said in found.values())
    listed = "\n".join(f"{number}. {reason}" for reason, number in reasons.items())
    return f"""# Pairs of plan features

What goes together: `yes`, or the number of the reason below. Empty: two values of one choice. A pair is placed on {N} ranks
with a small Llama (experts: Mixtral; tables: DLRM); pipelines with four micro-batches.
{n_yes} pairs are placed, {n_no} refused.
`python tests/unit/test_plan_pairs.py` writes this page, and a test holds it to what plans do.

{head}
{line}
{chr(10).join(rows)}

## Reasons

{listed}
"""


def test_the_page_of_pairs_says_what_plans_do() -> None:
    assert PAGE.read_text() == page(), "run: python tests/unit/test_plan_pairs.py"


def test_every_feature_works_alone() -> None:
    assert {feature.name: verdict(feature, feature) for feature in FEATURES} == {f.name: "" for f in FEATURES}


if __name__ == "__main__":
    PAGE.write_text(page())
