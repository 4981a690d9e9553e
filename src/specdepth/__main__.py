"""`python -m specdepth`: the same as the `specdepth` command."""

import sys

from specdepth.agents.cli import main

if __name__ == "__main__":
    sys.exit(main())
