"""`python -m saccade`, and `torchrun -m saccade`: the command line."""

from saccade.cli.main import main

if __name__ == "__main__":
    main()
