"""The command `python -m equipoise`."""

import sys

from equipoise.cli import main

if __name__ == "__main__":
    sys.exit(main())
