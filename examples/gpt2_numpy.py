"""GPT-2, trained from scratch, in plain NumPy: every layer forward and backward by hand.

    python examples/gpt2_numpy.py TEXTFILE --steps 500

trains a model of the characters of TEXTFILE and then writes new text with it. Nothing is hidden:
no framework, no automatic differentiation. Read it from top to bottom.

A language model gives, for each position of a text, a probability to every possible next token.
Training makes the true next token more probable: compute the loss (forward), compute how the loss
changes with each weight (backward), move each weight a little downhill (AdamW), repeat.

Every layer is a pair of functions. `layer_forward` returns its output and a cache, the values that
the gradient will need. `layer_backward` takes `dy`, the gradient of the loss with respect to that
output, and the cache; by the chain rule it returns the gradients with respect to the layer's input
(`dx`) and weights (`dw`, `db`). A gradient always has the shape of the thing it belongs to, which
is the best check there is: most of the formulas below are the only ones whose shapes fit.

Shapes are in comments: B batch, T time (positions), C channels, H heads, D = C / H head size,
L layers, V vocabulary, F = 4C feed-forward. The weights have the names, the shapes and the meaning
that they have in Hugging Face's GPT2LMHeadModel, so its checkpoints fit this code.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

# Threads that share such small products wait for one another longer than they compute.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]
Params = dict[str, Array]
Rng = np.random.Generator


@dataclass(frozen=True)
class Config:
    """The size of a GPT-2; the defaults are those of the smallest released one (124M weights)."""

    vocab_size: int = 50257  # V
    n_layer: int = 12  # L
    n_head: int = 12  # H
    n_embd: int = 768  # C
    block_size: int = 1024  # the longest T
    bias: bool = True  # linear layers and layer norms add a bias
    tie_embeddings: bool = True  # the output head is the token embedding, transposed

    @property
    def head(self) -> str:
        """The name of the weight [V, C] that makes logits."""
        return "transformer.wte.weight" if self.tie_embeddings else "lm_head.weight"


# ---- Linear ----------------------------------------------------------------------------------
#
# y = x w + b, the same for every position. Each y[.., j] is a sum over i of x[.., i] w[i, j], so
# x[.., i] reaches the loss through every j, and w[i, j] through every row: two matrix products.


def linear_forward(x: Array, w: Array, b: Array | None) -> tuple[Array, Any]:
    y = x @ w  # [.., O] from [.., I] and [I, O]
    return y if b is None else y + b, (x, w)


def linear_backward(dy: Array, cache: Any) -> tuple[Array, Array, Array]:
    x, w = cache
    rows_x = x.reshape(-1, x.shape[-1])  # [N, I], N = all positions of the batch
    rows_dy = dy.reshape(-1, dy.shape[-1])  # [N, O]
    dx = dy @ w.T  # [.., I]
    dw = rows_x.T @ rows_dy  # [I, O]
    db = rows_dy.sum(axis=0)  # [O]
    return dx, dw, db


# ---- Layer normalisation ---------------------------------------------------------------------
#
# Each row x (the C channels of one position) is shifted to mean 0 and scaled to variance 1, giving
# n = (x - mean) rstd with rstd = 1 / sqrt(variance + eps); then y = n w + b. Backward, mean and
# rstd depend on x too: what they contribute removes from dn its average and its part along n.


def layernorm_forward(x: Array, w: Array, b: Array | None, eps: float = 1e-5) -> tuple[Array, Any]:
    centred = x - x.mean(axis=-1, keepdims=True)  # [B, T, C]
    variance = np.square(centred).mean(axis=-1, keepdims=True)  # [B, T, 1]
    rstd = 1.0 / np.sqrt(variance + eps)  # [B, T, 1]
    n = centred * rstd  # [B, T, C]
    y = n * w  # [B, T, C] from [B, T, C] and [C]
    return y if b is None else y + b, (n, rstd, w)


def layernorm_backward(dy: Array, cache: Any) -> tuple[Array, Array, Array]:
    n, rstd, w = cache
    dw = (dy * n).sum(axis=(0, 1))  # [C]
    db = dy.sum(axis=(0, 1))  # [C]
    dn = dy * w  # [B, T, C]
    along = (dn * n).mean(axis=-1, keepdims=True)  # [B, T, 1]
    dx = rstd * (dn - dn.mean(axis=-1, keepdims=True) - n * along)  # [B, T, C]
    return dx, dw, db


# ---- GELU ------------------------------------------------------------------------------------
#
# The nonlinearity, in the tanh form that GPT-2 uses: y = x/2 (1 + tanh u) with
# u = sqrt(2/pi) (x + 0.044715 x^3). For large x it is x, for very negative x it is 0.

GELU_SCALE, GELU_CUBIC = math.sqrt(2.0 / math.pi), 0.044715


def gelu_forward(x: Array) -> tuple[Array, Any]:
    tanh = np.tanh(GELU_SCALE * (x + GELU_CUBIC * x * x * x))  # [B, T, F]
    return 0.5 * x * (1.0 + tanh), (x, tanh)


def gelu_backward(dy: Array, cache: Any) -> Array:
    x, tanh = cache
    du = GELU_SCALE * (1.0 + 3.0 * GELU_CUBIC * x * x)  # du/dx; and tanh' = 1 - tanh^2
    return np.asarray(dy * 0.5 * (1.0 + tanh + x * (1.0 - tanh * tanh) * du))  # [B, T, F]


# ---- Causal attention ------------------------------------------------------------------------
#
# The only place where positions exchange information. Each position t makes a query q, a key k and
# a value v. The scores q[t] . k[s] / sqrt(D) say how much t wants to hear from each earlier s; the
# softmax turns them into weights p that sum to 1; the output is the p-weighted mean of the values.
# Looking ahead (s > t) is forbidden: those scores are -inf, so those weights are 0. H heads do
# this at once, each on its own D channels.
#
# Softmax backward: p[s] = exp(score[s]) / sum, and raising one score lowers all the other weights:
# dscore[s] = p[s] (dp[s] - sum over r of p[r] dp[r]). Where p is 0, so is dscore.


def split_heads(x: Array, n_head: int) -> Array:
    B, T, C = x.shape
    return x.reshape(B, T, n_head, C // n_head).swapaxes(1, 2)  # [B, H, T, D] from [B, T, C]


def merge_heads(x: Array) -> Array:
    B, H, T, D = x.shape
    return x.swapaxes(1, 2).reshape(B, T, H * D)  # [B, T, C] from [B, H, T, D]


def attention_forward(qkv: Array, n_head: int) -> tuple[Array, Any]:
    q, k, v = (split_heads(part, n_head) for part in np.split(qkv, 3, axis=-1))  # [B, H, T, D]
    T, D = q.shape[-2:]
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(D)  # [B, H, T, T]: queries down, keys across
    scores[..., np.triu(np.ones((T, T), dtype=bool), k=1)] = -np.inf
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))  # the maximum cancels; no overflow
    p /= p.sum(axis=-1, keepdims=True)  # [B, H, T, T]
    return merge_heads(p @ v), (q, k, v, p)  # [B, T, C]


def attention_backward(dy: Array, cache: Any) -> Array:
    q, k, v, p = cache
    H, D = q.shape[1], q.shape[-1]
    dy = split_heads(dy, H)  # [B, H, T, D]
    dv = p.swapaxes(-1, -2) @ dy  # [B, H, T, D]
    dp = dy @ v.swapaxes(-1, -2)  # [B, H, T, T]
    dscores = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) / math.sqrt(D)  # [B, H, T, T]
    dq = dscores @ k  # [B, H, T, D]
    dk = dscores.swapaxes(-1, -2) @ q  # [B, H, T, D]
    return np.concatenate([merge_heads(d) for d in (dq, dk, dv)], axis=-1)  # [B, T, 3C]


# ---- Embedding -------------------------------------------------------------------------------
#
# A token is a row of the table wte and a position is a row of wpe; their sum enters the network.
# A token that occurs several times in the batch collects the gradient of every occurrence.


def embedding_forward(tokens: Array, wte: Array, wpe: Array) -> tuple[Array, Any]:
    T = tokens.shape[1]
    return wte[tokens] + wpe[:T], (tokens, wte, wpe)  # [B, T, C] from [B, T], [V, C], [T, C]


def embedding_backward(dx: Array, cache: Any) -> tuple[Array, Array]:
    tokens, wte, wpe = cache
    dwte, dwpe = np.zeros_like(wte), np.zeros_like(wpe)
    np.add.at(dwte, tokens, dx)  # [V, C]; unlike dwte[tokens] += dx, it adds repeated tokens up
    dwpe[: tokens.shape[1]] = dx.sum(axis=0)  # [T, C]
    return dwte, dwpe


# ---- Softmax and cross-entropy ---------------------------------------------------------------
#
# The logits become probabilities p by a softmax, and the loss is -log p[target], averaged over all
# B x T targets. The gradient is the simplest formula of all: what the model said minus the truth.


def cross_entropy_forward(logits: Array, targets: Array) -> tuple[float, Any]:
    shifted = logits - logits.max(axis=-1, keepdims=True)  # [B, T, V]
    log_p = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))  # [B, T, V]
    picked = np.take_along_axis(log_p, targets[..., None], axis=-1)  # [B, T, 1]
    return -float(picked.mean()), (log_p, targets)


def cross_entropy_backward(cache: Any) -> Array:
    log_p, targets = cache
    one_hot = np.arange(log_p.shape[-1]) == targets[..., None]  # [B, T, V]
    return np.asarray((np.exp(log_p) - one_hot) / targets.size)  # [B, T, V]


# ---- The block -------------------------------------------------------------------------------
#
# L of these make the network. The residual stream x passes through; attention and then the MLP
# each read a normalised copy of it and add what they found. Because of "x + f(x)" the gradient has
# a straight way back: it passes unchanged, and the gradient through f is added to it.


def layer(params: Params, name: str) -> tuple[Array, Array | None]:
    """The weight and the bias (None in a model without biases) of the layer `name`."""
    return params[name + ".weight"], params.get(name + ".bias")


def block_forward(x: Array, params: Params, h: str, n_head: int) -> tuple[Array, Any]:
    a, ln_1 = layernorm_forward(x, *layer(params, h + "ln_1"))  # [B, T, C]
    qkv, c_attn = linear_forward(a, *layer(params, h + "attn.c_attn"))  # [B, T, 3C]
    a, attention = attention_forward(qkv, n_head)  # [B, T, C]
    a, c_proj = linear_forward(a, *layer(params, h + "attn.c_proj"))  # [B, T, C]
    x = x + a

    m, ln_2 = layernorm_forward(x, *layer(params, h + "ln_2"))  # [B, T, C]
    m, c_fc = linear_forward(m, *layer(params, h + "mlp.c_fc"))  # [B, T, F]
    m, gelu = gelu_forward(m)  # [B, T, F]
    m, mlp_proj = linear_forward(m, *layer(params, h + "mlp.c_proj"))  # [B, T, C]
    return x + m, (ln_1, c_attn, attention, c_proj, ln_2, c_fc, gelu, mlp_proj)


def block_backward(dx: Array, cache: Any, grads: Params, h: str) -> Array:
    """The same lines from the last to the first; weight gradients go into `grads`."""
    ln_1, c_attn, attention, c_proj, ln_2, c_fc, gelu, mlp_proj = cache

    dm = store(grads, h + "mlp.c_proj", *linear_backward(dx, mlp_proj))  # [B, T, F]
    dm = gelu_backward(dm, gelu)  # [B, T, F]
    dm = store(grads, h + "mlp.c_fc", *linear_backward(dm, c_fc))  # [B, T, C]
    dx = dx + store(grads, h + "ln_2", *layernorm_backward(dm, ln_2))  # [B, T, C]

    da = store(grads, h + "attn.c_proj", *linear_backward(dx, c_proj))  # [B, T, C]
    da = attention_backward(da, attention)  # [B, T, 3C]
    da = store(grads, h + "attn.c_attn", *linear_backward(da, c_attn))  # [B, T, C]
    return dx + store(grads, h + "ln_1", *layernorm_backward(da, ln_1))  # [B, T, C]


# ---- The model -------------------------------------------------------------------------------


def init(config: Config, seed: int, dtype: DTypeLike = np.float32) -> Params:
    """Random weights as GPT-2 draws them, by name.

    Matrices and embeddings are normal with deviation 0.02, so that the first predictions are
    nearly uniform and the first loss is near log V. The two projections of each block that write
    into the residual stream are smaller by sqrt(2 L): 2 L such terms add up in it. Biases start
    at 0, and the weights of the layer norms at 1.
    """
    rng = np.random.default_rng(seed)
    V, T, C, F = config.vocab_size, config.block_size, config.n_embd, 4 * config.n_embd
    residual = 1.0 / math.sqrt(2 * config.n_layer)
    params: Params = {}

    def add(name: str, *shape: int, bias: bool = config.bias, scale: float = 1.0) -> None:
        w = np.ones(shape) if len(shape) == 1 else 0.02 * scale * rng.standard_normal(shape)
        params[name + ".weight"] = w.astype(dtype)
        if bias:
            params[name + ".bias"] = np.zeros(shape[-1], dtype)

    add("transformer.wte", V, C, bias=False)
    add("transformer.wpe", T, C, bias=False)
    for h in (f"transformer.h.{i}." for i in range(config.n_layer)):
        add(h + "ln_1", C)
        add(h + "attn.c_attn", C, 3 * C)
        add(h + "attn.c_proj", C, C, scale=residual)
        add(h + "ln_2", C)
        add(h + "mlp.c_fc", C, F)
        add(h + "mlp.c_proj", F, C, scale=residual)
    add("transformer.ln_f", C)
    if not config.tie_embeddings:
        add("lm_head", V, C, bias=False)
    return params


def predict(params: Params, config: Config, tokens: Array) -> tuple[Array, Any]:
    """The logits [B, T, V] of the token that follows each of `tokens` [B, T], and the cache."""
    wte, wpe = params["transformer.wte.weight"], params["transformer.wpe.weight"]
    x, embedding = embedding_forward(tokens, wte, wpe)  # [B, T, C]
    blocks = []
    for i in range(config.n_layer):
        x, block = block_forward(x, params, f"transformer.h.{i}.", config.n_head)  # [B, T, C]
        blocks.append(block)
    x, ln_f = layernorm_forward(x, *layer(params, "transformer.ln_f"))  # [B, T, C]
    logits, head = linear_forward(x, params[config.head].T, None)  # [B, T, V]
    return logits, (embedding, blocks, ln_f, head)


def forward(params: Params, config: Config, tokens: Array, targets: Array) -> tuple[float, Any]:
    """The mean cross-entropy of `targets` [B, T] given `tokens` [B, T], and the cache."""
    logits, layers = predict(params, config, tokens)
    loss, cross_entropy = cross_entropy_forward(logits, targets)
    return loss, (layers, cross_entropy)


def backward(params: Params, config: Config, cache: Any) -> Params:
    """The gradient of the loss with respect to every weight: the same names and shapes."""
    (embedding, blocks, ln_f, head), cross_entropy = cache
    grads: Params = {}
    dlogits = cross_entropy_backward(cross_entropy)  # [B, T, V]
    dx, dhead, _ = linear_backward(dlogits, head)  # [B, T, C], [C, V]
    dx = store(grads, "transformer.ln_f", *layernorm_backward(dx, ln_f))  # [B, T, C]
    for i in reversed(range(config.n_layer)):
        dx = block_backward(dx, blocks[i], grads, f"transformer.h.{i}.")  # [B, T, C]
    dwte, grads["transformer.wpe.weight"] = embedding_backward(dx, embedding)  # [V, C], [T, C]
    grads["transformer.wte.weight"] = dwte
    # A tied head is the same weight used twice, so its two gradients add up.
    grads[config.head] = dwte + dhead.T if config.tie_embeddings else dhead.T
    return {name: grads[name] for name in params}  # this drops db where the model has no biases


def store(grads: Params, name: str, dx: Array, dw: Array, db: Array) -> Array:
    """File the gradients of the layer `name`, and pass on the gradient of its input."""
    grads[name + ".weight"], grads[name + ".bias"] = dw, db
    return dx


# ---- AdamW -----------------------------------------------------------------------------------
#
# Adam keeps two running averages of each weight's gradient g: m of g, v of g^2. A step is about lr
# times m / sqrt(v): its size does not depend on the scale of the gradient, only its steadiness.
# Both averages start at 0 and are too small at first; dividing by 1 - beta^t corrects that. Weight
# decay pulls the matrices towards 0 by itself ("decoupled", the W) and leaves biases and norms be.


@dataclass(frozen=True)
class Recipe:
    """How to train: everything that the optimizer and its schedule need to know."""

    steps: int = 500
    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup: int = 100  # steps
    betas: tuple[float, float] = (0.9, 0.95)  # how slowly m and v forget
    eps: float = 1e-8  # keeps the division finite where v is 0
    weight_decay: float = 0.1
    grad_clip: float = 1.0


def adamw(params: Params, grads: Params, m: Params, v: Params, step: int, recipe: Recipe) -> None:
    """The update of `step`, from 0, in place on the weights and both averages."""
    lr, (beta1, beta2) = learning_rate(step, recipe), recipe.betas
    for name, w in params.items():
        g = grads[name]
        m[name] += (1.0 - beta1) * (g - m[name])
        v[name] += (1.0 - beta2) * (g * g - v[name])
        m_hat = m[name] / (1.0 - beta1 ** (step + 1))
        v_hat = v[name] / (1.0 - beta2 ** (step + 1))
        if w.ndim >= 2:
            w -= lr * recipe.weight_decay * w
        w -= lr * m_hat / (np.sqrt(v_hat) + recipe.eps)


def clip(grads: Params, limit: float) -> None:
    """Scale the gradients, in place, so that their joint norm is at most `limit` (0: no limit).

    One odd batch can then not throw the weights far away.
    """
    norm = math.sqrt(sum(float(np.square(g, dtype=np.float64).sum()) for g in grads.values()))
    if 0.0 < limit < norm:
        for g in grads.values():
            g *= limit / norm


def learning_rate(step: int, recipe: Recipe) -> float:
    """Linear warmup to `lr`, while Adam's averages are still poor, then a cosine to `min_lr`."""
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / (recipe.warmup + 1)
    t = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)  # from 0 to 1
    return recipe.min_lr + 0.5 * (1.0 + math.cos(math.pi * t)) * (recipe.lr - recipe.min_lr)


