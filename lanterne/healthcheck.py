"""``python -m lanterne.healthcheck URL``: exit 0 when the URL answers 200, else 1 with one line why. For containers."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request

TIMEOUT_S = 2.5


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 healthy, 1 not, 2 usage."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m lanterne.healthcheck URL\n")
        return 2
    try:
        with urllib.request.urlopen(arguments[0], timeout=TIMEOUT_S) as answer:
            return 0 if answer.status == 200 else 1
    except (urllib.error.URLError, OSError, ValueError) as error:
        sys.stderr.write(f"{arguments[0]}: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
