"""The table of op cases: every op at odd sizes, for the tests and for `treadle check`.

Adding an op means adding a row. Each row is run against finite differences in float64 (when it
has a gradient), and on every backend and dtype against the float64 reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from treadle.graph.op import Cast, Fill, Op, Sum
from treadle.graph.value import Spec
from treadle.ops import elementwise, loss, norm, optim, random
from treadle.ops.attention import Attention, AttentionGrad
from treadle.ops.cached_attention import CachedAttention
from treadle.ops.classifier import (
    LinearCrossEntropy,
    LinearCrossEntropyInto,
    LinearCrossEntropyLoss,
)
from treadle.ops.embedding import Embedding, EmbeddingGrad, PositionGrad, SelectRow
from treadle.ops.linear import MatMul
from treadle.ops.rope import Rope

Maker = Callable[[np.random.Generator, Spec], np.ndarray]
FLOAT = "float"  # stands for the dtype under test in a row's specs
WIDE = "wide"  # stands for what stays exact beside it: float32 beside bfloat16


def normal(rng: np.random.Generator, spec: Spec) -> np.ndarray:
    """Standard normal numbers."""
    return rng.standard_normal(spec.shape)


def constant(value: float | Sequence[float]) -> Maker:
    """The same numbers every time, broadcast to the shape."""
    return lambda rng, spec: np.broadcast_to(np.asarray(value), spec.shape)


def integers(low: int, high: int) -> Maker:
    """Whole numbers from low to high - 1."""
    return lambda rng, spec: rng.integers(low, high, spec.shape)


def positive(rng: np.random.Generator, spec: Spec) -> np.ndarray:
    """Numbers between 0.1 and 2."""
    return rng.uniform(0.1, 2.0, spec.shape)


def spread(rng: np.random.Generator, spec: Spec) -> np.ndarray:
    """Numbers away from 0, for functions with a kink there."""
    x = rng.standard_normal(spec.shape) * 2
    return np.where(np.abs(x) < 0.1, 0.5, x)


@dataclass(frozen=True)
class Input:
    """An input of a row: shape, dtype (FLOAT or WIDE, or a dtype), and how to fill it."""

    shape: tuple[int, ...]
    dtype: str = FLOAT
    make: Maker = normal


@dataclass(frozen=True)
class Case:
    """One row. inputs: Input, a bare shape, or None where an optional input is absent.

    gradient: whether the op is differentiated in the gradient check. dtypes: those that the
    kernels take. prepare: computes dependent inputs (saved statistics) from the others, in
    float64: arrays in, arrays out.
    """

    op: Op
    inputs: Sequence[Input | tuple[int, ...] | None]
    gradient: bool = False
    dtypes: Sequence[str] = ("float32", "bfloat16")
    prepare: Callable[[list], list] | None = field(default=None)
    note: str = ""
    constants: Sequence[int] = ()  # float inputs that have no gradient: scalars, statistics
    outputs: Sequence[int] | None = None  # outputs that the loss is made of; all when None

    def differentiable(self, output: int) -> bool:
        """Whether the gradient check's loss uses this output."""
        return self.outputs is None or output in self.outputs

    @property
    def title(self) -> str:
        """What a table of results calls the row."""
        found = [i.shape if isinstance(i, Input) else i for i in self.inputs[:4]]
        shapes = "x".join("·" if s is None else str(list(s)).replace(" ", "") for s in found)
        attrs = ",".join(str(v) for v in self.op.attributes().values() if isinstance(v, str | bool))
        return f"{self.op.name}{f'({attrs})' if attrs else ''} {shapes}{self.note}"


ODD = (1, 31, 33, 123, 4099)


def _primitives() -> list[Case]:
    rows = [Case(Fill((n,), 0.5), [], dtypes=("float32",)) for n in ODD]
    rows += [Case(Cast("bfloat16"), [Input((n,), "float32")], dtypes=("float32",)) for n in ODD]
    rows += [Case(Cast("float32"), [(n,)], gradient=True) for n in ODD]
    rows += [Case(Sum(), [(n,)] * k, gradient=True) for n in ODD for k in (1, 2, 5)]
    return rows


