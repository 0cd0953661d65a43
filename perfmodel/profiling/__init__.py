"""Runs a user's training script under the PyTorch profiler for a few steady steps, without changing the script."""
