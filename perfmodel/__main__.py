"""`python -m perfmodel`: the same as the `perfmodel` command."""

from perfmodel.cli import main

if __name__ == "__main__":
    main()
