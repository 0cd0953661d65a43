"""How well each part of a machine is used, level by level, for traces and predictions alike (docs/utilisation.md)."""
