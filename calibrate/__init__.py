"""Measures devices and fits their laws: the only code that times anything on purpose."""
