"""``python -m pyrannc`` is the ``rannc`` command."""

import sys

from pyrannc.command import main

if __name__ == "__main__":
    sys.exit(main())