# ---- Training --------------------------------------------------------------------------------


def train(
    params: Params, config: Config, batches: Iterable[tuple[Array, Array]], recipe: Recipe
) -> Iterator[float]:
    """Train `params` in place on batches of tokens and targets, both [B, T]; yield each loss."""
    m, v = ({name: np.zeros_like(w) for name, w in params.items()} for _ in range(2))
    for step, (tokens, targets) in zip(range(recipe.steps), batches, strict=False):
        loss, cache = forward(params, config, tokens, targets)
        grads = backward(params, config, cache)
        clip(grads, recipe.grad_clip)
        adamw(params, grads, m, v, step, recipe)
        yield loss


def windows(data: Array, starts: Array, T: int) -> tuple[Array, Array]:
    """The windows of T tokens at `starts` [B], and as targets the same windows one token later."""
    index = starts[:, None] + np.arange(T)  # [B, T]
    return data[index], data[index + 1]


def evaluate(params: Params, config: Config, data: Array) -> float:
    """The mean loss over `data`, in windows side by side (a last, shorter one is left out)."""
    T = config.block_size
    starts = np.arange(0, len(data) - T, T)
    losses = [forward(params, config, *windows(data, at, T))[0] for at in starts[:, None]]
    return sum(losses) / len(losses)


# ---- Sampling --------------------------------------------------------------------------------


