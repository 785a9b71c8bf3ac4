"""How matrix multiplication is cut into tasks: numbers that follow from the shape alone.

The kernels of `linear.c` take these as run-time sizes, so that one cut serves every instruction
set and the bits of a result never depend on the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

# Targets, in elements. A task's block of B (K_BLOCK x COLUMNS) and its partial sums
# (ROWS x COLUMNS) stay in the second-level cache while A's panels pass through the first.
K_BLOCK = 384
ROWS = 384
COLUMNS = 128
# Columns are dealt in units of the widest register tile.
COLUMN_UNIT = 32
# Up to this many tasks are made where each keeps enough multiply-adds to be worth dealing out.
TASKS = 32
TASK_WORK = 1 << 21
# Groups of rows stay larger than this, so that packing B for each of them is worth it. With more
# rows and several column blocks, A is packed once, beforehand.
FEW_ROWS = 48
# The tallest register tile: panels of A round up to at most this many rows more.
TILE_ROWS = 14
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Tiles:
    """The cut of C[M, N] = A[M, K] · B[K, N]: groups of rows by blocks of columns.

    packed_bytes: the temporary that `matmul_pack` fills, 0 when tasks pack A themselves.
    pack_tasks: the tasks of `matmul_pack`.  scratch_bytes: what each thread needs for `matmul`.
    """

    groups: int
    column_blocks: int
    k_blocks: int
    packed_bytes: int
    scratch_bytes: int

    @property
    def tasks(self) -> int:
        return self.groups * self.column_blocks

    @property
    def pack_tasks(self) -> int:
        return self.groups * self.k_blocks


def matmul_tiles(m: int, n: int, k: int) -> Tiles:
    """The cut for C[m, n] = A[m, k] · B[k, n]."""
    units = ceil(n / COLUMN_UNIT)
    groups, width = ceil(m / ROWS), COLUMNS // COLUMN_UNIT
    blocks = ceil(units / width)
    while groups * blocks < TASKS and m * n * k >= 2 * TASK_WORK * groups * blocks:
        if width > 1 and (n > COLUMNS or m <= 2 * FEW_ROWS):
            width -= 1
            blocks = ceil(units / width)
        elif m > 2 * FEW_ROWS * groups:
            groups += 1
        else:
            break
    k_blocks = max(1, ceil(k / K_BLOCK))
    rows = ceil(m / groups) + TILE_ROWS
    columns = ceil(units / blocks) * COLUMN_UNIT
    depth = ceil(k / k_blocks)
    packed = groups * rows * k if blocks > 1 and m > FEW_ROWS else 0
    scratch = depth * columns + rows * columns + (0 if packed else rows * depth)
    return Tiles(groups, blocks, k_blocks, packed * FLOAT_BYTES, scratch * FLOAT_BYTES)
