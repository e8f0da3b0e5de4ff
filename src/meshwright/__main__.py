"""`python -m meshwright`: the same as the `meshwright` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
