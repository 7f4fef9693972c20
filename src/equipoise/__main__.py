"""The command `python -m equipoise`."""

import os
import sys

# Python looks into the current folder first. It may be the folder of somebody else's run, in which
# no module and no plug-in is looked for before the user trusts it.
if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]

from equipoise.cli import main

if __name__ == "__main__":
    sys.exit(main())
