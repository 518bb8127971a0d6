"""`python -m oscarkv`: the command line, where its script is not on the path."""

from oscarkv.cli import main

if __name__ == "__main__":
    main()