def _elementwise() -> list[Case]:
    rows = []
    for n in ODD:
        for op in (elementwise.Add(), elementwise.Mul()):
            rows += [Case(op, [(n,), (n,)], gradient=True), Case(op, [(3, n), (n,)], gradient=True)]
            rows.append(Case(op, [(3, n), ()], gradient=True))
        rows.append(Case(elementwise.Scale(-1.5), [(n,)], gradient=True))
        rows.append(Case(elementwise.Reshape((n, 1)), [(n,)], gradient=True))
        rows.append(Case(elementwise.Broadcast((5, n)), [(n,)], gradient=True))
        for kind in elementwise.ACTIVATIONS:
            rows.append(
                Case(elementwise.Activation(kind), [Input((n,), make=spread)], gradient=True)
            )
            rows.append(Case(elementwise.ActivationGrad(kind), [(n,), Input((n,), make=spread)]))
            gate = Input((n,), make=spread)
            rows.append(Case(elementwise.Gated(kind), [gate, (n,)], gradient=True))
            rows.append(Case(elementwise.GatedGrad(kind), [(n,), gate, (n,)]))
        for cap in (0.5, 30.0):
            capped = Input((n,), make=lambda *a, cap=cap: cap * np.tanh(normal(*a)))
            rows.append(Case(elementwise.Softcap(cap), [(n,)], gradient=True, note=f" {cap}"))
            rows.append(Case(elementwise.SoftcapGrad(cap), [(n,), capped], note=f" {cap}"))
    for rows_, columns in ((1, 1), (31, 33), (123, 5), (300, 257), (4099, 2), (1, 4099), (65, 1)):
        total = elementwise.SumLeading((columns,), "float32")
        rows.append(Case(total, [(rows_, columns)], gradient=rows_ * columns < 5000))
    rows.append(Case(elementwise.SumLeading((), "float32"), [(33, 3)], gradient=True))
    return rows


def _linear() -> list[Case]:
    rows = []
    sizes = ((1, 1, 1), (1, 33, 31), (31, 1, 33), (33, 31, 1), (65, 123, 257), (123, 33, 530))
    for m, n, k in sizes:
        small = m * n * k < 40000
        bias = Input((n,), WIDE)
        mm = MatMul
        rows.append(Case(mm(), [(m, k), (k, n)], gradient=small))
        rows.append(Case(mm(), [(m, k), (k, n), bias], gradient=small))
        rows.append(Case(mm(transpose_b=True), [(m, k), (n, k), bias], gradient=small))
        rows.append(Case(mm(transpose_a=True), [(k, m), (k, n)], gradient=small))
        rows.append(Case(mm(), [(m, k), (k, n), bias, (m, n)]))
        rows.append(Case(mm(transpose_b=True), [(m, k), (n, k), None, (m, n)]))
        rows.append(Case(mm(transpose_a=True, dtype="float32"), [(k, m), (k, n)]))
        for kind in elementwise.ACTIVATIONS:
            rows.append(Case(mm(activation=kind), [(m, k), (k, n), bias]))
            gate = mm(activation=kind, transpose_b=True, gated=True)
            rows.append(Case(gate, [(m, k), (n, k), None, (m, n)]))
            slope = mm(slope=kind, transpose_b=True)
            rows.append(Case(slope, [(m, k), (n, k), None, Input((m, n), make=spread)]))
    rows.append(Case(MatMul(), [(2, 5, 7), (7, 3), Input((3,), WIDE)], gradient=True))
    wide_rows = [(33, 24), (64, 24), None, Input((33, 64), make=spread)]
    rows.append(Case(MatMul(slope="gelu", transpose_b=True), wide_rows))
    return rows


def _random() -> list[Case]:
    rows = []
    for shape in ((1,), (31, 1), (33, 123), (4099, 3), (2, 3, 4099)):
        for first_row in ([7, 0], [2**32 - 1, 3]):
            state = Input((4,), "uint32", constant([5, 9, *first_row]))
            small = shape[-1] < 4099
            op = random.Dropout(0.3, random.stream_of("drop"))
            rows.append(Case(op, [shape, state], gradient=small, note=f" row {first_row}"))
    return rows


