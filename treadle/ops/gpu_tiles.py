"""How a GPU cuts matrix multiplication: which kernel of linear.cl, in what tiles, and in how many
parts of K.

The parts follow from the shape alone, as do the chains in which products are added up; tiles are
candidates, of which the fastest is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from treadle.graph.op import Gpu, blocks

# Products that are added one after another at most, so that long sums stay exact: a part of K.
CHAIN = 2048
# Shorter parts are made where there are fewer than GROUPS squares of SQUARE x SQUARE elements to
# keep a device busy, but none below PART.
GROUPS = 256
SQUARE = 64
PART = 128
# What a part is a multiple of.
PART_UNIT = 32


def parts_of_k(target: Gpu, m: int, n: int, k: int) -> tuple[int, int]:
    """(parts, depth): K is summed in so many parts of at most `depth` each."""
    squares = blocks(m, SQUARE) * blocks(n, SQUARE)
    wanted = blocks(k, CHAIN)
    if target.vector == 1:
        wanted = max(wanted, min(GROUPS // squares, k // PART))
    depth = max(1, blocks(blocks(k, wanted), PART_UNIT)) * PART_UNIT
    return blocks(k, depth), depth


@dataclass(frozen=True)
class Tile:
    """A work-group's rows and columns of y, the depth of its slices, and a work-item's share."""

    rows: int
    columns: int
    depth: int
    each: tuple[int, int]

    @property
    def items(self) -> int:
        return self.rows // self.each[0] * (self.columns // self.each[1])

    @property
    def local(self) -> int:
        """Bytes of local memory: two slices of each operand."""
        return 2 * self.depth * (self.rows + self.columns + 8) * 4

    def groups(self, m: int, n: int) -> int:
        return blocks(m, self.rows) * blocks(n, self.columns)

    def defines(self) -> tuple[tuple[str, int], ...]:
        values = (self.rows, self.columns, self.depth, *self.each)
        return tuple(zip(("BM", "BN", "BK", "TM", "TN"), values, strict=True))


# From the largest down, and from how many work-groups on each is the best guess.
TILES = (
    (Tile(128, 128, 8, (8, 8)), 100),
    (Tile(128, 64, 8, (8, 8)), 100),
    (Tile(64, 64, 8, (8, 8)), 64),
    (Tile(64, 64, 16, (4, 4)), 64),
    (Tile(32, 32, 16, (4, 4)), 0),
)
CANDIDATES = 4


def tiles(target: Gpu, m: int, n: int, parts: int) -> list[Tile]:
    """Tiles to try, the best guess first."""
    fitting = [
        (tile, tile.groups(m, n) * parts >= least)
        for tile, least in TILES
        if tile.items <= target.group and tile.local <= target.local
    ]
    busy = [tile for tile, enough in fitting if enough]
    larger = [tile for tile, enough in fitting if not enough]
    return busy[:CANDIDATES] if len(busy) > 1 else busy + larger[-1:]


# ---------------------------------------------------------------- few rows

# Products of so few rows, compiled for a power of two of them, read B where it lies. On a GPU LANES
# work-items of a group share a column of B [N, K], or its whole group but for OWNERS the columns of
# B [K, N], four to each; on a processor a work-group has FEW_COLUMNS columns.
FEW_ROWS = 8
FEW_ITEMS, LANES, OWNERS = 256, 16, 8
FEW_COLUMNS = 64


@dataclass(frozen=True)
class Few:
    """rows: at most, a power of two.  columns: of a work-group."""

    rows: int
    items: int
    lanes: int
    columns: int


def few(target: Gpu, m: int, transpose_a: bool, transpose_b: bool) -> Few | None:
    """The cut of a product of few rows; None of others."""
    if m > FEW_ROWS or transpose_a:
        return None
    rows = 1 << (m - 1).bit_length()
    if target.vector > 1:
        return Few(rows, 1, 1, FEW_COLUMNS)
    items = target.items(FEW_ITEMS)
    if transpose_b:
        return Few(rows, items, LANES, items // LANES)
    return Few(rows, items, items // OWNERS, OWNERS * 4)


# ---------------------------------------------------------------- processors

# The vector kernel's panels of A have so many rows for each length of a vector (its registers are
# twice as many, and the two of B), those of B two vectors; it packs PACK_BLOCK of K at a time.
PANEL_ROWS = {4: 6, 8: 6, 16: 12}
PACK_BLOCK = 256
# Rows that a work-group computes with one panel of B, fewer where there would be too few groups.
STRIP_ROWS = 96
STRIP_GROUPS = 32


@dataclass(frozen=True)
class Panels:
    """A processor's cut: `vector` floats of a register, `rows` of a panel of A, `columns` of one
    of B, and strips of `strip` panels of A."""

    vector: int
    rows: int
    columns: int
    strip: int


def vector_length(target: Gpu) -> int:
    """A processor's, of those that kernels are written for."""
    return max(v for v in PANEL_ROWS if v <= max(target.vector, min(PANEL_ROWS)))


def panels(target: Gpu, m: int, n: int) -> Panels:
    vector = vector_length(target)
    rows, columns = PANEL_ROWS[vector], 2 * vector
    high, across = blocks(m, rows), blocks(n, columns)
    strips = max(blocks(high, STRIP_ROWS // rows), min(high, STRIP_GROUPS // across))
    return Panels(vector, rows, columns, blocks(high, strips))
