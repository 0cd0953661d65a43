"""Embedding-sharding plans: found, priced, ranked, explained.

A plan is an `EmbeddingPlan` with a `TablePlacement` for every table (`perfmodel.config`), whether a person wrote it, a search
found it or TorchRec made it: the same object that a plan file for `perfmodel predict` holds.

- `problem`: tables, ranks, memory and constraints of one question.
- `options`: the placements each table may have.
- `surrogate`: a separable cost for the search; `simulate`: the iteration time of the whole model.
- `search`, `greedy`, `anneal`, `exact`, `baselines`: finding plans.
- `rank`: simulated plans in order, with ranges and reasons.
"""
