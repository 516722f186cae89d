"""``python -m dspark_jax …`` is the command ``dspark …``."""

import sys

from dspark_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
