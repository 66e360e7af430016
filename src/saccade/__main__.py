"""The command line, as `python -m saccade` or `torchrun -m saccade`."""

from saccade.cli.main import main

if __name__ == "__main__":
    main()
