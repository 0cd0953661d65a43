"""Predicted against measured: scores of the shipped fits on measured kernels and collectives."""
