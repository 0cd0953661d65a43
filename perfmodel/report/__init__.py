"""Predictions as text, JSON and traces. Formatting only."""
