"""``python -m rlplus``, the same as the command ``rlplus``."""

import sys

from rlplus.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
