"""The program of a training run: micro-step, update and evaluate graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from treadle.graph.autograd import gradients
from treadle.graph.op import Graph
from treadle.graph.program import Program
from treadle.graph.value import Value
from treadle.models.base import Model, decaying_first, read_weight, read_weights, shadow
from treadle.ops.elementwise import copy
from treadle.ops.optim import accumulate, adamw, clip, sgd
from treadle.passes.fuse import fuse
from treadle.passes.recompute import recompute


@dataclass(frozen=True)
class OptimizerSettings:
    """What the update graph is built from. name: "adamw" or "sgd"; grad_clip 0 is off."""

    name: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.0
    grad_clip: float = 1.0

    def states(self) -> tuple[str, ...]:
        """Suffixes of the state buffers that each parameter has."""
        if self.name == "adamw":
            return ("m", "v")
        return ("momentum",) if self.momentum else ()


# What the host writes before a step: learning rate, Adam's 1 - beta^t, 1 / number of targets, and
# whether to update at all.
SCALARS = ("lr", "correction1", "correction2", "inv_count", "apply")
# What a trainer writes as well: the sum of losses above which the step is left out.
LOSS_LIMIT = "loss_limit"


def train_graph(
    program: Program,
    params: Sequence[str],
    optimizer: OptimizerSettings,
    build: Callable[[Graph, Value], Value],
    accumulates: bool = False,
    again: str = "none",
) -> None:
    """Graph `micro_first`: the loss that `build` returns, shape (), and d(loss · inv_count) of each
    parameter into `<parameter>.grad`; with `accumulates` also `micro`, which adds to both. `build`
    is called with the graph and inv_count, the gradient of the loss. again: what is recomputed."""
    for name in SCALARS:
        program.buffer(name, (), "float32", "scalar")
    program.buffer("loss", (), "float32", "output")
    for name in params:
        shape = program.buffers[name].shape
        program.buffer(f"{name}.grad", shape, "float32", "grad")
        for state in optimizer.states():
            program.buffer(f"{name}.{state}", shape, "float32", "state")
    for graph_name in ("micro_first", "micro") if accumulates else ("micro_first",):
        g = program.graph(graph_name)
        seed = g.read(program.buffers["inv_count"])
        loss = build(g, seed)
        grads = gradients(loss, [read_weight(program, g, n) for n in params], seed)
        results = {"loss": loss} | {f"{n}.grad": d for n, d in zip(params, grads, strict=True)}
        for target, value in results.items():
            buffer = program.buffers[target]
            if graph_name == "micro":
                accumulate(g.read(buffer), value)
            else:
                g.assign(buffer, copy(value) if value.buffer is not None else value)
        recompute(fuse(g), again)


def add_update(
    program: Program,
    decays: Mapping[str, bool],
    optimizer: OptimizerSettings,
    limited: bool = False,
) -> None:
    """Graph `update`: clip by the global norm, then one optimizer step, which is left out on the
    device when the gradient is not finite. decays: by parameter, whether its weights decay; in the
    order of the buffers, for what follows each other in memory may be updated at once.
    limited: leave it out as well where the loss is NaN or above the scalar LOSS_LIMIT."""
    g = program.graph("update")
    limit = g.read(program.buffer(LOSS_LIMIT, (), "float32", "scalar")) if limited else None
    b = program.buffers
    loss = g.read(b["loss"]) if limited else None
    grads = {name: g.read(b[f"{name}.grad"]) for name in decays}
    apply = g.read(b["apply"])
    norm, scale, ok = clip(list(grads.values()), optimizer.grad_clip, apply, loss, limit)
    g.assign(program.buffer("norm", (), "float32", "output"), norm)
    g.assign(program.buffer("ok", (), "float32", "output"), ok)
    lr, c1, c2 = (g.read(b[s]) for s in ("lr", "correction1", "correction2"))
    for name, decay in decays.items():
        w, dw = g.read(b[name]), grads[name]
        copied = g.read(b[shadow(name)]) if shadow(name) in b else None
        rate = optimizer.weight_decay if decay else 0.0
        states = [g.read(b[f"{name}.{s}"]) for s in optimizer.states()]
        if optimizer.name == "adamw":
            m, v = states
            adamw(
                w, dw, m, v, lr, c1, c2, scale, ok,
                betas=optimizer.betas, eps=optimizer.eps, weight_decay=rate, shadow=copied,
            )  # fmt: skip
        else:
            buffer = states[0] if states else None
            sgd(
                w, dw, buffer, lr, scale, ok,
                momentum=optimizer.momentum, weight_decay=rate, shadow=copied,
            )  # fmt: skip


# ---------------------------------------------------------------- language models


def add_training(
    program: Program,
    model: Model,
    optimizer: OptimizerSettings,
    batch: int,
    block_size: int,
    accumulates: bool,
    again: str = "none",
) -> None:
    """The training graphs of a model on micro-batches of `batch` windows, and `evaluate`. again:
    what the backward pass recomputes, "none", "gelu" or "block"."""
    tokens = program.buffer("tokens", (batch, block_size), "int32", "input")
    targets = program.buffer("targets", (batch, block_size), "int32", "input")
    random = program.buffer("random", (4,), "uint32", "scalar")

    def loss(g: Graph, seed: Value) -> Value:
        weights = read_weights(program, g, model)
        return model.loss(weights, g.read(tokens), g.read(targets), g.read(random), seed)[0]

    decays = {p.name: p.decays for p in decaying_first(model)}
    train_graph(program, list(decays), optimizer, loss, accumulates, again)
    add_update(program, decays, optimizer, limited=True)
    add_evaluate(program, model, batch, block_size)


def add_evaluate(program: Program, model: Model, batch: int, block_size: int) -> None:
    """Graph `evaluate`: loss sum and count of a batch of `batch` windows, without dropout."""
    tokens = program.buffer("tokens", (batch, block_size), "int32", "input")
    targets = program.buffer("targets", (batch, block_size), "int32", "input")
    g = program.graph("evaluate")
    weights = read_weights(program, g, model)
    total, count = model.loss(weights, g.read(tokens), g.read(targets))
    g.assign(program.buffer("eval_loss", (), "float32", "output"), total)
    g.assign(program.buffer("eval_count", (), "float32", "output"), count)
    fuse(g)
