"""``python -m lanterne.collector.native``: compile core and collective tap ahead of time and print where they lie."""

from __future__ import annotations

import sys

from lanterne.collector import core
from lanterne.collector.native import TapUnavailable, build

if __name__ == "__main__":
    failed = False
    for make in (core.build, build):
        try:
            sys.stdout.write(f"{make()}\n")
        except TapUnavailable as unavailable:
            sys.stderr.write(f"{unavailable}\n")
            failed = True
    sys.exit(failed)
