"""`python -m perfmodel.cli` is the same as `perfmodel`."""

from perfmodel.cli import main

main()