def _optim() -> list[Case]:
    def scalar(value: float) -> Input:
        return Input((), FLOAT, constant(value))

    rows = []
    dtypes = ("float32",)
    for n in ODD:
        moments = Input((n,), FLOAT, positive)
        for ok in (1.0, 0.0):
            note = f" ok={ok:g}"
            scalars = [scalar(v) for v in (1e-2, 0.19, 0.002, 0.7, ok)]
            adam = optim.AdamW((0.9, 0.999), 1e-8, 0.1)
            rows.append(Case(adam, [(n,), (n,), (n,), moments, *scalars], False, dtypes, note=note))
            copy = Input((n,), "bfloat16")
            both = optim.AdamW((0.9, 0.999), 1e-8, 0.1, shadow=True)
            vectors: list[Input | tuple[int, ...]] = [(n,), (n,), (n,), moments]
            rows.append(Case(both, [*vectors, *scalars, copy], False, dtypes, note=note))
            scalars = [scalar(v) for v in (1e-2, 0.7, ok)]
            both_sgd = optim.Sgd(0.9, 0.1, shadow=True)
            rows.append(
                Case(both_sgd, [(n,), (n,), (n,), *scalars, copy], False, dtypes, note=note)
            )
            sgd = optim.Sgd(0.9, 0.1)
            rows.append(Case(sgd, [(n,), (n,), (n,), *scalars], False, dtypes, note=note))
            sgd = optim.Sgd(0.0, 0.1)
            rows.append(Case(sgd, [(n,), (n,), None, *scalars], False, dtypes, note=note))
        rows.append(Case(optim.Accumulate(), [(n,), (n,)], dtypes=dtypes))
        for max_norm in (0.0, 1.0, 1e6):
            grads = [(n,), (3, n), (), (5, 33)]
            op = optim.GlobalNorm(max_norm)
            rows.append(Case(op, [scalar(1.0), *grads], dtypes=dtypes, note=f" max={max_norm:g}"))
    rows.append(Case(optim.GlobalNorm(1.0), [scalar(1.0), (70001,)], dtypes=dtypes))
    nan = Input((33,), FLOAT, constant(float("nan")))
    rows.append(Case(optim.GlobalNorm(1.0), [scalar(1.0), (31,), nan], dtypes=dtypes, note=" NaN"))
    limited = optim.GlobalNorm(1.0, limited=True)
    for value in (2.0, 3.0, float("nan"), float("inf")):
        limits = [scalar(1.0), scalar(value), scalar(2.0)]
        rows.append(Case(limited, [*limits, (31,)], dtypes=dtypes, note=f" loss={value:g}"))
    return rows


def _norm() -> list[Case]:
    def statistics(arrays: list) -> list:
        """mean and rstd, the last two inputs, from x, the second."""
        x = arrays[1]
        return [*arrays[:-2], x.mean(-1), 1 / np.sqrt(x.var(-1) + 1e-5)]

    def joined(arrays: list) -> list:
        """The same with the other gradient, the last input, behind them."""
        return [*statistics(arrays[:-1]), arrays[-1]]

    def shifted(rng: np.random.Generator, spec: Spec) -> np.ndarray:
        return 100.0 + rng.standard_normal(spec.shape)

    rows = []
    grad, weight_grad = norm.LayerNormGrad(), norm.LayerNormWeightGrad()
    shapes = (
        *((1, 1), (31, 1), (2, 3, 33), (33, 31), (65, 123), (37, 132), (130, 257)),
        *((3, 4099), (4099, 5)),
    )
    for shape in shapes:
        c = shape[-1:]
        rows.append(Case(norm.LayerNorm(), [shape, c], gradient=True, outputs=(0,)))
        rows.append(Case(norm.LayerNorm(), [shape, c, c], gradient=True, outputs=(0,)))
        wide = Input(c, "float32")
        rows.append(Case(norm.LayerNorm(), [shape, wide, wide], note=" wide"))
        saved = [Input(shape[:-1], "float32")] * 2
        rows.append(Case(grad, [shape, shape, c, *saved], prepare=statistics))
        rows.append(Case(grad, [shape, shape, wide, *saved], prepare=statistics, note=" wide"))
        rows.append(Case(grad, [shape, shape, c, *saved, shape], prepare=joined, note=" into"))
        rows.append(Case(weight_grad, [shape, shape, *saved], prepare=statistics))
    rows.append(Case(norm.LayerNorm(), [Input((31, 123), make=shifted), (123,)], note=" shifted"))

    def root(arrays: list) -> list:
        """rstd, the last input, from x, the second."""
        return [*arrays[:-1], 1 / np.sqrt(np.square(arrays[1]).mean(-1) + 1e-6)]

    def joined_root(arrays: list) -> list:
        return [*root(arrays[:-1]), arrays[-1]]

    for shape in shapes:
        c, rstd = shape[-1:], Input(shape[:-1], "float32")
        wide = Input(c, "float32")
        for offset in (0.0, 1.0):
            op, into, note = norm.RMSNorm(1e-6, offset), norm.RMSNormGrad(offset), f" {offset:g} +"
            rows.append(Case(op, [shape, c], gradient=True, outputs=(0,), note=note))
            rows.append(Case(op, [shape, wide], note=f"{note} wide"))
            rows.append(Case(op, [shape, c, shape], note=f"{note} residual"))
            rows.append(Case(op, [shape, wide, shape], note=f"{note} wide, residual"))
            both, behind = [shape, shape, c, rstd], [shape, shape, c, rstd, shape]
            rows.append(Case(into, both, prepare=root, note=note))
            wider = [shape, shape, wide, rstd]
            rows.append(Case(into, wider, prepare=root, note=f"{note} wide"))
            rows.append(Case(into, behind, prepare=joined_root, note=f"{note} into"))
        rows.append(Case(norm.RMSNormWeightGrad(), [shape, shape, rstd], prepare=root))
    return rows


