"""``python -m lanterne.collector.native``: compile the collective tap ahead of time and print where it lies."""

from __future__ import annotations

import sys

from lanterne.collector.native import TapUnavailable, build

if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build()}\n")
    except TapUnavailable as unavailable:
        sys.stderr.write(f"{unavailable}\n")
        sys.exit(1)
