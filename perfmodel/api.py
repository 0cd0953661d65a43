"""What autotuners, scripts and notebooks call. Typed and stable; nothing here imports torch until a model must be traced."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, cast

from perfmodel.config import ModelSpec, PlanSpec, TopologySpec, load_model, load_plan, load_topology
from perfmodel.config.entrypoint import EntrypointSpec
from perfmodel.config.foreign import HuggingFaceSpec
from perfmodel.config.loading import Source
from perfmodel.config.training import InputCopies
from perfmodel.db import load_device
from perfmodel.errors import ConfigError, UnknownOpError
from perfmodel.graph import Graph
from perfmodel.pipeline.loader import Loader
from perfmodel.pipeline.prediction import Prediction
from perfmodel.pipeline.run import Evaluation, PriceBooks, Run, evaluate_graph, evaluation_of, predict_graph
from perfmodel.pipeline.settings import Mode, RunSettings, check_settings
from perfmodel.plan.facts import facts_of
from perfmodel.sim.warm import WARMING
from perfmodel.topology import Topology, build_topology
from perfmodel.units import format_percent

if TYPE_CHECKING:
    from torch import nn

Values = Literal["meta", "real"]
Target = Literal["cuda", "cpu"]
Span = Literal["train", "forward_backward", "forward"]
Machine = Source | TopologySpec | Topology
RUNS_TO_WARM_UP = 3  # a Predictor asked so often is worth loading the compiled simulator loops beside it
CALIBRATED = ("measured", "fitted", "derived")  # sources that `strict` accepts


class ModelOptions(TypedDict, total=False):
    """How a model is extracted.

    Attributes:
        batch, precision, seq_len, optimizer: replace the model file's values (samples per rank; `fp32`, `tf32`,
            `amp_fp16`, `amp_bf16`, `bf16`, `fp16`; tokens; `sgd`, `adagrad`, `adam`, `adamw`).
        values: `meta` (default) reads no tensor value; `real` runs the model on CPU with the given (or drawn) inputs.
        inputs, loss: of a module of your own: the tuple or dict it is called with, and a function from its output to a
            scalar (needed unless the output is one or has `.loss`).
        phase: what one iteration is: `train` (default); `forward_backward`, all but the optimizer, adding to the
            gradients of the step before; `forward`, a pass in evaluation mode. In the last two inputs are on the device.
        no_cache: trace even if the same model was traced before.
    """

    batch: int | None
    precision: str | None
    seq_len: int | None
    optimizer: str | None
    values: Values
    inputs: Sequence[Any] | Mapping[str, Any] | None
    loss: Callable[[Any], Any] | None
    phase: Span
    no_cache: bool


class RunOptions(ModelOptions, total=False):
    """`ModelOptions`, and how a prediction is made.

    Attributes:
        nodes: number of nodes, instead of the topology's own.
        db: device database to use instead of the shipped one.
        strict: raise UnknownOpError if any price is not measured, fitted or derived from measurements.
        check: verify the simulated timeline against the simulator's rules before answering.
        mode, input_copies, what_if, bounds, overlap, jitter, stragglers, loader, check_memory, n_samples, seed: how the
            iteration is executed; see `RunSettings`.
    """

    nodes: int | None
    db: str | None
    strict: bool
    check: bool
    mode: Mode
    input_copies: InputCopies | None
    what_if: Sequence[str]
    bounds: bool
    overlap: bool
    jitter: Mapping[str, float]
    stragglers: Mapping[int, float]
    loader: Loader | None
    check_memory: bool
    n_samples: int
    seed: int


def predict(
    model: Source | nn.Module, topology: Machine, plan: Source | PlanSpec = "ddp", **options: Unpack[RunOptions]
) -> Prediction:
    """Predicts the training iteration time of a model on a machine.

    Args:
        model: shipped name, YAML file, Hugging Face config.json, mapping with the same keys, or a module of your own
            (then also `inputs=`, and `loss=` and `optimizer=` if it needs them).
        topology: shipped name, YAML file, mapping, spec or a built Topology.
        plan: shipped name, YAML file, mapping, or text such as `ddp,bucket_cap=50MiB` or `embeddings=table_wise`.
        **options: see `RunOptions`.

    Returns:
        The prediction; times in seconds, memory in bytes.

    Raises:
        ConfigError: files or arguments are wrong; one line for each mistake.
        GraphError: the model cannot be extracted; the message names its module and source line.
        InfeasiblePlanError: the plan does not fit the machine.
        MissingCalibrationError: a device of the topology is not in the database.
        UnknownOpError: with `strict`, part of the time is not calibrated.
    """
    return predict_run(model, topology, plan, **options).prediction


def predict_run(
    model: Source | nn.Module, topology: Machine, plan: Source | PlanSpec = "ddp", **options: Unpack[RunOptions]
) -> Run:
    """As `predict`, and returns the events, programs and timeline behind the prediction too."""
    db = options.pop("db", None)
    machine = as_topology(topology, options.pop("nodes", None))
    plan_spec = plan if isinstance(plan, PlanSpec) else load_plan(plan)
    strict, check = options.pop("strict", False), options.pop("check", False)
    settings = _settings(options)
    model_options = _model_options(options)
    batch = micro_batch(model, plan_spec, model_options)
    if batch is not None:
        model_options["batch"] = batch
    target = target_of(machine, db)
    graph = extract_graph(model, target=target, **model_options)

    def at(samples: int) -> Graph:
        options = model_options.copy()
        options["batch"] = samples
        return extract_graph(model, target=target, **options)

    _divides(model, graph, at)
    run = predict_graph(graph, plan_spec, machine, db=db, settings=settings)
    if check:
        _check(run)
    if strict:
        _require_calibrated(run.prediction)
    return run


class Predictor:
    """Predicts many plans, batch sizes and machines of one model; what did not change is neither traced nor priced again.

    Safe to share between threads, and to send to other processes. Equal questions have equal answers, whatever was asked
    before.

    Args:
        model: as in `predict`.
        topology: as in `predict`.
        **options: see `RunOptions`; `bounds` is off unless asked for.
    """

    def __init__(self, model: Source | nn.Module, topology: Machine, **options: Unpack[RunOptions]) -> None:
        self.topology = as_topology(topology, options.pop("nodes", None))
        self._model = model
        self._db = options.pop("db", None)
        self._strict = options.pop("strict", False)
        self._check = options.pop("check", False)
        options.setdefault("bounds", False)
        self._settings = _settings(options)
        self._options = _model_options(options)
        self._graphs: dict[tuple[int | None, Target], Graph] = {}
        self._targets: dict[str, Target] = {}
        self._books = PriceBooks()
        self._lock = Lock()
        self._n_runs = 0

    @property
    def settings(self) -> RunSettings:
        """How iterations are executed."""
        return self._settings

    def graph(self, batch: int | None = None, target: Target | None = None) -> Graph:
        """The execution graph at `batch` samples per rank (None: the model's own), extracted when first asked for.

        `target` is the kind of device it is for; None: the machine's.
        """
        key = (batch, target or self._target(self.topology))
        with self._lock:
            if key not in self._graphs:
                options = self._options.copy()
                if batch is not None:
                    options["batch"] = batch
                self._graphs[key] = extract_graph(self._model, target=key[1], **options)
            return self._graphs[key]

    def predict(
        self, plan: Source | PlanSpec = "ddp", *, batch: int | None = None, topology: Machine | None = None
    ) -> Prediction:
        """The prediction of one plan, at another batch size or on another machine if given. Raises as `predict`."""
        return self.run(plan, batch=batch, topology=topology).prediction

    def run(self, plan: Source | PlanSpec = "ddp", *, batch: int | None = None, topology: Machine | None = None) -> Run:
        """As `predict`, with the events, programs and timeline behind the prediction."""
        spec, machine, graph = self._subject(plan, batch, topology)
        self._n_runs += 1
        if self._n_runs >= RUNS_TO_WARM_UP:
            WARMING.go_on()
        target = self._target(machine)
        _divides(self._model, graph, lambda samples: self.graph(samples, target))
        run = predict_graph(graph, spec, machine, db=self._db, settings=self._settings, books=self._books)
        if self._check:
            _check(run)
        if self._strict:
            _require_calibrated(run.prediction)
        return run

    def evaluate(
        self, plan: Source | PlanSpec = "ddp", *, batch: int | None = None, topology: Machine | None = None
    ) -> Evaluation:
        """A plan's iteration time, where it goes, and the memory it needs, in a fraction of a prediction's time.

        The time is the prediction's own unless `is_exact` is False: then it is within 0.1 % of it. Raises as `predict`,
        without advice on plans that do not fit.
        """
        spec, machine, graph = self._subject(plan, batch, topology)
        found = evaluate_graph(graph, spec, machine, db=self._db, settings=self._settings, books=self._books)
        if found is not None:
            return found
        return evaluation_of(self.run(spec, batch=batch, topology=machine).prediction)

    def _subject(
        self, plan: Source | PlanSpec, batch: int | None, topology: Machine | None
    ) -> tuple[PlanSpec, Topology, Graph]:
        spec = plan if isinstance(plan, PlanSpec) else load_plan(plan)
        machine = self.topology if topology is None else as_topology(topology)
        options = self._options.copy()
        if batch is not None:
            options["batch"] = batch
        return spec, machine, self.graph(micro_batch(self._model, spec, options) or batch, self._target(machine))

    def _target(self, machine: Topology) -> Target:
        if machine.fingerprint not in self._targets:
            self._targets[machine.fingerprint] = target_of(machine, self._db)
        return self._targets[machine.fingerprint]

    def __getstate__(self) -> dict[str, Any]:
        """All but what is remembered of runs: a copy in another process finds that again."""
        return {**self.__dict__, "_books": None, "_lock": None, "_n_runs": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._books, self._lock = PriceBooks(), Lock()


def _divides(model: Source | nn.Module, graph: Graph, at: Callable[[int], Graph]) -> None:
    """Lets advice on a plan that does not fit try micro-batches of fewer samples; `at` gives the graph of so many.

    The batch of a module, or of a model from an entrypoint, is its own.
    """
    if facts_of(graph).smaller is not None or not isinstance(model, str | os.PathLike | Mapping):
        return
    spec = load_model(Path(model) if isinstance(model, os.PathLike) else model)
    if not isinstance(spec, EntrypointSpec):
        facts_of(graph).smaller = lambda parts: at(graph.batch_size // parts)


def as_topology(topology: Machine, nodes: int | None = None) -> Topology:
    """A built topology from anything that names one, with another number of nodes if given."""
    if isinstance(topology, Topology):
        return topology if nodes is None else build_topology(topology.spec.with_nodes(nodes))
    spec = topology if isinstance(topology, TopologySpec) else load_topology(topology)
    return build_topology(spec if nodes is None else spec.with_nodes(nodes))


def target_of(topology: Topology, db: str | None = None) -> Target:
    """The kind of device all ranks of a machine are. Raises ConfigError if it mixes kinds."""
    kinds = {load_device(name, db).kind for name in {place.device for place in topology.ranks}}
    if len(kinds) > 1:
        raise ConfigError(f"topology {topology.name}: mixes CPU and CUDA ranks, allowed one kind")
    return kinds.pop()


def micro_batch(model: Source | nn.Module, plan: PlanSpec, options: ModelOptions) -> int | None:
    """Samples of one micro-batch where a plan divides the model's batch; None where it does not.

    Raises ConfigError if the batch does not divide, or belongs to a module of your own.
    """
    if plan.micro_batches == 1:
        return None
    if not isinstance(model, str | os.PathLike | Mapping):
        raise ConfigError(
            f"micro_batches: found {plan.micro_batches} with a module of your own, whose inputs are not divided here; "
            "give it the inputs of one micro-batch and say accumulate instead"
        )
    batch = options.get("batch")
    if batch is None:
        spec = load_model(Path(model) if isinstance(model, os.PathLike) else model)
        if isinstance(spec, EntrypointSpec):
            raise ConfigError(
                "micro_batches: a model from an entrypoint has the batch that its code makes; use accumulate"
            )
        batch = spec.batch_size
    if batch % plan.micro_batches:
        raise ConfigError(f"micro_batches: found {plan.micro_batches} with batch {batch}, allowed a divisor of it")
    return batch // plan.micro_batches


def extract_graph(model: Source | nn.Module, *, target: Target = "cuda", **options: Unpack[ModelOptions]) -> Graph:
    """The execution graph of one training iteration of `model` (as in `predict`) as `target` would dispatch it.

    Raises ConfigError and GraphError as `predict` does.
    """
    values = options.get("values", "meta")
    span = options.get("phase", "train")
    inputs, loss = options.get("inputs"), options.get("loss")
    if isinstance(model, str | os.PathLike | Mapping):
        if inputs is not None or loss is not None:
            raise ConfigError("inputs= and loss= go with a module of your own; a model file says its own")
        source = Path(model) if isinstance(model, os.PathLike) else model
        spec = load_model(source, _overrides(options))
        return _extract_spec(spec, target, values, span, use_cache=not options.get("no_cache", False))
    from perfmodel.extract import trace
    from perfmodel.models import from_module

    if inputs is None:
        raise ConfigError("a module needs inputs=: the tuple or dict of tensors it is called with")
    if options.get("seq_len") is not None:
        raise ConfigError("seq_len= goes with a model file; a module's sequence length is that of its inputs")
    given: dict[str, Any] = {
        "precision": options.get("precision"), "optimizer": options.get("optimizer"), "batch_size": options.get("batch")
    }  # fmt: skip
    built = from_module(model, inputs, loss, **{key: value for key, value in given.items() if value is not None})
    return trace(built, target=target, values=values, span=span)


def _settings(options: RunOptions) -> RunSettings:
    """Takes what belongs to `RunSettings` out of the options. Raises ConfigError for values that do not exist."""
    given: dict[str, Any] = {}
    known: dict[str, Any] = cast(dict[str, Any], options)
    for name in RunSettings.__dataclass_fields__:
        if name in known:
            given[name] = known.pop(name)
    return check_settings(RunSettings(**given))


def _model_options(options: RunOptions) -> ModelOptions:
    known = {key: value for key, value in options.items() if key in ModelOptions.__annotations__}
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(f"unexpected keyword argument '{unknown[0]}'")
    return cast(ModelOptions, known)


def _overrides(options: ModelOptions) -> dict[str, Any]:
    """The options that replace keys of a model file, by the file's own names."""
    given = {
        "batch_size": options.get("batch"),
        "precision": options.get("precision"),
        "sequence_length": options.get("seq_len"),
        "optimizer": options.get("optimizer"),
    }
    return {key: value for key, value in given.items() if value is not None}


def _extract_spec(spec: ModelSpec, target: Target, values: Values, span: Span, *, use_cache: bool) -> Graph:
    """Traces a spec, or takes its graph from the cache; a hit imports no torch.

    A module of the user's own is always traced: its graph depends on code that we can't see all of.
    """
    from perfmodel.extract import cache

    def make() -> Graph:
        from perfmodel.extract import trace
        from perfmodel.models import build

        return trace(build(spec), target=target, values=values, span=span)

    if not use_cache or isinstance(spec, EntrypointSpec):
        return make()
    options: dict[str, Any] = {"target": target, "values": values, "span": span}
    if isinstance(spec, HuggingFaceSpec):
        options["transformers"] = version("transformers")
    key = cache.graph_key(spec.model_dump(mode="json"), options)
    return cache.cached(key, make)


def _check(run: Run) -> None:
    from perfmodel.sim.check import check_timeline

    broken = check_timeline(run.steady.timeline)
    if broken:
        raise RuntimeError(f"the simulated timeline breaks {len(broken)} of its rules; first: {broken[0]}")


def _require_calibrated(prediction: Prediction) -> None:
    wrong = {name: share for name, share in prediction.coverage.items() if name not in CALIBRATED}
    if wrong:
        shares = ", ".join(f"{name} {format_percent(share)}" for name, share in wrong.items())
        raise UnknownOpError(
            f"strict: part of the time is not calibrated ({shares}); calibrate the device or drop strict"
        )
