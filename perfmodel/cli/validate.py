"""`perfmodel validate`: predicted against measured, on a suite of published cases or on this machine."""

from __future__ import annotations

import sys
from dataclasses import replace
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click

from perfmodel.cli.console import OUT_FILE
from perfmodel.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from perfmodel.api import RunOptions
    from perfmodel.db.device import Pace
    from perfmodel.pipeline.prediction import Prediction
    from perfmodel.validate.live import LiveSettings
    from perfmodel.validate.live_cases import LiveCase
    from perfmodel.validate.run_suite import CaseResult
    from perfmodel.validate.suite import Case


@click.command(
    epilog="Examples: perfmodel validate transformers_gpu --max-error 0.1; perfmodel validate --live --ranks 2"
)
@click.argument("suite", required=False)
@click.option("--live", is_flag=True, help="Train models on this machine instead, and compare with those times.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="With --live: what trains: this machine's processor, or its GPUs.",
)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="With --live: processes joined by gloo, or by NCCL on GPUs.",
)
@click.option("--sharding", is_flag=True, help="With --live: rank plans of random DLRMs before training them.")
@click.option(
    "--state",
    type=click.Path(dir_okay=False),
    help="With --sharding: keeps finished models; those in it are not trained again.",
)
@click.option("--plans", is_flag=True, help="With --live: parallel plans of transformers on 2 and 4 processes.")
@click.option("--memory", is_flag=True, help="With --live --plans: compare peak memory in place of time.")
@click.option("--cases", default="*", show_default=True, help="Only cases whose name matches (* and ? are wildcards).")
@click.option(
    "--attribute", is_flag=True, help="With --live or --trace: rank operators by their share of each case's error."
)
@click.option(
    "--trace",
    "traces",
    multiple=True,
    type=click.Path(dir_okay=False),
    help="With --attribute and a SUITE: Kineto trace of the one case that --cases leaves; may be repeated (ranks).",
)
@click.option(
    "--max-error",
    type=click.FloatRange(min=0),
    help="Exit 1 if the mean |predicted / measured - 1| is above this (0.1 is 10 %).",
)
@click.option("--db", type=click.Path(), help="Device database to use instead of the shipped one.")
@click.option("--html", "html_path", type=OUT_FILE, help="Also write a page with plots, causes and the same figures.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
@click.option("--markdown", is_flag=True, help="Print Markdown instead of the table.")
def validate(
    suite: str | None,
    max_error: float | None,
    db: str | None,
    *,
    as_json: bool,
    markdown: bool,
    html_path: Path | None,
    **options: object,
) -> None:
    """Predict every case of SUITE (a shipped name or a CSV file) and compare with what was measured.

    Exit code 1 if a case cannot be predicted or the mean error is above --max-error.
    """
    from perfmodel.report.validation import render_markdown, render_validation, validation_json
    from perfmodel.validate.run_suite import score_suite

    _check_options(suite, options, html_path)
    if options["sharding"]:
        _live_sharding({**options, "as_json": as_json, "markdown": markdown}, db)
        return
    if options["memory"]:
        _live_memory({**options, "as_json": as_json, "markdown": markdown}, db)
        return
    if suite is None:
        name, results = _live_suite(options, db)
    else:
        name, results = _suite(suite, str(options["cases"]), db)
    if not results:
        raise ConfigError(f"--cases: no case matches {options['cases']!r}")
    score = score_suite(results)
    render = validation_json if as_json else render_markdown if markdown else render_validation
    click.echo(render(name, results, score).rstrip("\n"))
    if suite is not None and options["attribute"]:
        _attribute_trace(results, options["traces"], db)
    if html_path is not None:
        from perfmodel.report.validation_page import render_validation_page
        from perfmodel.report.write import write_text

        write_text(html_path, render_validation_page(name, results, score))
    if not score.passes(max_error):
        sys.exit(1)


def _check_options(suite: str | None, options: dict[str, object], html_path: Path | None) -> None:
    """Raises ConfigError where options do not go together."""
    if (suite is None) != bool(options["live"]):
        raise ConfigError("validate: needs a SUITE or --live, one of them")
    if options["sharding"] and html_path is not None:
        raise ConfigError("--html: goes without --sharding")
    if options["plans"] and not options["live"]:
        raise ConfigError("--plans: goes with --live")
    if options["memory"] and (not options["plans"] or options["attribute"] or html_path is not None):
        raise ConfigError("--memory: goes with --live --plans, without --attribute and --html")
    if bool(options["traces"]) != bool(options["attribute"] and suite):
        raise ConfigError("--trace: goes with --attribute and a SUITE, all three together")


def _live_suite(options: dict[str, object], db: str | None) -> tuple[str, Sequence[CaseResult]]:
    if options["device"] == "cuda":
        return _live_gpus(options, db)
    return _live_plans(options, db) if options["plans"] else _live(options, db)


def _live_gpus(options: dict[str, object], db: str | None) -> tuple[str, Sequence[CaseResult]]:
    """Trains and predicts the live cases on this machine's GPUs."""
    from perfmodel.api import predict
    from perfmodel.validate.live import LiveSettings, run_live
    from perfmodel.validate.live_cases import live_cases
    from perfmodel.validate.live_cuda import find_gpus, gpu_topology, measure_gpu_case

    if options["plans"] or options["attribute"]:
        raise ConfigError(
            "--device cuda: goes without --plans and --attribute; `perfmodel trace` explains a GPU's steps"
        )
    n_ranks = int(str(options["ranks"]))
    gpus = find_gpus(db)
    topology = gpu_topology(gpus, n_ranks)
    _calibrated(gpus.device, db)
    results = run_live(
        [case for case in live_cases(n_ranks) if fnmatch(case.name, str(options["cases"]))],
        LiveSettings(n_ranks=n_ranks, n_threads=1, topology=topology.name),
        lambda case: predict(case.model, topology, case.plan, bounds=False, db=db),
        lambda words: click.echo(words, err=True),
        measure_gpu_case,
    )
    return f"live {gpus.device}, {n_ranks} ranks", results


def _suite(suite: str, pattern: str, db: str | None) -> tuple[str, Sequence[CaseResult]]:
    from perfmodel.validate.run_suite import run_suite
    from perfmodel.validate.suite import load_suite

    loaded = load_suite(suite)
    cases = [case for case in loaded.cases if fnmatch(case.name, pattern)]
    return loaded.name, run_suite(cases, lambda case: predict_case(case, db))


def _attribute_trace(results: Sequence[CaseResult], traces: object, db: str | None) -> None:
    """Device time by operator of the one case, predicted and in traces of its run; to stderr beside the table."""
    from perfmodel.api import predict_run
    from perfmodel.report.validation import render_gaps
    from perfmodel.traces.ranks import load_job
    from perfmodel.utilisation.op_gaps import op_gaps
    from perfmodel.validate.notes import as_noted

    if len(results) != 1:
        raise ConfigError(
            f"--attribute: found {len(results)} cases, allowed the one that was traced (name it with --cases)"
        )
    case = results[0].case
    run = predict_run(as_noted(case.model, case.note)[0], case.topology, case.plan, **case_options(case, db))
    gaps = op_gaps(run, load_job([Path(str(path)) for path in traces] if isinstance(traces, tuple) else []))
    click.echo(render_gaps(f"{case.name}, device time", gaps), err=True)


def case_options(case: Case, db: str | None) -> RunOptions:
    """How a case is predicted. It was measured, so it fits: no case is refused for want of memory."""
    return {
        "db": db,
        "batch": case.batch_per_rank,
        "seq_len": case.seq_len,
        "precision": case.precision,
        "phase": case.phase,
        "mode": case.mode,
        "bounds": False,
        "check_memory": False,
    }


def predict_case(case: Case, db: str | None = None) -> Prediction:
    """The prediction of one case of a suite."""
    from perfmodel.api import predict
    from perfmodel.validate.notes import as_noted

    model, remark = as_noted(case.model, case.note)
    prediction = predict(model, case.topology, case.plan, **case_options(case, db))
    return replace(prediction, notes=(*prediction.notes, remark)) if remark else prediction


def _live(options: dict[str, object], db: str | None) -> tuple[str, Sequence[CaseResult]]:
    """Trains and predicts the live cases on this machine; progress and attributions go to stderr and stdout."""
    from perfmodel.api import predict
    from perfmodel.validate.live import live_settings, live_topology, run_live
    from perfmodel.validate.live_cases import live_cases

    n_ranks = int(str(options["ranks"]))
    settings = live_settings(_calibrated(str(options["device"]), db), n_ranks)
    topology = live_topology(n_ranks)
    cases = [case for case in live_cases(n_ranks) if fnmatch(case.name, str(options["cases"]))]

    def run(look: Callable[[], None] | None = None) -> tuple[CaseResult, ...]:
        return run_live(
            cases,
            settings,
            lambda case: predict(case.model, topology, case.plan, bounds=False, db=db),
            lambda words: click.echo(words, err=True),
            look=look,
        )

    results = run() if n_ranks > 1 else _at_this_pace(run, cases, settings, db)
    if options["attribute"]:
        _attribute(cases, settings, db)
    return f"live {options['device']}, {n_ranks} ranks of {settings.n_threads} threads", results


def _at_this_pace(
    run: Callable[[Callable[[], None]], tuple[CaseResult, ...]],
    cases: Sequence[LiveCase],
    settings: LiveSettings,
    db: str | None,
) -> tuple[CaseResult, ...]:
    """One process's results at the pace that kernels of the calibration show meanwhile, which is printed to stderr.

    The pace's spread over the looks is in the ranges.
    """
    from perfmodel.api import predict
    from perfmodel.db import load_device
    from perfmodel.report.live_pace import render_pace
    from perfmodel.validate.live import live_topology, predicted_again, with_pace_range
    from perfmodel.validate.run_suite import score_suite

    with import_module("calibrate.pace").looking(load_device("cpu", db), settings.n_threads, db) as looks:
        plain = run(looks.look)
    pace, spread, named = looks.pace(), looks.spread(), {case.name: case for case in cases}

    def at(pace: Pace) -> tuple[CaseResult, ...]:
        machine = live_topology(1, pace)
        return predicted_again(
            plain, lambda name: predict(named[name].model, machine, named[name].plan, bounds=False, db=db)
        )

    fast, slow = (replace(pace, **{resource: ends[end] for resource, ends in spread.items()}) for end in (0, 1))
    results = with_pace_range(at(pace), at(fast), at(slow))
    click.echo(render_pace(pace, spread, score_suite(plain)), err=True)
    return results


def _live_sharding(options: dict[str, object], db: str | None) -> None:
    """Ranks random DLRMs' plans by prediction, trains them all, and prints how well the ranking held."""
    from perfmodel.api import predict
    from perfmodel.report.live_ranking import render_ranking
    from perfmodel.validate.live import live_settings, live_topology
    from perfmodel.validate.live_sharding import add_score, measure_subject, random_subjects, read_scores, score_subject

    if not options["live"] or options["plans"] or options["attribute"] or options["device"] != "cpu":
        raise ConfigError("--sharding: goes with --live on the CPU, without --plans and --attribute")
    cores = _calibrated(str(options["device"]), db)
    state = None if options["state"] is None else str(options["state"])
    known = {} if state is None else read_scores(state)
    scores = []
    for subject in random_subjects():
        if not fnmatch(subject.name, str(options["cases"])):
            continue
        if subject.name in known:
            scores.append(known[subject.name])
            continue
        topology = live_topology(subject.n_ranks)
        predicted = [
            predict(subject.model, topology, plan, bounds=False, db=db).iteration_time_s
            for plan in subject.plan_files()
        ]
        blocks = measure_subject(subject, live_settings(cores, subject.n_ranks).n_threads)
        scores.append(score_subject(subject, predicted, blocks))
        if state is not None:
            add_score(state, scores[-1])
        click.echo(f"{subject.name}: {len(blocks)} plans ranked and trained", err=True)
    if not scores:
        raise ConfigError(f"--cases: no case matches {options['cases']!r}")
    click.echo(
        render_ranking(scores, markdown=bool(options["markdown"]), as_json=bool(options["as_json"])).rstrip("\n")
    )


def _live_plans(options: dict[str, object], db: str | None) -> tuple[str, Sequence[CaseResult]]:
    """Trains and predicts transformers under parallel plans, on 2 processes, then on 4."""
    from perfmodel.api import predict
    from perfmodel.validate.live import live_settings, live_topology, run_live
    from perfmodel.validate.live_plans import RANKS, measure_plan, plan_cases

    if options["ranks"] != 1:
        raise ConfigError("--plans: goes without --ranks; its cases run on 2 and 4 processes")
    n_cores = _calibrated(str(options["device"]), db)
    results: list[CaseResult] = []
    for n_ranks in RANKS:
        topology, settings = live_topology(n_ranks), live_settings(n_cores, n_ranks)
        cases = [case for case in plan_cases(n_ranks) if fnmatch(case.name, str(options["cases"]))]
        results += run_live(
            cases,
            settings,
            lambda case, on=topology: predict(case.model, on, case.plan, bounds=False, db=db),  # type: ignore[misc]
            lambda words, n=n_ranks: click.echo(f"{n} ranks: {words}", err=True),  # type: ignore[misc]
            measure_plan,
        )
        if options["attribute"]:
            _attribute(cases, settings, db)
    return f"live {options['device']}, parallel plans", results


def _live_memory(options: dict[str, object], db: str | None) -> None:
    """Trains each plan for three steps and prints its peak of live bytes beside the prediction's."""
    from perfmodel.api import predict
    from perfmodel.report.live_memory import render_peaks
    from perfmodel.validate.live import live_settings, live_topology
    from perfmodel.validate.live_memory import compare_peaks
    from perfmodel.validate.live_plans import RANKS, plan_cases

    if options["ranks"] != 1 or options["device"] != "cpu":
        raise ConfigError("--memory: goes without --ranks, on the CPU")
    n_cores = _calibrated("cpu", db)
    gaps = []
    for n_ranks in RANKS:
        topology = live_topology(n_ranks)
        cases = [case for case in plan_cases(n_ranks) if fnmatch(case.name, str(options["cases"]))]
        predicted = [predict(case.model, topology, case.plan, bounds=False, db=db) for case in cases]
        gaps += compare_peaks(cases, live_settings(n_cores, n_ranks), predicted)
    if not gaps:
        raise ConfigError(f"--cases: no case matches {options['cases']!r}")
    click.echo(render_peaks(gaps, markdown=bool(options["markdown"]), as_json=bool(options["as_json"])).rstrip("\n"))


def _attribute(cases: Sequence[LiveCase], settings: LiveSettings, db: str | None) -> None:
    from perfmodel.api import predict_run
    from perfmodel.report.validation import render_gaps
    from perfmodel.validate.attribute import attribute
    from perfmodel.validate.attribute_ranks import Trained, attribute_ranks
    from perfmodel.validate.live import live_topology, table_owners

    topology = live_topology(settings.n_ranks)
    for case in cases:
        run = predict_run(case.model, topology, case.plan, bounds=False, db=db)
        if settings.n_ranks == 1:
            rows = attribute(run, case.model, settings)
        else:
            owners = table_owners(run.prediction)
            rows = attribute_ranks(run, Trained(model=case.model, owners=owners, plan=case.plan), settings)
        click.echo(render_gaps(case.name, rows))


def _calibrated(name: str, db: str | None) -> int:
    """Cores of the device, which is calibrated first if it has no fits yet."""
    from perfmodel.db import load_device

    device = load_device(name, db)
    if not device.fits:
        from perfmodel.cli.calibrate import kernels

        click.echo(f"{name} has no calibration yet: measuring it first", err=True)
        kernels.main(args=["--device", name, *(["--out", db] if db else [])], standalone_mode=False)
        device = load_device(name, db)
    return device.n_sms
