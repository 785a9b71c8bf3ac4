"""Keys and values of the tokens that a model has seen, for writing a text token by token."""

from __future__ import annotations

from treadle.graph.op import Graph
from treadle.graph.program import Program
from treadle.graph.value import Value
from treadle.ops.cached_attention import cached_attention

START = "start"


class Cache:
    """What `Model.hidden` reads and updates where a text is written; one for each graph.

    start: int32 [B], how many tokens of each row are in the cache already: the position of the
    first of the T tokens that the graph reads. A run-time buffer. Each layer has buffers
    `cache.<layer>.keys` and `cache.<layer>.values` [B, K, S, D], S the model's block_size, which
    all graphs of the program share.
    """

    def __init__(self, program: Program, graph: Graph, batch: int, block_size: int) -> None:
        self.program, self.block_size = program, block_size
        self.start = graph.read(program.buffer(START, (batch,), "int32", "scalar"))

    def attend(
        self,
        layer: int,
        qkv: Value,
        n_head: int,
        n_kv_head: int | None = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        name: str = "attention",
    ) -> Value:
        """`ops.attention` over the cached tokens and these, which enter the cache.

        qkv: [B, T, (n_head + 2 n_kv_head) D], y: [B, T, n_head · D]. See ops.cached_attention.
        """
        batch, _, width = qkv.shape
        heads = n_head if n_kv_head is None else n_kv_head
        shape = (batch, heads, self.block_size, width // (n_head + 2 * heads))
        keys, values = (
            qkv.graph.read(self.program.buffer(f"cache.{layer}.{kind}", shape, qkv.dtype, "cache"))
            for kind in ("keys", "values")
        )
        return cached_attention(
            qkv, keys, values, self.start, n_head, scale, window, softcap, name=name
        )
