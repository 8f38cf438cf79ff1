"""`python -m routetrace.cli`: the `routetrace` command."""

from routetrace.cli import main

if __name__ == "__main__":
    main()
