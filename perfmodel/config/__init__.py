"""YAML to frozen specs: the only room that sees raw mappings, YAML or pydantic.

`load_model`, `load_topology` and `load_plan` take a shipped name, a path or a mapping and raise ConfigError with one line
for each mistake.
"""

from perfmodel.config.dlrm import DlrmSpec
from perfmodel.config.entrypoint import EntrypointSpec
from perfmodel.config.loading import find_config, list_configs
from perfmodel.config.model import ModelSpec, load_model
from perfmodel.config.plan import PlanSpec, load_plan
from perfmodel.config.topology import TopologySpec, load_topology
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
