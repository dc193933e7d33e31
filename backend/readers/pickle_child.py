"""A process of its own that reads pickles of plain containers quickly: frames of bytes in, marshalled values out.

Names are refused, so nothing can be imported or called; what is left is memory, and that is limited by the kernel
(``RLIMIT_AS``): a pickle that asks for more ends this process and nobody else's. Run by
:mod:`lanterne.backend.readers.plain_pickle` as ``python -I``; standard library only.
"""

import io
import marshal
import pickle
import resource
import struct
import sys

MEMORY_BYTES = 4 << 30
SECONDS = 120


class Plain(pickle.Unpickler):
    """The C machine without names."""

    def find_class(self, module_name: str, global_name: str) -> None:
        raise pickle.UnpicklingError("names something")


def main() -> None:
    """Answer each frame (length, pickle) with 1 and a frame, or with 0 when it is not plain."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while head := source.read(8):
        (size,) = struct.unpack("<Q", head)
        try:
            answer = marshal.dumps(Plain(io.BytesIO(source.read(size))).load())
        except Exception:  # any trouble: the slow machine says what and where
            sink.write(b"\0")
        else:
            sink.write(b"\1" + struct.pack("<Q", len(answer)) + answer)
        sink.flush()


if __name__ == "__main__":
    main()
