"""The ops of a training step, one by one, against PyTorch.

    python bench/ops.py [PRESET ...] [--precision fp32|bf16] [--only TEXT] [--peak-fp32 GFLOPS]
                        [--peak-bf16 GFLOPS] [--bandwidth GB/S] [--json FILE]

Every op has two rows: forward alone, and forward with the gradients of all its inputs. Results and
gradients are first compared with PyTorch's in fp32. Then the two sides take turns in this one
process, with pauses in which their threads go to sleep, and a call before each measurement. On a
busy machine ratios come out too high, as train_cpu.py explains.

Inputs stay the same, so that what fits in the caches is there: the floor, the longer of arithmetic
at the declared peak and of memory traffic at the declared bandwidth, can be beaten by small ops.

"count" is how often the op occurs in a step; the last line adds the rows up with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn import functional as F

import common
from common import PRESETS, Preset, Setting
from treadle import ops
from treadle.backends.base import Executable
from treadle.backends.cpu import CpuBackend
from treadle.errors import TreadleError
from treadle.generate import write_weight
from treadle.graph.autograd import gradients
from treadle.graph.op import Op
from treadle.graph.program import Program
from treadle.graph.value import Spec, Value
from treadle.models.base import declare
from treadle.models.gpt2 import EPS
from treadle.passes.fuse import fuse
from treadle.train.program import SCALARS, OptimizerSettings, add_update

# ‖x - y‖ / ‖y‖ of each result x and PyTorch's y in fp32.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
DTYPES = {"fp32": ("float32", torch.float32), "bf16": ("bfloat16", torch.bfloat16)}
OPTIMIZER = OptimizerSettings()
LEARNING_RATE = 1e-3
ITEM_BYTES = {"fp32": 4, "bf16": 2}


# ---------------------------------------------------------------- an op on both sides


@dataclass(frozen=True)
class Pairing(Op):
    """loss = Σ y · dy, of which y has the gradient dy. Nothing reads the loss: it never runs."""

    name: ClassVar[str] = "pairing"

    def infer(self, y: Spec, dy: Spec) -> Sequence[Spec]:
        return (Spec((), y.dtype),)

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        return node.inputs[1], None


@dataclass(frozen=True)
class Case:
    """An op. inputs: float arrays come in the precision that is measured, but for those in `fixed`,
    which stay fp32. flops: forward; the backward pass is counted as `backward` times that. moved:
    numbers read and written, forward and with backward, where that is not all inputs and the output
    once, and their gradients. seeded: whether ours takes the gradient of its result as `dloss`."""

    name: str
    count: int
    flops: float
    inputs: dict[str, np.ndarray]
    ours: Callable[..., Value]
    peer: Callable[..., torch.Tensor]
    backward: float = 2.0
    fixed: frozenset[str] = frozenset()
    moved: tuple[int, int] | None = None
    seeded: bool = False

    @property
    def floats(self) -> list[str]:
        """The inputs that have gradients."""
        return [name for name, x in self.inputs.items() if x.dtype == np.float32]

    def narrow(self, name: str, precision: str) -> str:
        """The precision of an input."""
        return "fp32" if name in self.fixed else precision

    def nbytes(self, output: int, precision: str, backward: bool) -> int:
        """Memory traffic with a result of so many numbers."""
        once = sum(x.size for x in self.inputs.values()) + output
        return (self.moved or (once, 2 * once))[backward] * ITEM_BYTES[precision]


Run = Callable[[int], None]
Results = Callable[[], list[np.ndarray]]


@dataclass(frozen=True)
class Contest:
    """What is measured: each side's way to compute a case so many times, and its last results."""

    name: str
    count: int
    flops: float
    nbytes: float
    ours: Run
    peer: Run
    our_results: Results
    peer_results: Results
    wanted: Results
    close: Callable[[], None]


def tensors(case: Case, precision: str, grad: bool) -> dict[str, torch.Tensor]:
    """The inputs as PyTorch takes them."""
    made = {}
    for name, array in case.inputs.items():
        if name not in case.floats:
            made[name] = torch.from_numpy(array).long()
            continue
        dtype = DTYPES[case.narrow(name, precision)][1]
        made[name] = torch.from_numpy(array).to(dtype).requires_grad_(grad)
    return made


