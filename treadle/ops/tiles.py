"""How matrix multiplication is cut into tasks: numbers that follow from the shape alone.

The kernels of `linear.c` take these as run-time sizes, so that one cut serves every instruction
set and the bits of a result never depend on the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

# Bytes of K in a block, for each line: deep enough that partial sums cost little.
K_BYTES = 3072
# Lines of a task's own operand that are packed at a time, and stay in the second-level cache.
BLOCK_LINES = 128
# Columns are dealt in units of the widest register tile, rows not below two panels of it.
COLUMN_UNIT = 32
ROW_UNIT = 24
# An operand that tasks share and that is larger than this is read for more lines at a time.
LARGE_BYTES = 1 << 22
LARGE_LINES = 64
# Up to this many tasks are made where each keeps enough multiply-adds to be worth dealing out.
TASKS = 32
TASK_WORK = 1 << 21
# Products of so few rows read B where it lies (FEW_ROWS and FEW_COLUMNS of linear.c): a task reads
# long runs of memory, and that takes as long as so many multiply-adds an element.
FEW_ROWS = 8
FEW_COLUMNS = 512
STREAMED_TASKS = 16
STREAMED_COLUMNS = 96
STREAMED_WORK = 16
# An operand of so few lines is packed by each task for itself.
SMALL_LINES = 48
PACK_TASKS = 16
PACK_WORK = 1 << 14
# Rows that lie a multiple of so many bytes apart fall on the same sets of the first-level cache.
SAME_SETS = 4096
# The tallest register tile: panels of A round up to at most this many rows more.
TILE_ROWS = 14
UNIT_BYTES = 4
CACHE_LINE = 64 // UNIT_BYTES


@dataclass(frozen=True)
class Tiles:
    """The cut of C[M, N] = A[M, K] · B[K, N]: parts of its rows, or of its columns.

    blocks: of a part, each of which is packed at a time.
    packed_bytes: the temporary that `matmul_pack` fills with the operand that tasks share, 0 when
    each packs it for itself.  scratch_bytes: what each thread needs for `matmul`.
    """

    by_rows: bool
    tasks: int
    blocks: int
    k_blocks: int
    pack_tasks: int
    packed_bytes: int
    scratch_bytes: int


def reads_in_place(k: int, itemsize: int, strides: tuple[int, int]) -> bool:
    """Whether A's rows are read where they lie on every instruction set (in_place of panel.h)."""
    return strides[1] == 1 and itemsize == UNIT_BYTES and strides[0] * itemsize % SAME_SETS != 0


def matmul_tiles(m: int, n: int, k: int, itemsize: int, strides: tuple[int, int]) -> Tiles:
    """The cut for C[m, n] = A[m, k] · B[k, n] of `itemsize` bytes an element.

    strides: of A, in elements, along m and along k.
    """
    streamed = m <= FEW_ROWS
    by_rows = m > n and not streamed
    length, shared = (m, n) if by_rows else (n, m)
    if streamed:
        unit = STREAMED_COLUMNS
    elif shared * k * itemsize > LARGE_BYTES:
        unit = LARGE_LINES
    else:
        unit = ROW_UNIT if by_rows else COLUMN_UNIT
    work = max(m, STREAMED_WORK) * n * k
    most = STREAMED_TASKS if streamed else TASKS
    tasks = max(1, min(most, ceil(length / unit), work // TASK_WORK))
    k_blocks = max(1, ceil(k * itemsize / K_BYTES))
    depth = 2 * ceil(ceil(k / 2) / k_blocks)
    if streamed:
        scratch = FEW_ROWS * (2 * FEW_COLUMNS + depth)
        return Tiles(False, tasks, 1, k_blocks, 0, 0, scratch * UNIT_BYTES)
    blocks = max(1, ceil(length / (BLOCK_LINES * tasks)))
    columns = ceil(n / COLUMN_UNIT)
    if by_rows:
        own, across = ceil(m / (tasks * blocks)) + TILE_ROWS, columns * COLUMN_UNIT
    else:
        own, across = ceil(columns / (tasks * blocks)) * COLUMN_UNIT, m + TILE_ROWS
    panels = across * (k + 1)
    if not by_rows and reads_in_place(k, itemsize, strides):
        panels = 0
    packed = panels if tasks > 1 and shared > SMALL_LINES else 0
    pack_tasks = max(1, min(PACK_TASKS, shared * k // PACK_WORK)) if packed else 0
    sums = own * across if k_blocks > 1 else TILE_ROWS * COLUMN_UNIT
    scratch = own * depth + sums + panels - packed + 2 * CACHE_LINE
    return Tiles(
        by_rows, tasks, blocks, k_blocks, pack_tasks, packed * UNIT_BYTES, scratch * UNIT_BYTES
    )
