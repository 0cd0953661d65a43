"""YAML to frozen specs: the only room that sees raw mappings, YAML or pydantic.

`load_model`, `load_topology` and `load_plan` take a shipped name, a path or a mapping and raise ConfigError with one
line for each mistake.
"""

from perfmodel.config.dlrm import DlrmSpec
from perfmodel.config.entrypoint import EntrypointSpec
from perfmodel.config.loading import Source, find_config, list_configs, load_spec
from perfmodel.config.model import ModelSpec, load_model
from perfmodel.config.plan import PlanSpec, load_plan
from perfmodel.config.topology import TopologySpec
from perfmodel.config.transformer import TransformerSpec
from perfmodel.config.vision import VisionSpec

__all__ = [
    "DlrmSpec",
    "EntrypointSpec",
    "ModelSpec",
    "PlanSpec",
    "TopologySpec",
    "TransformerSpec",
    "VisionSpec",
    "find_config",
    "list_configs",
    "load_model",
    "load_plan",
    "load_topology",
]


def load_topology(source: Source) -> TopologySpec:
    """The machine in a shipped config, a YAML file or a mapping. Raises ConfigError with one line for each mistake."""
    return load_spec("topologies", source, TopologySpec)
