"""Causes of low utilisation: evidence, the change to make, and what a simulated run with that change gains."""