def run_peer(
    case: Case, inputs: dict[str, torch.Tensor], dy: torch.Tensor | None
) -> list[torch.Tensor]:
    """y, and with dy the gradients of all float inputs."""
    if dy is None:
        with torch.inference_mode():
            return [case.peer(**inputs)]
    y = case.peer(**inputs)
    wanted = [inputs[name] for name in case.floats]
    return [y, *torch.autograd.grad(y, wanted, dy.to(y.dtype))]


def load_ours(
    case: Case, precision: str, dy: torch.Tensor | None, backend: CpuBackend
) -> tuple[Executable, list[str]]:
    """The executable with the graph "op", and the names of its results."""
    program = Program()
    graph = program.graph("op")
    values = {}
    for name, array in case.inputs.items():
        dtype = DTYPES[case.narrow(name, precision)][0] if name in case.floats else "int32"
        values[name] = graph.read(program.buffer(name, array.shape, dtype, "input"))
    seed = None
    if case.seeded and dy is not None:
        seed = graph.read(program.buffer("dy", (), "float32", "input"))
    y = case.ours(**values) if seed is None else case.ours(**values, dloss=seed)
    results = {"y": y}
    if dy is not None:
        wanted = [values[name] for name in case.floats]
        if seed is None:
            seed = graph.read(program.buffer("dy", y.shape, y.dtype, "input"))
            found = gradients(graph.apply(Pairing(), y, seed)[0], wanted)
        else:
            found = gradients(y, wanted, seed)
        results |= {f"d{name}": dx for name, dx in zip(case.floats, found, strict=True)}
    for name, value in results.items():
        graph.assign(program.buffer(f"{name}.out", value.shape, value.dtype, "output"), value)
    fuse(graph)
    executable = backend.load(program)
    for name, array in case.inputs.items():
        executable.write(name, array)
    if dy is not None:
        executable.write("dy", dy.detach().float().numpy())
    return executable, [f"{name}.out" for name in results]


def contest(case: Case, precision: str, backward: bool, backend: CpuBackend) -> Contest:
    """A case on both sides. TreadleError where ours is not there in this precision."""
    for name in case.floats:  # what bf16 keeps of them, so that all sides compute with the same
        rounded = torch.from_numpy(case.inputs[name]).to(DTYPES[case.narrow(name, precision)][1])
        case.inputs[name][...] = rounded.float().numpy()
    exact = tensors(case, "fp32", backward)
    dy = None
    if backward:
        shape = case.peer(**exact).shape
        # A scalar's gradient is that of a mean over the rows of a step.
        dy = torch.randn(shape) if shape else torch.tensor(1.0 / len(case.inputs["targets"]))
        dy = dy.to(DTYPES[precision if shape else "fp32"][1])
    inputs = tensors(case, precision, backward)
    executable, names = load_ours(case, precision, dy, backend)
    last: list[torch.Tensor] = []

    def peer(times: int) -> None:
        for _ in range(times):
            last[:] = run_peer(case, inputs, dy)

    def numpy(results: Sequence[torch.Tensor]) -> list[np.ndarray]:
        return [x.detach().float().numpy() for x in results]

    output = math.prod(executable.buffer("y.out").shape)
    return Contest(
        case.name + (", with backward" if backward else ""),
        case.count,
        case.flops * (1 + case.backward if backward else 1),
        case.nbytes(output, precision, backward),
        lambda times: executable.run(*["op"] * times),
        peer,
        lambda: [executable.read(name) for name in names],
        lambda: numpy(last),
        lambda: numpy(run_peer(case, exact, dy)),
        executable.close,
    )


# ---------------------------------------------------------------- the ops of a preset


