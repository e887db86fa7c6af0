"""``python -m lowdiff``: the command line where its script is not on the path."""

from lowdiff.cli.app import main

if __name__ == "__main__":
    main()
