"""Optuna proposes plans, perfmodel answers: a tuner that needs no GPU. `pip install 'perfmodel[optuna]'`, then run it.

Every trial is a plan for GPT-2 large on two DGX A100; what does not fit or divide is pruned with the reason as Optuna sees it.
"""

from __future__ import annotations

import optuna

from perfmodel import InfeasiblePlanError, Predictor

GLOBAL_BATCH = 128
RANKS = 16
PREDICTOR = Predictor("gpt2_large", "dgx_a100_x2")


def seconds_a_sample(trial: optuna.Trial) -> float:
    """What Optuna minimises: predicted seconds of an iteration, over its samples."""
    tp = trial.suggest_categorical("tp", [1, 2, 4])
    pp = trial.suggest_categorical("pp", [1, 2, 4])
    micro = trial.suggest_categorical("micro_batch", [1, 2, 4])
    shard = trial.suggest_categorical("shard", ["nothing", "optimizer", "parameters"])
    accumulate = GLOBAL_BATCH * tp * pp // (RANKS * micro)
    plan = f"tp={tp},pp={pp},shard={shard},accumulate={accumulate}"
    try:
        prediction = PREDICTOR.predict(plan, batch=micro)
    except InfeasiblePlanError as error:
        trial.set_user_attr("refused", str(error))
        raise optuna.TrialPruned from error
    trial.set_user_attr("plan", plan)
    return 1.0 / prediction.samples_per_s


def main(n_trials: int = 40) -> optuna.Study:
    """Runs the study and says what it found."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(seconds_a_sample, n_trials=n_trials)
    best = study.best_trial
    print(
        f"{best.user_attrs['plan']} with micro-batches of {best.params['micro_batch']}: {1 / best.value:.4g} samples/s"
    )
    return study


if __name__ == "__main__":
    main()
