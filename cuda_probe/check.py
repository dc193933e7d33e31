"""Open and close one window of the probe and print what came of it as JSON. Run as a child process."""

from __future__ import annotations

import json
import sys

from lanterne.cuda_probe.abi import Kinds, Probe, Status


def main(library: str) -> int:
    """Print one JSON object; exit 0 whatever the status is."""
    try:
        probe = Probe(library)
    except OSError as error:
        sys.stdout.write(
            json.dumps({"status": "error", "collecting": False, "reason": f"{error}; run: lanterne probe build"}) + "\n"
        )
        return 0
    status = probe.open(Kinds.KERNELS)
    answer = {
        "status": status.word,
        "collecting": status is Status.COLLECTING,
        "reason": probe.reason,
        "cupti_version": probe.cupti_version,
        "clock_error_ns": probe.clock[1],
    }
    probe.close()
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
