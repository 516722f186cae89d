"""What is said about rows that were left out."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dspark_jax.rows import BadRow

SHOWN = 10


def show(bad: Sequence[BadRow]) -> None:
    """How many, and the first of them, on stderr."""
    if bad:
        print(f"dspark: warning: {len(bad)} {'row was' if len(bad) == 1 else 'rows were'} left out", file=sys.stderr)
    for row in bad[:SHOWN]:
        print(f"  line {row.line}: {' '.join(row.why.split())}", file=sys.stderr)
    if len(bad) > SHOWN:
        print(f"  and {len(bad) - SHOWN} more", file=sys.stderr)
