"""The plans to choose from, as values of plan keys; every combination that makes a plan for the machine is a candidate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from perfmodel.config import PlanSpec, load_plan
from perfmodel.config.plan import BUILT_IN, MESH_DIMS, is_plan_key, plan_keys
from perfmodel.config.plan_fsdp import Fsdp
from perfmodel.errors import ConfigError, InfeasiblePlanError, suggest
from perfmodel.plan.mesh import mesh_of

MICRO_BATCH = "micro_batch"  # samples of one pass through the model; no key of a plan, but chosen like one
GLOBAL_BATCH = "global_batch"
Value = str | int | float | bool | None
FSDP_KEYS = (
    "reshard_after_forward", "backward_prefetch", "forward_prefetch", *(f"fsdp.{name}" for name in Fsdp.model_fields),
)  # fmt: skip

# Keys that do nothing unless the ranks are divided along a mesh dimension: without it they are left out of a plan.
_NEEDS: Mapping[str, str] = {
    **dict.fromkeys(("sequence", "vocabulary_parallel", "async_tp"), "tp"),
    **dict.fromkeys(("schedule", "chunks", "group_size"), "pp"),
    "imbalance": "ep",
    **dict.fromkeys(
        ("shard", "reduce", "bucket_cap", "first_bucket", "compression", "gradient_as_bucket_view"), "replicas"
    ),
    **dict.fromkeys(("offload", *FSDP_KEYS), "replicas"),
}
# And keys that do nothing, or are refused, with other values of `shard`.
_NEEDS_SHARD: Mapping[str, tuple[Value, ...]] = {
    "compression": (None, "nothing"),
    "offload": ("optimizer", "gradients", "parameters"),
    **dict.fromkeys(FSDP_KEYS, ("parameters",)),
}
MAX_STAGES = 16  # of the default space: deeper pipelines are for models beyond it
DEFAULT_MICRO_BATCHES = (1, 2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan as inline text, and the samples of one pass through the model on a replica."""

    plan: str
    micro_batch: int

    @property
    def label(self) -> str:
        """Both in one line."""
        return f"{self.plan} micro_batch={self.micro_batch}"

    def spec(self) -> PlanSpec:
        """The plan."""
        return load_plan(self.plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Values to combine.

    Attributes:
        keys: plan key as in inline plans (`tp`, `shard`, `data_parallel.bucket_cap`, ...) or `micro_batch` -> values;
            None leaves the key out.
        global_batch: samples of an iteration over all replicas, the same for every candidate.
        base: name of the plan that the keys change.
    """

    keys: Mapping[str, Sequence[Value]]
    global_batch: int
    base: str = "ddp"

    @property
    def n_combinations(self) -> int:
        """Combinations of values, those that make no plan among them."""
        count = 1
        for values in self.keys.values():
            count *= len(values)
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A combination that is no plan, or a plan that does not work on the machine, and why in one line."""

    label: str
    reason: str


def check_space(space: Space) -> Space:
    """The space, if its keys and batch make sense. Raises ConfigError with one line for each mistake."""
    problems = []
    for key, values in space.keys.items():
        if key != MICRO_BATCH and not is_plan_key(key):
            known = (*plan_keys(), MICRO_BATCH)
            problems.append(f"space: found key {key!r}, allowed {', '.join(known)}{suggest(key, known)}")
        if key in ("accumulate", "micro_batches", "dp"):
            problems.append(
                f"space: {key}: follows from {GLOBAL_BATCH}, {MICRO_BATCH} and the other mesh dimensions; drop it"
            )
        if not values:
            problems.append(f"space: {key}: found no values, allowed one or more")
    wrong = [v for v in space.keys.get(MICRO_BATCH, ()) if not isinstance(v, int) or isinstance(v, bool) or v < 1]
    problems += [f"space: {MICRO_BATCH}: found {value!r}, allowed a whole number from 1" for value in wrong]
    if space.global_batch < 1:
        problems.append(f"space: {GLOBAL_BATCH}: found {space.global_batch}, allowed 1 or more")
    if problems:
        raise ConfigError(problems)
    return space


def candidates(space: Space, n_ranks: int) -> Iterator[Candidate | Refused]:
    """Every distinct candidate for `n_ranks` ranks in a fixed order, and what was refused. Raises as `check_space`."""
    check_space(space)
    seen: set[Candidate] = set()
    for values in product(*space.keys.values()):
        found = _candidate(space, dict(zip(space.keys, values, strict=True)), n_ranks)
        if isinstance(found, Refused):
            yield found
        elif found not in seen:
            seen.add(found)
            yield found


def _candidate(space: Space, chosen: dict[str, Value], n_ranks: int) -> Candidate | Refused:
    micro = chosen.pop(MICRO_BATCH, 1)
    micro_batch = int(micro or 1)
    text = _text(space.base, chosen)
    try:
        mesh = mesh_of(load_plan(_text(space.base, {k: v for k, v in chosen.items() if k in MESH_DIMS})).mesh, n_ranks)
        replicas = mesh.size("dp", "ep")
        chosen = _that_matter(space, chosen, {**mesh.sizes, "replicas": mesh.size("dp", "ep", "cp")})
        if space.global_batch % (replicas * micro_batch):
            reason = f"{replicas} replicas of {micro_batch} samples do not divide the global batch {space.global_batch}"
            return Refused(label=f"{text} micro_batch={micro_batch}", reason=reason)
        chosen["accumulate"] = space.global_batch // (replicas * micro_batch)
        plan = _text(space.base, chosen)
        load_plan(plan)
    except (ConfigError, InfeasiblePlanError) as error:
        return Refused(label=f"{text} micro_batch={micro_batch}", reason=_one_line(error))
    return Candidate(plan=plan, micro_batch=micro_batch)


def _that_matter(space: Space, chosen: Mapping[str, Value], sizes: Mapping[str, int]) -> dict[str, Value]:
    """The keys that change anything on a mesh of such sizes, and with the way that states are divided."""
    kept = {key: value for key, value in chosen.items() if key not in _NEEDS or sizes.get(_NEEDS[key], 1) > 1}
    base = BUILT_IN.get(space.base, {}).get("data_parallel", {}).get("shard", "nothing")
    shard = kept.get("shard") or base
    return {key: value for key, value in kept.items() if key not in _NEEDS_SHARD or shard in _NEEDS_SHARD[key]}


def _text(base: str, chosen: Mapping[str, Value]) -> str:
    words = [base]
    for key, value in chosen.items():
        if value is None or (key in MESH_DIMS and value == 1) or (key == "accumulate" and value == 1):
            continue
        words.append(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
    return ",".join(words)


def _one_line(error: Exception) -> str:
    lines = getattr(error, "problems", (str(error),))
    first = str(lines[0])
    return " ".join((first.partition("': ")[2] if first.startswith("plan '") else first).split())


def default_space(
    n_ranks: int, ranks_per_host: int, global_batch: int, *, recompute: bool = True, experts: int = 1
) -> Space:
    """What is usually tried: tensor parallel inside a host, stages across, states divided or not, recomputation or not.

    `experts` of a layer are shared out inside a host, too.
    """
    keys: dict[str, Sequence[Value]] = {
        "tp": _powers(ranks_per_host),
        "pp": _powers(min(MAX_STAGES, n_ranks)),
        "shard": ("nothing", "optimizer", "parameters"),
        "sequence": (True,),
        MICRO_BATCH: DEFAULT_MICRO_BATCHES,
    }
    if experts > 1:
        keys["ep"] = tuple(size for size in _powers(ranks_per_host) if experts % size == 0)
    if recompute:
        keys["recompute"] = (None, "full")
    return Space(keys=keys, global_batch=global_batch)


def _powers(largest: int) -> tuple[int, ...]:
    return tuple(1 << i for i in range(largest.bit_length()))
