"""YAML to frozen specs: the only room that sees raw mappings, YAML or pydantic.

Modules: `loading` (find, read, validate), `quantity` (field types with units), `model`, `plan`, `topology`.
"""
