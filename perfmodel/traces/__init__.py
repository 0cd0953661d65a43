"""Traces of real runs, read and replayed."""