def cases(preset: Preset) -> Iterator[Case]:
    """The ops of a training step that have a gradient, with random inputs."""
    model, rng = preset.model, np.random.default_rng(0)
    b, t, c, v = preset.batch, preset.time, model.n_embd, model.vocab_size
    layers, heads = model.n_layer, model.n_head
    rows = preset.rows

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    def token_ids(*shape: int) -> np.ndarray:
        return rng.integers(v, size=shape, dtype=np.int32)

    for name, (k, n, count) in preset.linears().items():
        if name == "head":
            continue
        inputs = {"x": normal(rows, k), "weight": normal(k, n) * k**-0.5, "bias": normal(n)}
        flops = 2 * rows * k * n
        yield Case(name, count, flops, inputs, ops.linear, torch_linear, fixed=frozenset({"bias"}))
    yield Case(
        "head, loss",
        1,
        2 * rows * c * v,
        {"x": normal(rows, c), "weight": normal(v, c) * c**-0.5, "targets": token_ids(rows)},
        lambda **inputs: ops.linear_cross_entropy(**inputs)[0],
        torch_head_loss,
        seeded=True,
    )
    pairs = b * t * (t + 1) // 2
    yield Case(
        "attention",
        layers,
        4 * c * pairs,
        {"qkv": normal(b, t, 3 * c)},
        partial(ops.attention, n_head=heads),
        partial(torch_attention, heads=heads),
    )
    yield Case(
        "layernorm",
        2 * layers + 1,
        8 * rows * c,
        {"x": normal(rows, c), "weight": normal(c), "bias": normal(c)},
        partial(ops.layernorm, eps=EPS),
        lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, EPS),
        fixed=frozenset({"weight", "bias"}),
    )
    yield Case(
        "gelu",
        layers,
        20 * rows * 4 * c,
        {"x": normal(rows, 4 * c)},
        ops.gelu,
        partial(F.gelu, approximate="tanh"),
        backward=1.0,
    )
    yield Case(
        "embedding",
        1,
        rows * c,
        {"tokens": token_ids(b, t), "wte": normal(v, c), "wpe": normal(model.block_size, c)},
        ops.embedding,
        lambda tokens, wte, wpe: F.embedding(tokens, wte) + wpe[:t],
        backward=1.0,
        moved=(2 * rows * c, 3 * rows * c + v * c),
    )


def torch_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight.t(), bias.to(x.dtype))


