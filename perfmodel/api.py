"""What autotuners, scripts and notebooks call. Typed and stable; nothing here imports torch until a model must be traced.

>>> import perfmodel
>>> prediction = perfmodel.predict("dlrm_small", "dgx_a100")  # doctest: +SKIP
>>> prediction.iteration_time_s  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from perfmodel.config import PlanSpec, TopologySpec, load_model, load_plan, load_topology
from perfmodel.config.loading import Source
from perfmodel.db import load_device
from perfmodel.errors import ConfigError, UnknownOpError
from perfmodel.graph import Graph
from perfmodel.pipeline.run import Run, predict_graph
from perfmodel.pipeline.prediction import Prediction
from perfmodel.topology import Topology, build_topology

if TYPE_CHECKING:
    from torch import nn

Values = Literal["meta", "real"]
CALIBRATED = ("measured", "fitted", "derived")  # sources that --strict accepts


def predict(
    model: Source | nn.Module,
    topology: Source | TopologySpec | Topology,
    plan: Source | PlanSpec = "ddp",
    **options: Any,
) -> Prediction:
    """Predicts the training iteration time of a model on a machine.

    Args:
        model: shipped name, YAML file, Hugging Face config.json, mapping with the same keys, or a module of your own
            (then also `inputs=`, and `loss=`, `optimizer=` if it needs them).
        topology: shipped name, YAML file, mapping, spec or a built Topology.
        plan: shipped name, YAML file, mapping, or text such as `ddp,bucket_cap=50MiB` or `embeddings=table_wise`.
        **options: see `predict_run`.

    Returns:
        The prediction; times in seconds, memory in bytes.

    Raises:
        ConfigError: files or arguments are wrong; one line for each mistake.
        GraphError: the model cannot be extracted; the message names its module and source line.
        InfeasiblePlanError: the plan does not fit the machine.
    """
    return predict_run(model, topology, plan, **options).prediction


def predict_run(
    model: Source | nn.Module,
    topology: Source | TopologySpec | Topology,
    plan: Source | PlanSpec = "ddp",
    *,
    nodes: int | None = None,
    db: str | None = None,
    strict: bool = False,
    check: bool = False,
    **model_options: Any,
) -> Run:
    """As `predict`, and returns the events, programs and timeline too.

    Args:
        model, topology, plan: see `predict`.
        nodes: number of nodes, instead of the topology's own.
        db: device database to use instead of the shipped one.
        strict: raise UnknownOpError if any price is not measured, fitted or derived from measurements.
        check: verify the simulated timeline against its rules first.
        **model_options: see `extract_graph`.
    """
    machine = as_topology(topology, nodes)
    plan_spec = plan if isinstance(plan, PlanSpec) else load_plan(plan)
    kinds = {load_device(place.device, db).kind for place in machine.ranks}
    if len(kinds) > 1:
        raise ConfigError(f"topology {machine.name}: mixes CPU and CUDA ranks, allowed one kind")
    graph = extract_graph(model, target=kinds.pop(), **model_options)
    run = predict_graph(graph, plan_spec, machine, db=db)
    if check:
        from perfmodel.sim.check import check_timeline

        check_timeline(run.steady.timeline)
    if strict:
        _require_calibrated(run.prediction)
    return run


def as_topology(topology: Source | TopologySpec | Topology, nodes: int | None = None) -> Topology:
    """A built topology from anything that names one, with another number of nodes if given."""
    if isinstance(topology, Topology):
        if nodes is None:
            return topology
        topology = topology.spec
    spec = topology if isinstance(topology, TopologySpec) else load_topology(topology)
    return build_topology(spec if nodes is None else spec.with_nodes(nodes))


def extract_graph(
    model: Source | nn.Module,
    *,
    target: Literal["cuda", "cpu"] = "cuda",
    batch: int | None = None,
    precision: str | None = None,
    seq_len: int | None = None,
    values: Values = "meta",
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    loss: Callable[[Any], Any] | None = None,
    optimizer: str | None = None,
    no_cache: bool = False,
) -> Graph:
    """The execution graph of one training iteration.

    Args:
        model: as in `predict`.
        target: kind of device the ops are meant for.
        batch, precision, seq_len: replace the model file's values.
        values: `meta` reads no tensor value; `real` runs the model on CPU with the given (or drawn) inputs.
        inputs, loss, optimizer: of a module of your own: its arguments, a function from output to scalar loss, and the
            optimizer's name.
        no_cache: trace even if the same model was traced before.
    """
    overrides = {"batch_size": batch, "precision": precision, "sequence_length": seq_len, "optimizer": optimizer}
    given = {key: value for key, value in overrides.items() if value is not None}
    if isinstance(model, str | Mapping) or hasattr(model, "__fspath__"):
        if inputs is not None or loss is not None:
            raise ConfigError("inputs= and loss= go with a module of your own; a model file says its own")
        return _extract_spec(load_model(model, given), target=target, values=values, no_cache=no_cache)
    from perfmodel.extract import trace
    from perfmodel.models import from_module

    if inputs is None:
        raise ConfigError("a module needs inputs=: the tuple or dict of tensors it is called with")
    return trace(from_module(model, inputs, loss, **given), target=target, values=values)