def generate(
    params: Params, config: Config, tokens: list[int], count: int, rng: Rng, temperature: float
) -> Iterator[int]:
    """Continue `tokens` by `count` tokens: predict, draw one, append it, repeat.

    The temperature divides the logits: below 1 the likely tokens become likelier, and at 0 the
    likeliest is always taken. A text longer than the context is seen through its last part.
    Everything is computed anew for each token; keeping k and v of the past would save most of it.
    """
    tokens = list(tokens)
    for _ in range(count):
        context = np.array([tokens[-config.block_size :]])  # [1, T]
        logits = predict(params, config, context)[0][0, -1].astype(np.float64)  # [V]
        if temperature == 0.0:
            token = int(logits.argmax())
        else:
            p = np.exp((logits - logits.max()) / temperature)
            token = int(rng.choice(len(p), p=p / p.sum()))
        tokens.append(token)
        yield token


# ---- The command -----------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a character GPT-2 on a text and sample it.")
    parser.add_argument("textfile", type=Path, help="a UTF-8 text")
    sizes = {"batch-size": 12, "n-layer": 4, "n-head": 4, "n-embd": 128, "block-size": 64}
    sizes |= {"steps": Recipe.steps, "warmup": Recipe.warmup, "sample": 300, "seed": 0}
    rates = {"lr": Recipe.lr, "min-lr": Recipe.min_lr, "temperature": 0.8}
    for name, default in {**sizes, **rates}.items():
        parser.add_argument(
            f"--{name}", type=type(default), default=default, help="default %(default)s"
        )
    parser.add_argument("--prompt", default="\n")
    args = parser.parse_args()

    try:
        text = args.textfile.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"cannot read {args.textfile}: {error}")
    if args.n_embd % args.n_head:
        parser.error(f"--n-embd {args.n_embd} is not a multiple of --n-head {args.n_head}")
    if len(text) < 10 * (args.block_size + 2):
        parser.error(f"{args.textfile} is too short for --block-size {args.block_size}")

    # A vocabulary of characters: a token is the place of a character in the sorted list of them.
    chars = sorted(set(text))
    ids = {char: i for i, char in enumerate(chars)}
    if not args.prompt or not set(args.prompt) <= set(chars):
        parser.error("--prompt needs one or more characters, all of which occur in the text")
    data = np.array([ids[char] for char in text])
    split = len(data) - len(data) // 10  # the last tenth is kept apart, to measure on unseen text

    config = Config(len(chars), args.n_layer, args.n_head, args.n_embd, args.block_size)
    params = init(config, args.seed)
    size = sum(w.size for w in params.values())
    print(f"{size:,} weights, {split:,} characters to learn from, {len(chars)} different ones")

    rng = np.random.default_rng(args.seed)
    starts = (rng.integers(0, split - args.block_size, size=args.batch_size) for _ in repeat(None))
    batches = (windows(data[:split], at, args.block_size) for at in starts)
    recipe = Recipe(args.steps, args.lr, args.min_lr, args.warmup)

    begin = time.perf_counter()
    for step, loss in enumerate(train(params, config, batches, recipe)):
        if step % 50 == 0 or step == recipe.steps - 1:
            print(f"step {step:5}   loss {loss:.4f}   {time.perf_counter() - begin:.0f} s")
    print(f"validation loss {evaluate(params, config, data[split:]):.4f}\n")

    prompt = [ids[char] for char in args.prompt]
    print(args.prompt, end="")
    for token in generate(params, config, prompt, args.sample, rng, args.temperature):
        print(chars[token], end="", flush=True)
    print()


if __name__ == "__main__":
    main()
