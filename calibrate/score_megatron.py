"""Predicts the measured Megatron-DeepSpeed runs of `megatron_a100_{single,multi}_node.csv` and scores the predictions.

Nothing is fitted on these rows. Run conditions are those of the source's configuration files: fp16, full recomputation,
1F1B, one gradient reduction after backward, NVSwitch inside a node of 8, 800 Gbit/s between nodes.

    python -m calibrate.score_megatron --data DIR [--every N] [--state done.jsonl] [--out rows.csv]

All 1,073 rows take 10 minutes of one core; with `--state` a run that was stopped goes on where it was.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from scipy.stats import kendalltau

from perfmodel.api import as_topology, extract_graph
from perfmodel.config import PlanSpec, load_plan
from perfmodel.errors import InfeasiblePlanError
from perfmodel.graph import Graph
from perfmodel.pipeline.run import PriceBooks, predict_graph
from perfmodel.pipeline.settings import RunSettings
from perfmodel.topology import Topology

TOKENS = 50257  # GPT-2's; the source's model gives each tensor-parallel rank a part of them, rounded down
VOCABULARY = 51200  # the same, padded as Megatron-LM pads them for up to 8 tensor-parallel ranks
NODE = "dgx_a100_80gb_4nic"
PARTS = Path(__file__).parents[1] / "configs" / "suites" / "topologies"
GPUS_PER_NODE = 8
MILLI = 1e-3
SETTINGS = RunSettings(bounds=False)
LEAST_PASSES = 1  # beyond 2 p + this many micro-batches a pipeline goes on at an even pace: 6 give the same to 1e-12
STEP = 2
LEAST_ERROR = 1e-4  # counted in the geometric mean for smaller ones


def is_composed(row: Mapping[str, str]) -> bool:
    """Whether the row's time was put together by the source's simulator: all rows of one node (docs/accuracy.md)."""
    return int(row["num_gpus"]) <= GPUS_PER_NODE


def model_of(row: Mapping[str, str]) -> dict[str, Any]:
    """The model of a row, with one micro-batch: Megatron-LM's, or where the row is composed that of the source's profiles."""
    adam: dict[str, Any] = {"name": "adam", "implementation": "fused"}
    if is_composed(row):
        changes = {
            "implementation": "vtrain", "optimizer": adam, "vocab_size": TOKENS // int(row["tp"]), "tied_embeddings": False
        }  # fmt: skip
    else:
        changes = {
            "implementation": "megatron", "optimizer": {**adam, "main_parameters": True}, "vocab_size": VOCABULARY
        }  # fmt: skip
    return changes | {
        "kind": "transformer", "name": f"gpt_{row['hidden_size']}_{row['num_layers']}", "architecture": "gpt2",
        "batch_size": int(row["micro_batch"]), "precision": "bf16",
        "hidden_size": int(row["hidden_size"]), "layers": int(row["num_layers"]), "heads": int(row["num_heads"]),
        "max_positions": int(row["seq_len"]), "hidden_dropout": 0.1, "attention_dropout": 0.1, "embedding_dropout": 0.1,
        "attention": "eager", "gradient_checkpointing": True,
    }  # fmt: skip


@cache
def graph_of(items: tuple[tuple[str, Any], ...]) -> Graph:
    """The graph of a model given as sorted items."""
    model = {key: dict(value) if isinstance(value, tuple) else value for key, value in items}
    return extract_graph(model)


@cache
def machine(n_gpus: int) -> Topology:
    """Part of a node, or whole nodes."""
    if n_gpus >= GPUS_PER_NODE:
        return as_topology(NODE, n_gpus // GPUS_PER_NODE)
    return as_topology(str(PARTS / f"dgx_a100_80gb_{n_gpus}gpu.yaml"))


def plan_of(row: Mapping[str, str], n_micro: int) -> PlanSpec:
    """The plan of a row with some number of micro-batches."""
    mesh = ",".join(f"{dim}={row[dim]}" for dim in ("pp", "dp", "tp"))
    vocabulary = "tensor_parallel.vocabulary_parallel=false" if is_composed(row) else "pipeline.scatter_gather=true"
    return load_plan(f"{mesh},accumulate={n_micro},reduce=after_backward,pipeline.host_sync=true,{vocabulary}")


def predict_row(row: Mapping[str, str], books: PriceBooks) -> float:
    """Iteration time (s). Long schedules are simulated up to where their pace is even, and continued at it."""
    n_micro = int(row["global_batch"]) // int(row["dp"]) // int(row["micro_batch"])
    model = model_of(row)
    graph = graph_of(tuple((k, tuple(v.items()) if isinstance(v, dict) else v) for k, v in sorted(model.items())))
    topology = machine(int(row["num_gpus"]))

    def time_s(n: int) -> float:
        return predict_graph(
            graph, plan_of(row, n), topology, settings=SETTINGS, books=books
        ).prediction.iteration_time_s

    enough = 2 * int(row["pp"]) + LEAST_PASSES
    if n_micro <= enough + STEP:
        return time_s(n_micro)
    first, second = time_s(enough), time_s(enough + STEP)
    return second + (n_micro - enough - STEP) * (second - first) / STEP


def scored(rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    """Rows with `predicted_s` and `error`, or `refused`."""
    books = PriceBooks()
    ordered = sorted(rows, key=lambda r: (r["hidden_size"], r["num_layers"], r["micro_batch"], r["tp"], r["pp"]))
    for row in ordered:
        measured_s = float(row["measured_ms_per_iter"]) * MILLI
        try:
            predicted_s = predict_row(row, books)
        except InfeasiblePlanError as error:
            yield {**row, "refused": str(error)}
            continue
        yield {**row, "measured_s": measured_s, "predicted_s": predicted_s, "error": predicted_s / measured_s - 1}


def resumed(rows: Sequence[Mapping[str, str]], state: Path | None) -> Iterator[dict[str, Any]]:
    """`scored`, with what a state file has already taken from it and the rest written to it, a line a row."""
    known: dict[tuple[str, ...], dict[str, Any]] = {}
    if state is not None and state.exists():
        for line in state.read_text(encoding="utf-8").splitlines():
            result = json.loads(line)
            known[tuple(str(result.get(name, "")) for name in rows[0])] = result
    yield from (known[key] for key in map(_key, rows) if key in known)
    for result in scored([row for row in rows if _key(row) not in known]):
        if state is not None:
            with state.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
        yield result


def _key(row: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(row.values())


def main() -> None:
    """Scores both files."""
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="only every N-th row")
    parser.add_argument("--only", choices=("single", "multi"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--state", type=Path, help="rows done, to go on from; new ones are added")
    options = parser.parse_args()
    for name in ("single", "multi") if options.only is None else (options.only,):
        with (options.data / f"megatron_a100_{name}_node.csv").open() as file:
            rows = list(csv.DictReader(file))[:: options.every]
        found = []
        for result in resumed(rows, options.state):
            found.append(result)
            sys.stderr.write(".")
        sys.stderr.write("\n")
        good = [r for r in found if "error" in r]
        mean = sum(abs(r["error"]) for r in good) / len(good)
        tau = kendalltau([r["measured_s"] for r in good], [r["predicted_s"] for r in good]).statistic
        geometric = math.exp(sum(math.log(max(abs(r["error"]), LEAST_ERROR)) for r in good) / len(good))
        signed = sum(r["error"] for r in good) / len(good)
        sys.stdout.write(
            f"{name}: {len(good)} rows, mean |error| {mean:.2%}, geometric mean {geometric:.2%}, "
            f"mean error {signed:+.2%}, Kendall tau {tau:.3f}, "
            f"refused {len(found) - len(good)}\n"
        )
        for result in found:
            if "refused" in result:
                sys.stdout.write(f"  refused tp{result['tp']} pp{result['pp']}: {result['refused']}\n")
        if options.out is not None:
            path = options.out.with_stem(f"{options.out.stem}_{name}")
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=list(good[0]))
                writer.writeheader()
                writer.writerows(good)


if __name__ == "__main__":
    main()
