"""Live comparison of parallel plans: small transformers trained for real on 2 and 4 gloo ranks, as each plan says.

`validate --live --plans`. None of the models is used to calibrate anything.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from perfmodel.pipeline.prediction import Prediction
from perfmodel.validate.live import LiveSettings
from perfmodel.validate.live_cases import LiveCase
from perfmodel.validate.train import Timed, set_up, timed
from perfmodel.validate.train_plans import planned_step
from perfmodel.validate.train_ranks import agreed, in_gloo_group

RANKS = (2, 4)
_LLAMA: Mapping[str, Any] = {
    "kind": "transformer",
    "architecture": "llama",
    "vocab_size": 4000,
    "hidden_size": 256,
    "layers": 4,
    "heads": 4,
    "max_positions": 128,
    "attention": "eager",
    "optimizer": "adamw",
}
_GPT2: Mapping[str, Any] = {**_LLAMA, "architecture": "gpt2"}
_BERT: Mapping[str, Any] = {**_LLAMA, "architecture": "bert"}
_TORCH = "pipeline.deallocate_outputs=false"  # stages are torch.distributed.pipelining's, not Megatron's
_WIDE: Mapping[str, Any] = {**_LLAMA, "hidden_size": 512, "heads": 8, "layers": 2, "vocab_size": 2000}


def _case(name: str, plan: str, base: Mapping[str, Any], batch: int) -> LiveCase:
    return LiveCase(name=name, model={**base, "name": name, "batch_size": batch}, plan=plan)


def plan_cases(n_ranks: int) -> tuple[LiveCase, ...]:
    """The cases on 2 or 4 ranks: every kind of plan on two models at least."""
    n = n_ranks
    both = () if n < 4 else (_case(f"llama-b8-pp2-dp2-x{n}", f"pp=2,dp=2,micro_batches=4,{_TORCH}", _LLAMA, 8),)
    return (
        _case(f"gpt2-b4-ddp-x{n}", "ddp", _GPT2, 4),
        _case(f"bert-b4-ddp-views-x{n}", "ddp,gradient_as_bucket_view=true,bucket_cap=4MiB", _BERT, 4),
        _case(f"llama-b4-ddp-recompute-x{n}", "ddp,recompute=full", _LLAMA, 4),
        _case(f"gpt2-b2-ddp-no-sync-x{n}", "ddp,accumulate=3", _GPT2, 2),
        _case(f"gpt2-b4-zero1-x{n}", "shard=optimizer", _GPT2, 4),
        _case(f"llama-b4-fsdp-x{n}", "fsdp", _LLAMA, 4),
        _case(f"gpt2-b4-fsdp-kept-x{n}", "fsdp,reshard_after_forward=false", _GPT2, 4),
        _case(f"llama-h512-b4-fsdp-x{n}", "fsdp", _WIDE, 4),
        _case(f"bert-b4-fsdp-recompute-x{n}", "fsdp,recompute=full", _BERT, 4),
        _case(f"bert-b8-fsdp-x{n}", "fsdp", _BERT, 8),
        _case(f"llama-b8-tp-x{n}", f"tp={n},vocabulary_parallel=false", _LLAMA, 8),
        _case(f"llama-h512-b4-tp-x{n}", f"tp={n},vocabulary_parallel=false", _WIDE, 4),
        _case(f"llama-b8-pp-x{n}", f"pp={n},micro_batches=4,{_TORCH}", _LLAMA, 8),
        _case(f"llama-b8-gpipe-x{n}", f"pp={n},micro_batches=2,schedule=gpipe,{_TORCH}", _LLAMA, 8),
        _case(f"llama-b16-pp-m8-x{n}", f"pp={n},micro_batches=8,{_TORCH}", _LLAMA, 16),
        _case(f"llama-b16-gpipe-m8-x{n}", f"pp={n},micro_batches=8,schedule=gpipe,{_TORCH}", _LLAMA, 16),
        *both,
    )


def measure_plan(case: LiveCase, settings: LiveSettings, _prediction: Prediction, pool: Executor) -> float:
    """Median step time (s) of one block, of the slowest rank; `pool` has a process for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        given = (settings.n_ranks, str(Path(folder) / "store"), case, (settings.n_threads, settings.block_s))
        running = [pool.submit(run_planned_rank, rank, *given) for rank in range(settings.n_ranks)]
        return max(found.result().median_s for found in running)


def run_planned_rank(rank: int, n_ranks: int, store: str, case: LiveCase, settings: tuple[int, float]) -> Timed:
    """Trains one rank of a case; `settings`: its threads and seconds for one block of steps."""
    from torch import distributed

    n_threads, budget_s = settings
    set_up(n_threads)

    def work() -> Timed:
        step = planned_step(case.model, case.plan, rank, n_ranks)
        distributed.barrier()
        return timed(step, budget_s, agreed)

    return in_gloo_group(rank, n_ranks, store, work)
