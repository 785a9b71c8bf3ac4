"""Token and position embedding, and the choice of one position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from treadle.errors import DTypeError, GraphError
from treadle.graph.op import (
    BLOCK,
    EACH,
    Arg,
    Cost,
    Gpu,
    Launch,
    Node,
    Op,
    Target,
    Temp,
    blocks,
    expect,
    expect_float,
    expect_same,
    row_grid,
    suffixed,
    touched,
)
from treadle.graph.value import Spec, Value, wide

# Columns of the gradient that one task adds up, for all tokens: whatever the tokens are, every
# task has the same work.
GRAD_COLUMNS = 64
# Elements of the gradient that one task sets to zero.
CLEAR_BLOCK = 4 * BLOCK
# On a GPU, as in embedding.cl: positions that a work-group sorts, sorted runs that one pass merges,
# and sorted positions that are added up in a row.
SORTED, WAYS, SEGMENT = 1024, 8, 32
# Rows of a batch that PositionGrad adds up on a GPU before they join the sum.
POSITION_ROWS = 64


def _expect_int(op: str, what: str, spec: Spec) -> None:
    if spec.dtype != "int32":
        raise DTypeError(f"[{op}] expected {what} of int32, got {spec}")


def _known(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """Which tokens are in the vocabulary."""
    return (tokens >= 0) & (tokens < vocabulary)


@dataclass(frozen=True)
class Embedding(Op):
    """y[b, t] = wte[tokens[b, t]] + wpe[start[b] + t].

    tokens int32 [B, T]; wte [V, C]; wpe [P, C] with P ≥ T, or absent; start int32 [B], read at run
    time, or absent for zeros. y [B, T, C], of wte's dtype.
    A token outside 0 … V-1 reads nothing: its row of wte counts as zeros. A position outside
    0 … P-1 counts as the nearest one inside.
    """

    name: ClassVar[str] = "embedding"

    def infer(
        self, tokens: Spec, wte: Spec, wpe: Spec | None = None, start: Spec | None = None
    ) -> Sequence[Spec]:
        _expect_int("embedding", "tokens", tokens)
        expect_float("embedding", wte, wpe)
        expect(len(tokens.shape) == 2, "embedding", "tokens [B, T]", list(tokens.shape))
        expect(len(wte.shape) == 2 and wte.size > 0, "embedding", "wte [V, C]", list(wte.shape))
        if wpe is not None:
            time, channels = tokens.shape[1], wte.shape[1]
            expect(
                len(wpe.shape) == 2 and wpe.shape[1] == channels and wpe.shape[0] >= time,
                "embedding",
                f"wpe [P, {channels}] of at least {time} positions",
                list(wpe.shape),
                "shorten the windows or enlarge block_size",
            )
            expect_same("embedding", Spec((), wte.dtype), Spec((), wpe.dtype))
        if start is not None:
            _expect_int("embedding", "start", start)
            expect(wpe is not None, "embedding", "wpe beside start", "none")
            want = [tokens.shape[0]]
            expect(list(start.shape) == want, "embedding", f"start {want}", list(start.shape))
        return (Spec((*tokens.shape, wte.shape[1]), wte.dtype),)

    def reference(
        self,
        tokens: np.ndarray,
        wte: np.ndarray,
        wpe: np.ndarray | None = None,
        start: np.ndarray | None = None,
    ) -> Sequence[np.ndarray]:
        y = np.zeros((*tokens.shape, wte.shape[1]), wte.dtype)
        known = _known(tokens, wte.shape[0])
        y[known] = wte[tokens[known]]
        if wpe is None:
            return (y,)
        first = np.zeros(1, np.int64) if start is None else start
        positions = first[:, None] + np.arange(tokens.shape[1])
        return (y + wpe[np.clip(positions, 0, wpe.shape[0] - 1)],)

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        tokens, wte, wpe, start = (*node.inputs, None, None)[:4]
        (dy,) = dys
        if start is not None:
            raise GraphError("[embedding] has no gradient with start; train without a cache")
        graph = dy.graph
        dwte = dwpe = None
        if needs[1]:
            op = EmbeddingGrad(wte.shape[0])
            dwte = graph.apply(op, tokens, dy, name="embedding")[0]
        if wpe is not None and needs[2]:
            dwpe = graph.apply(PositionGrad(wpe.shape[0]), dy, name="position")[0]
        return (None, dwte, dwpe)[: len(node.inputs)]

    def cost(self, node: Node) -> Cost:
        y, wpe = node.outputs[0], node.inputs[2] if len(node.inputs) > 2 else None
        return Cost(0 if wpe is None else y.size, (2 if wpe is None else 3) * y.nbytes)

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        (tokens, wte, wpe, start), y = (*node.inputs, None, None)[:4], node.outputs[0]
        assert tokens is not None and wte is not None
        height = max(1, BLOCK // y.shape[2])
        rows = tokens.size
        if isinstance(target, Gpu):
            dims = [rows, *y.shape[1:], wte.shape[0], 0 if wpe is None else wpe.shape[0]]
            grid = row_grid(target, "embedding", [y.dtype], rows, y.shape[2])
            args = [y, tokens, wte, wpe, start]
            return [Launch("embedding_forward", args, 1, dims, grids=[grid])]
        return [
            Launch(
                suffixed("embedding_forward", y.dtype),
                [y, tokens, wte, wpe, start],
                1,
                [
                    *(rows, y.shape[1], y.shape[2], wte.shape[0], height),
                    0 if wpe is None else wpe.shape[0],
                ],
                tasks=blocks(rows, height),
            )
        ]


@dataclass(frozen=True)
class EmbeddingGrad(Op):
    """dwte[v] = Σ dy[b, t] over the positions where tokens[b, t] = v; plus into[v] where given.

    tokens int32 [B, T]; dy [B, T, C]; into [V, C], whose memory the result takes over where it
    can. dwte [V, C], float32 where dy is bfloat16. Positions are sorted by token and added in
    order, in groups of a fixed size. A token outside 0 … V-1 adds nothing.
    """

    vocabulary: int = 1
    name: ClassVar[str] = "embedding_grad"
    inplace: ClassVar[dict[int, tuple[int, ...]]] = {0: (2,)}

    def infer(self, tokens: Spec, dy: Spec, into: Spec | None = None) -> Sequence[Spec]:
        _expect_int(self.name, "tokens", tokens)
        expect_float(self.name, dy)
        expect(
            len(dy.shape) == 3 and dy.shape[:2] == tokens.shape,
            self.name,
            f"dy {[*tokens.shape, 'C']}",
            list(dy.shape),
        )
        dwte = Spec((self.vocabulary, dy.shape[2]), wide(dy.dtype))
        expect_same(self.name, dwte, into)
        return (dwte,)

    def reference(
        self, tokens: np.ndarray, dy: np.ndarray, into: np.ndarray | None = None
    ) -> Sequence[np.ndarray]:
        dwte = np.zeros((self.vocabulary, dy.shape[2]), dy.dtype)
        known = _known(tokens, self.vocabulary)
        np.add.at(dwte, tokens[known], dy[known])
        return (dwte if into is None else into + dwte,)

    def cost(self, node: Node) -> Cost:
        dy = node.inputs[1]
        assert dy is not None
        return Cost(dy.size, touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        (tokens, dy, into), dwte = (*node.inputs, None)[:3], node.outputs[0]
        assert tokens is not None and dy is not None
        rows, channels = tokens.size, dy.shape[2]
        if isinstance(target, Gpu):
            return self._grids(target, tokens, dy, into, dwte)
        order = Temp((rows + 1) * 4, "order")
        dims = [rows, channels, self.vocabulary]
        return [
            Launch(
                suffixed("embedding_sort", dy.dtype),
                [order, tokens],
                1,
                dims,
                scratch=rows * 4,
            ),
            Launch(
                suffixed("embedding_clear", dy.dtype),
                [dwte, into],
                1,
                [dwte.size, CLEAR_BLOCK],
                tasks=blocks(dwte.size, CLEAR_BLOCK),
            ),
            Launch(
                suffixed("embedding_backward", dy.dtype),
                [dwte, order, tokens, dy],
                1,
                [*dims, GRAD_COLUMNS],
                tasks=blocks(channels, GRAD_COLUMNS),
            ),
        ]

    def _grids(
        self, target: Gpu, tokens: Value, dy: Value, into: Value | None, dwte: Value
    ) -> list[Launch]:
        """Positions sorted by token, segments of them added up, then what crosses segments."""
        rows, channels, vocabulary = tokens.size, dy.shape[2], self.vocabulary
        segments = blocks(rows, SEGMENT)
        grid = row_grid(target, "embedding", [dy.dtype], segments, channels)
        sizes = dict(grid.defines)
        across = blocks(channels, int(sizes["VEC"]) * int(sizes["LANES"]))

        def launch(
            kernel: str, args: list[Arg], writes: int, dims: list[int], *groups: int
        ) -> Launch:
            return Launch(kernel, args, writes, dims, grids=[replace(grid, groups=groups)])

        def sorted_positions() -> list[Arg]:
            return [Temp(rows * 4, "keys"), Temp(rows * 4, "order")]

        found, width = sorted_positions(), SORTED
        sort = launch(
            "embedding_sort", [*found, tokens], 2, [rows, vocabulary], blocks(rows, SORTED)
        )
        launches = [sort]
        while width < rows:
            merged = sorted_positions()
            groups = blocks(rows, grid.items)
            launches.append(launch("embedding_merge", [*merged, *found], 2, [rows, width], groups))
            found, width = merged, width * WAYS
        keys, order = found
        heads, tails = (Temp(segments * channels * 4, name) for name in ("heads", "tails"))
        dims, clear = [rows, channels, vocabulary], blocks(dwte.size, EACH * grid.items)
        sums: list[Arg] = [dwte, heads, tails]
        launches += [
            launch("embedding_clear", [dwte, into], 1, [dwte.size], clear),
            launch(
                *("embedding_segments", [*sums, keys, order, dy], 3, dims),
                *(*grid.groups, across),
            ),
        ]
        if segments > 1:
            launches.append(launch("embedding_runs", [*sums, keys], 1, dims, segments - 1, across))
        return launches


@dataclass(frozen=True)
class PositionGrad(Op):
    """dwpe[t] = Σ dy[b, t] over b, in order; zeros for T ≤ t < P.

    dy [B, T, C]; dwpe [P, C], float32 where dy is bfloat16.
    """

    positions: int = 1
    name: ClassVar[str] = "position_grad"

    def infer(self, dy: Spec) -> Sequence[Spec]:
        expect_float(self.name, dy)
        expect(
            len(dy.shape) == 3 and dy.shape[1] <= self.positions,
            self.name,
            f"dy [B, T, C] with T at most {self.positions}",
            list(dy.shape),
        )
        return (Spec((self.positions, dy.shape[2]), wide(dy.dtype)),)

    def reference(self, dy: np.ndarray) -> Sequence[np.ndarray]:
        dwpe = np.zeros((self.positions, dy.shape[2]), dy.dtype)
        dwpe[: dy.shape[1]] = dy.sum(axis=0)
        return (dwpe,)

    def cost(self, node: Node) -> Cost:
        dy = node.inputs[0]
        assert dy is not None
        return Cost(dy.size, touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        dy, dwpe = node.inputs[0], node.outputs[0]
        assert dy is not None
        batch, time, channels = dy.shape
        if isinstance(target, Gpu):
            grid = row_grid(target, "embedding", [dy.dtype], self.positions, channels)
            dims = [batch, time, channels, self.positions, POSITION_ROWS]
            return [Launch("position_backward", [dwpe, dy], 1, dims, grids=[grid])]
        height = max(1, BLOCK // (batch * channels))
        return [
            Launch(
                suffixed("position_backward", dy.dtype),
                [dwpe, dy],
                1,
                [batch, time, channels, self.positions, height],
                tasks=blocks(self.positions, height),
            )
        ]


@dataclass(frozen=True)
class SelectRow(Op):
    """y[b] = x[b, index[b]]: x [B, T, C], index int32 [B] or, the same for all rows, of shape (),
    read at run time; y [B, C].

    An index outside 0 … T-1 counts as the nearest one inside.
    """

    name: ClassVar[str] = "select_row"

    def infer(self, x: Spec, index: Spec) -> Sequence[Spec]:
        expect_float("select_row", x)
        _expect_int("select_row", "an index", index)
        expect(len(x.shape) == 3 and x.shape[1] > 0, "select_row", "x [B, T, C]", list(x.shape))
        fits = index.shape in ((), x.shape[:1])
        expect(fits, "select_row", f"an index of shape () or {[x.shape[0]]}", list(index.shape))
        return (Spec((x.shape[0], x.shape[2]), x.dtype),)

    def reference(self, x: np.ndarray, index: np.ndarray) -> Sequence[np.ndarray]:
        return (x[np.arange(x.shape[0]), np.clip(index, 0, x.shape[1] - 1)],)

    def cost(self, node: Node) -> Cost:
        return Cost(0, 2 * node.outputs[0].nbytes)

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        x, index = node.inputs
        assert x is not None and index is not None
        if isinstance(target, Gpu):
            grid = row_grid(target, "embedding", [x.dtype], x.shape[0], x.shape[2])
            args, dims = [node.outputs[0], x, index], [*x.shape, len(index.shape)]
            return [Launch("select_row", args, 1, dims, grids=[grid])]
        return [
            Launch(
                suffixed("select_row", x.dtype),
                [node.outputs[0], x, index],
                1,
                [x.shape[1], x.shape[2], len(index.shape)],
                tasks=x.shape[0],
            )
        ]


def embedding(
    tokens: Value, wte: Value, wpe: Value | None = None, start: Value | None = None
) -> Value:
    """wte[token] + wpe[position]: tokens int32 [B, T], wte [V, C], wpe [P, C] or None → [B, T, C].

    start: int32 [B], the position of the first token of each row; 0 when None. No gradient with it.
    ShapeError when T exceeds P or shapes do not fit, DTypeError for tokens that are not int32.
    A token outside 0 … V-1 counts as a row of zeros; whoever supplies tokens validates them.
    """
    inputs = [v for v in (tokens, wte, wpe, start) if v is not None]
    return wte.graph.apply(Embedding(), *inputs)[0]


def select_row(x: Value, index: Value) -> Value:
    """x[b, index[b]]: x [B, T, C], index int32 [B] or of shape () → [B, C]; no gradient. See
    SelectRow."""
    return x.graph.apply(SelectRow(), x, index)[0]