def _embedding() -> list[Case]:
    rows = []
    sizes = (
        *((1, 1, 1, 1), (2, 31, 33, 31), (3, 33, 5, 123), (1, 123, 4099, 33), (5, 65, 31, 257)),
        (3, 67, 31, 36),
    )
    for batch, time, vocabulary, channels in sizes:
        tables = [(vocabulary, channels), (time + 2, channels)]
        y = (batch, time, channels)
        for note, make in (
            ("", integers(0, vocabulary)),
            (" unknown tokens", integers(-2, vocabulary + 2)),
            (" equal tokens", constant(vocabulary - 1)),
        ):
            tokens = Input((batch, time), "int32", make)
            op, grad = Embedding(), EmbeddingGrad(vocabulary)
            into = Input(tables[0], "float32")
            rows.append(Case(op, [tokens, tables[0]], gradient=True, note=note))
            rows.append(Case(op, [tokens, *tables], gradient=True, note=note))
            start = Input((batch,), "int32", integers(-1, 4))
            rows.append(Case(op, [tokens, *tables, start], note=f" start{note}"))
            rows.append(Case(grad, [tokens, y], note=note))
            rows.append(Case(grad, [tokens, y, into], note=note))
        rows.append(Case(PositionGrad(time), [y]))
        rows.append(Case(PositionGrad(time + 3), [y]))
        for at in (-1, 0, time // 2, time):
            index = Input((), "int32", constant(at))
            rows.append(Case(SelectRow(), [y, index], note=f" {at}"))
        index = Input((batch,), "int32", integers(-1, time + 1))
        rows.append(Case(SelectRow(), [y, index], note=" each"))
    many = Input((2, 4099), "int32", integers(0, 50257))
    rows.append(Case(EmbeddingGrad(50257), [many, (2, 4099, 3)]))
    few = Input((3, 4099), "int32", integers(-1, 3))
    rows.append(Case(EmbeddingGrad(3), [few, (3, 4099, 4)]))
    return rows


def _loss() -> list[Case]:
    def saved(arrays: list) -> list:
        """lse, the last input, from the logits, the second."""
        return [*arrays[:-1], np.log(np.exp(arrays[1]).sum(-1))]

    def far(rng: np.random.Generator, spec: Spec) -> np.ndarray:
        return 200.0 * rng.standard_normal(spec.shape)

    def masked(rng: np.random.Generator, spec: Spec) -> np.ndarray:
        x = rng.standard_normal(spec.shape)
        x[..., : spec.shape[-1] - 3] = -np.inf
        return x

    rows = []
    op, grad = loss.CrossEntropy(), loss.CrossEntropyGrad()
    dloss = Input((), "float32", constant(0.37))
    for shape in (
        (1, 1),
        (31, 31),
        (2, 3, 33),
        (123, 65),
        (300, 5),
        (31, 36),
        (3, 4099),
        (2, 9001),
    ):
        for note, make in (
            ("", integers(0, shape[-1])),
            (" some ignored", integers(-2, shape[-1] + 1)),
            (" all ignored", constant(-1)),
        ):
            targets = Input(shape[:-1], "int32", make)
            rows.append(Case(op, [shape, targets], gradient=True, outputs=(0, 1), note=note))
            lse = Input(shape[:-1], "float32")
            rows.append(Case(grad, [dloss, shape, targets, lse], prepare=saved, note=note))
    last = Input((5,), "int32", constant(4098))
    for note, make in ((" far apart", far), (" -inf", masked)):
        rows.append(Case(op, [Input((5, 4099), make=make), last], note=note))
    ignored = Input((31,), "int32", integers(0, 3))
    rows.append(Case(loss.CrossEntropy(2), [(31, 33), ignored], gradient=True, outputs=(0,)))
    for size in ((), (1,), (31, 33), (4099,), (3, 20011)):
        rows.append(Case(loss.MeanSquaredError(), [size, size], gradient=True))
        rows.append(Case(loss.MeanSquaredErrorGrad(), [dloss, size, size]))
    for count in (0.0, 3.0):
        counted = Input((), make=constant(count))
        rows.append(
            Case(loss.Mean(), [(), counted], gradient=True, constants=(1,), note=f" {count}")
        )
    return rows


def _classifier() -> list[Case]:
    rows = []
    dloss = Input((), WIDE, constant(0.37))
    sizes = (  # rows, V, C, chunk
        ((1,), 1, 1, None),
        ((31,), 33, 31, None),
        ((2, 3), 123, 33, 1),
        ((123,), 65, 17, 31),
        ((3, 4), 4099, 5, 5),
        ((300,), 31, 123, 128),
        ((33,), 257, 530, None),
        ((600,), 36, 20, 256),
    )
    for shape, vocabulary, channels, chunk in sizes:
        x, weight = (*shape, channels), (vocabulary, channels)
        small = prod(x) * vocabulary < 300_000
        for note, make in (
            ("", integers(0, vocabulary)),
            (" some ignored", integers(-2, vocabulary + 1)),
            (" all ignored", constant(-1)),
        ):
            table = Input(weight, make=lambda *a: 0.3 * normal(*a))
            inputs = [Input(x), table, Input(shape, "int32", make)]
            note += "" if chunk is None else f" chunks of {chunk}"
            evaluated = LinearCrossEntropyLoss(chunk=chunk)
            rows.append(Case(evaluated, inputs, small, outputs=(0,), note=note))
            rows.append(Case(LinearCrossEntropy(chunk=chunk), [*inputs, dloss], note=note))
            into = [*inputs, dloss, Input(weight, WIDE)]
            rows.append(Case(LinearCrossEntropyInto(chunk=chunk), into, note=note))
    ignored = Input((31,), "int32", integers(0, 3))
    inputs = [Input((31, 5)), Input((33, 5)), ignored]
    rows.append(Case(LinearCrossEntropyLoss(2), inputs, True, outputs=(0,), note=" ignore 2"))
    rows.append(Case(LinearCrossEntropy(2), [*inputs, dloss], note=" ignore 2"))
    for shape, vocabulary, channels, chunk in sizes[1:5]:
        weight, targets = (vocabulary, channels), integers(-2, vocabulary + 1)
        inputs = [Input((*shape, channels)), Input(weight), Input(shape, "int32", targets)]
        for cap in (1.0, 30.0):
            options, note = (-1, chunk, cap), f" cap {cap:g}"
            small = prod(shape) * channels * vocabulary < 300_000
            evaluated = LinearCrossEntropyLoss(*options)
            rows.append(Case(evaluated, inputs, small, outputs=(0,), note=note))
            rows.append(Case(LinearCrossEntropy(*options), [*inputs, dloss], note=note))
            into = [*inputs, dloss, Input(weight, WIDE)]
            rows.append(Case(LinearCrossEntropyInto(*options), into, note=note))
    return rows


def _attention() -> list[Case]:
    rows = []
    state = Input((4,), "uint32", constant([5, 9, 3, 1]))
    last = Input((4,), "uint32", constant([5, 9, 2**32 - 1, 1]))

    def both(
        b: int,
        t: int,
        h: int,
        k: int,
        d: int,
        p: float,
        random_state: Input,
        *options: float | None,
    ) -> None:
        """A row for attention, and one for its gradient; options: window and softcap."""
        qkv, y, lse = (b, t, (h + 2 * k) * d), (b, t, h * d), Input((b, h, t), "float32")
        drawn = [random_state] if p else []
        heads = (h, k, None, p, random.stream_of("attention") if p else 0)
        op, grad = Attention(*heads, *options), AttentionGrad(*heads, *options)  # type: ignore[arg-type]

        def saved(arrays: list) -> list:
            """y and lse from qkv and the random state."""
            dy, qkv, _, _, *drawn = arrays
            return [dy, qkv, *op.reference(qkv, *drawn), *drawn]

        note = f" heads {h}/{k}" + (f" dropout {p}" if p else "")
        note += f" window {options[0]} cap {options[1]}" if options else ""
        rows.append(Case(op, [qkv, *drawn], t < 100, outputs=(0,), note=note))
        rows.append(Case(grad, [y, qkv, y, lse, *drawn], prepare=saved, note=note))

    sizes = (  # B, T, H, K, D
        (1, 1, 1, 1, 1),
        (2, 5, 2, 1, 3),
        (1, 31, 1, 1, 33),
        (3, 33, 4, 2, 8),
        (2, 64, 3, 3, 32),
        (1, 123, 2, 1, 80),
        (1, 132, 3, 1, 16),
        (1, 517, 1, 1, 5),
        (16, 130, 1, 1, 24),
        (33, 130, 1, 1, 8),
        (17, 67, 4, 4, 7),
    )
    for b, t, h, k, d in sizes:
        small = b * h * t * t <= 70_000
        for p, drawn in ((0.0, state), (0.3, state), (0.9, last))[: 3 if small else 1]:
            both(b, t, h, k, d, p, drawn)
    steep = Attention(2, 2, 3.0)
    rows.append(Case(steep, [(2, 200, 6 * 32)], outputs=(0,), note=" steep"))
    narrow = (  # B, T, H, K, D, dropout, window, softcap
        (1, 5, 2, 1, 3, 0.0, 1, None),
        (2, 33, 4, 2, 8, 0.3, 7, 2.0),
        (1, 31, 2, 2, 5, 0.0, 31, 0.5),
        (1, 67, 3, 1, 7, 0.0, None, 1.0),
        (1, 123, 2, 1, 24, 0.3, 64, None),
        (2, 200, 2, 2, 16, 0.0, 17, 50.0),
        (1, 517, 2, 1, 5, 0.0, 65, 1.0),
        (1, 517, 1, 1, 33, 0.0, 200, None),
        (1, 330, 1, 1, 9, 0.3, 128, 1.0),
    )
    for b, t, h, k, d, p, *options in narrow:
        both(b, t, h, k, d, p, state, *options)
    return rows


def _rope() -> list[Case]:
    rows = []
    sizes = (  # B, T, H, K, D / 2
        (1, 1, 1, 1, 1),
        (2, 31, 3, 1, 5),
        (3, 33, 2, 2, 16),
        (1, 130, 4, 2, 33),
        (5, 9, 1, 1, 40),
    )
    for b, t, h, k, half in sizes:
        qkv = (b, t, (h + 2 * k) * 2 * half)
        frequencies = tuple(10000.0 ** (-d / half) for d in range(half))
        for inverse in (False, True):
            op = Rope(h, k, frequencies, inverse)
            note = f" heads {h}/{k}"
            rows.append(Case(op, [qkv], gradient=True, note=note))
            far = Input((b,), "int32", integers(0, 100_000))
            rows.append(Case(op, [qkv, far], gradient=True, note=f"{note} start"))
    return rows


def _cached_attention() -> list[Case]:
    rows = []
    sizes = (  # B, T, H, K, D, S
        (1, 1, 1, 1, 1, 1),
        (3, 1, 4, 2, 33, 31),
        (2, 5, 2, 1, 3, 70),
        (2, 1, 3, 3, 64, 700),
        (1, 4, 4, 1, 80, 530),
        (2, 33, 2, 1, 16, 300),
        (1, 130, 3, 3, 24, 517),
        (5, 67, 2, 2, 7, 67),
        (1, 1, 1, 1, 5, 9001),
        (1, 5, 4, 1, 3, 9001),
    )
    for b, t, h, k, d, s in sizes:
        cache = (b, k, s, d)
        scores = ((None, None), (1, None), (40, 0.7), (300, 50.0))
        for first, (window, softcap) in zip(
            (0, (s - t) // 2, s - t, s - t // 2), scores, strict=True
        ):
            starts = Input((b,), "int32", constant([max(0, first - i) for i in range(b)]))
            op = CachedAttention(h, None, window, softcap)
            note = f" heads {h}/{k} at {first} window {window} cap {softcap}"
            rows.append(Case(op, [(b, t, (h + 2 * k) * d), cache, cache, starts], note=note))
            rows.append(
                Case(CachedAttention(h), rows[-1].inputs, note=f" heads {h}/{k} at {first}")
            )
    return rows


def all_cases() -> list[Case]:
    """Every row, family by family."""
    return [
        *_primitives(),
        *_elementwise(),
        *_linear(),
        *_random(),
        *_optim(),
        *_norm(),
        *_embedding(),
        *_loss(),
        *_classifier(),
        *_attention(),
        *_cached_attention(),
        *_rope(),
    ]