def torch_head_loss(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    # Autocast computes the loss in fp32 too.
    return F.cross_entropy(F.linear(x, weight).float(), targets, reduction="sum")


def torch_attention(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    b, t, c = qkv.shape
    q, k, v = qkv.view(b, t, 3, heads, c // 3 // heads).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).reshape(b, t, c // 3)


# ---------------------------------------------------------------- the optimizer


def update(preset: Preset, precision: str, backend: CpuBackend) -> Contest:
    """Clipping by the global norm and AdamW, on all parameters at once, in fp32. Beside bf16, ours
    keeps a bf16 copy of the matrices up to date; PyTorch converts them in the next step."""
    parameters = preset.model.parameters()
    program = Program()
    declare(program, preset.model, precision)
    for name in SCALARS:
        program.buffer(name, (), "float32", "scalar")
    for p in parameters:
        program.buffer(f"{p.name}.grad", p.shape, "float32", "grad")
        for state in OPTIMIZER.states():
            program.buffer(f"{p.name}.{state}", p.shape, "float32", "state")
    add_update(program, {p.name: p.decays for p in parameters}, OPTIMIZER)
    executable = backend.load(program)
    # The corrections are those of the first step; what they are does not change the time.
    scalars = (LEARNING_RATE, *(1 - beta for beta in OPTIMIZER.betas), 1.0, 1.0)
    for name, value in zip(SCALARS, scalars, strict=True):
        executable.write(name, np.float32(value))

    rng = np.random.default_rng(0)
    weights = []
    for p in parameters:
        w, g = (rng.standard_normal(p.shape, dtype=np.float32) for _ in range(2))
        write_weight(executable, p.name, w)
        executable.write(f"{p.name}.grad", g)
        weights.append(torch.from_numpy(w).requires_grad_())
        weights[-1].grad = torch.from_numpy(g)
    groups = [
        {
            "params": [w for w, p in zip(weights, parameters, strict=True) if p.decays == decays],
            "weight_decay": OPTIMIZER.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, LEARNING_RATE, OPTIMIZER.betas, OPTIMIZER.eps, fused=True)

    def peer(times: int) -> None:
        for _ in range(times):
            torch.nn.utils.clip_grad_norm_(weights, OPTIMIZER.grad_clip)
            adamw.step()

    def peer_results() -> list[np.ndarray]:
        return [w.detach().numpy() for w in weights]

    return Contest(
        "clip, adamw",
        1,
        15 * preset.model.n_parameters(),
        preset.optimizer_bytes(precision),
        lambda times: executable.run(*["update"] * times),
        peer,
        lambda: [executable.read(p.name) for p in parameters],
        peer_results,
        peer_results,
        executable.close,
    )


# ---------------------------------------------------------------- checking and measuring


def error(results: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    """The largest ‖x - y‖ / ‖y‖."""
    return max(
        float(np.linalg.norm(x - y) / (np.linalg.norm(y) or 1.0))
        for x, y in zip(results, wanted, strict=True)
    )


def measure(made: Contest, precision: str, setting: Setting) -> dict[str, Any]:
    """A row of the table."""
    made.ours(1)
    made.peer(1)
    wanted = made.wanted()
    found, theirs = (error(results(), wanted) for results in (made.our_results, made.peer_results))
    if not found <= TOLERANCE[precision]:
        raise SystemExit(f"{made.name}, {precision}: {found:.1e} off PyTorch in fp32")

    def turn(run: Run, repeats: int) -> list[float]:
        run(1)
        begin = time.perf_counter()
        run(repeats)
        return [(time.perf_counter() - begin) / repeats]

    runs = {}
    for who, run in (("treadle", made.ours), ("torch", made.peer)):
        once = min(turn(run, 1)[0] for _ in range(3))
        runs[who] = partial(turn, run, max(1, math.ceil(setting.seconds / once)))
    turns = common.alternate(runs, setting.rounds)
    ours, peer = (common.summary(turns[who], turns["treadle"]) for who in runs)
    parts = setting.times(made.flops, made.nbytes, precision)
    return {
        "op": made.name,
        "count": made.count,
        "precision": precision,
        "treadle": ours["median"],
        "torch": peer["median"],
        "ratio": peer["ratio"],
        "gflops": made.flops / ours["median"] / 1e9,
        "floor": None if parts is None else max(parts) / ours["median"],
        "error": found,
        "torch_error": theirs,
        "turns": turns,
    }


COLUMNS: list[common.Column] = [
    ("op", -27, str),
    ("count", 5, str),
    ("precision", -9, str),
    ("treadle", 10, common.decimals(3, 1e3)),
    ("torch", 10, common.decimals(3, 1e3)),
    ("ratio", 6, common.decimals(2)),
    ("gflops", 8, common.decimals(1)),
    ("floor", 6, common.decimals(2)),
    ("error", 8, "{:.1e}".format),
]


def contests(
    preset: Preset, precision: str, only: str, backend: CpuBackend
) -> Iterator[tuple[str, Callable[[], Contest]]]:
    """Name and maker of everything that is measured."""
    for case in cases(preset):
        for backward in (False, True):
            yield case.name, partial(contest, case, precision, backward, backend)
    yield "clip, adamw", partial(update, preset, precision, backend)


def main() -> None:
    parser = common.parser("The ops of a training step, side by side.", ["char", "124m-64"], 0.05)
    parser.add_argument("--only", default="", help="ops whose name contains this text")
    options, setting = common.parse(parser)
    torch.set_num_threads(setting.threads)
    torch.manual_seed(0)
    backend = CpuBackend(setting.threads)
    report = common.header(setting, torch=torch.__version__)
    report["presets"] = {}
    print("times in ms, ratio = torch's / treadle's, error = ‖x - y‖ / ‖y‖ from torch in fp32")
    for name in options.presets:
        print(f"\n{name}: {PRESETS[name].describe()}")
        common.show(COLUMNS, None)
        rows = report["presets"][name] = []
        for precision in options.precision:
            total = {"treadle": 0.0, "torch": 0.0}
            for label, make in contests(PRESETS[name], precision, options.only, backend):
                if options.only not in label:
                    continue
                try:
                    made = make()
                except TreadleError as missing:
                    print(f"  {label}, {precision}, is left out: {missing}")
                    continue
                row = measure(made, precision, setting)
                made.close()
                common.show(COLUMNS, row)
                rows.append(row)
                if label == "clip, adamw" or "backward" in made.name:
                    for who in ("treadle", "torch"):
                        total[who] += made.count * row[who]
            if total["treadle"]:
                total |= {"ratio": total["torch"] / total["treadle"]}
                common.show(COLUMNS, {"op": "all, with backward", "precision": precision, **total})
    common.save(options.json, report)


if __name__ == "__main__":
    main()
