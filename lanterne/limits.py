"""A limit on everything, in one file, with the relations between them checked on import."""

from __future__ import annotations

# collector
RING_RECORD_BYTES = 128
RING_RECORDS_DEFAULT = 1 << 14
RING_RECORDS_MIN = 1 << 10
RING_RECORDS_MAX = 1 << 20
SPOOL_BYTES_DEFAULT = 256 << 20
SPOOL_SEGMENT_BYTES = 4 << 20
EXPORT_BATCH_EVENTS = 2_048
EXPORT_BATCH_BYTES = 2 << 20
REPLY_BYTES_MAX = 64 << 10
HELD_TENSORS_MAX = 1_024
KERNEL_SPANS_MAX = 256
KERNEL_NAME_CHARS_MAX = 160
STACK_BYTES_MAX = 64 << 10
STDERR_TAIL_BYTES = 16 << 10

# wire (docs/security.md, input)
BODY_WIRE_BYTES_MAX = 16 << 20
BODY_INFLATED_BYTES_MAX = 64 << 20
ATTRIBUTES_MAX = 100
ATTRIBUTE_KEY_BYTES_MAX = 128
ATTRIBUTE_VALUE_BYTES_MAX = 4 << 10
BODY_TEXT_BYTES_MAX = 128 << 10
NESTING_MAX = 16
RECORDS_PER_BODY_MAX = 200_000
MAP_BYTES_PER_BODY_MAX = 64 << 20

# job shape
RANKS_MAX = 131_072
STEP_MAX = 1 << 53
JOBS_MAX = 100_000
SERIES_NAMES_PER_JOB_MAX = 10_000
ID_PATTERN = r"^[A-Za-z0-9._:-]{1,128}$"

# backend
QUEUE_BYTES_DEFAULT = 256 << 20
COMMIT_ROWS_MAX = 25_000
PAGE_ROWS_DEFAULT = 100
PAGE_ROWS_MAX = 1_000
PLOT_POINTS_MAX = 4_000
HEATMAP_CELLS_MAX = 128_000
GRID_CELLS_MAX = 16_000_000  # ranks x steps of one metric kept as an array for the plots; beyond, SQL by window
GRID_BYTES_MAX = 512 << 20  # of all such arrays; those asked for last stay
UPLOAD_BYTES_MAX = 1 << 30

# readers
READER_MEMORY_BYTES = 256 << 20
LINE_BYTES_MAX = 1 << 20

# commands
COMMAND_AGE_S_MAX = 900
LR_FACTOR_MIN, LR_FACTOR_MAX = 0.01, 2.0

if not RING_RECORDS_MIN <= RING_RECORDS_DEFAULT <= RING_RECORDS_MAX:
    raise AssertionError("ring: default outside its bounds")
if RING_RECORDS_DEFAULT & (RING_RECORDS_DEFAULT - 1):
    raise AssertionError("ring: the number of records is a power of two")
if SPOOL_SEGMENT_BYTES * 4 > SPOOL_BYTES_DEFAULT:
    raise AssertionError("spool: at least four segments must fit")
if not EXPORT_BATCH_BYTES <= BODY_WIRE_BYTES_MAX <= BODY_INFLATED_BYTES_MAX <= QUEUE_BYTES_DEFAULT:
    raise AssertionError("a batch fits a body, a body fits the queue")
if PAGE_ROWS_DEFAULT > PAGE_ROWS_MAX:
    raise AssertionError("page: default above maximum")
