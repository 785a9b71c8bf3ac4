"""Attention through cuDNN: the launches that ops/vendor.py makes.

Queries, keys and values are read straight from the packed tensor, and gradients written into it,
by strides.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from treadle.backends import gpu


@cache
def available() -> bool:
    """Whether cuDNN and its frontend are installed."""
    try:
        import cudnn

        return bool(cudnn.backend_version() >= 90000)
    except Exception:
        return False


class Cudnn:
    """A handle, and the calls bound to it."""

    def __init__(self, backend: Any, libraries: Any) -> None:
        import cudnn

        self.cudnn, self.backend, self.libraries = cudnn, backend, libraries
        self.handle = cudnn.create_handle()
        cudnn.set_stream(self.handle, int(backend.stream.handle))

    def bind(self, call: gpu.Call, pointers: list[int]) -> Any:
        """A function that puts attention, or its gradient, on the first stream."""
        b, t, h, k, d = call.dims
        scale = float(call.launch.nums[0])
        forward = call.launch.kernel == "sdpa_forward"
        graph = self.cudnn.pygraph(
            io_data_type=self.cudnn.data_type.BFLOAT16,
            intermediate_data_type=self.cudnn.data_type.FLOAT,
            compute_data_type=self.cudnn.data_type.FLOAT,
            handle=self.handle,
        )
        row = (h + 2 * k) * d
        packed = {
            name: (heads, at * d, [t * row, d, row, 1])
            for name, heads, at in (("q", h, 0), ("k", k, h), ("v", k, h + k))
        }
        plain = [t * h * d, d, h * d, 1]
        inputs = {
            name: graph.tensor(name=name, dim=[b, heads, t, d], stride=stride)
            for name, (heads, _, stride) in packed.items()
        }
        statistics = {
            "dim": [b, h, t, 1],
            "stride": [h * t, t, 1, 1],
            "data_type": self.cudnn.data_type.FLOAT,
        }
        variants: dict[Any, int] = {}
        if forward:
            y, lse, qkv = pointers
            out, stats = graph.sdpa(
                **inputs,
                attn_scale=scale,
                use_causal_mask=True,
                is_inference=lse == 0,
                name="sdpa",
            )
            out.set_output(True).set_dim([b, h, t, d]).set_stride(plain)
            variants[out] = y
            if lse:
                stats.set_output(True).set_dim(statistics["dim"])
                stats.set_stride(statistics["stride"]).set_data_type(statistics["data_type"])
                variants[stats] = lse
        else:
            dqkv, dy, qkv, y, lse = pointers
            o = graph.tensor(name="o", dim=[b, h, t, d], stride=plain)
            do = graph.tensor(name="do", dim=[b, h, t, d], stride=plain)
            stats = graph.tensor(name="stats", **statistics)
            gradients = graph.sdpa_backward(
                **inputs,
                o=o,
                dO=do,
                stats=stats,
                attn_scale=scale,
                use_causal_mask=True,
                use_deterministic_algorithm=self.backend.deterministic,
                name="sdpa_backward",
            )
            for gradient, (heads, at, stride) in zip(gradients, packed.values(), strict=True):
                gradient.set_output(True).set_dim([b, heads, t, d]).set_stride(stride)
                variants[gradient] = dqkv + at * 2
            variants |= {o: y, do: dy, stats: lse}
        for name, (_, at, _) in packed.items():
            variants[inputs[name]] = qkv + at * 2
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self.cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        workspace = self.libraries.for_attention(max(1, int(graph.get_workspace_size())))
        handle = self.handle
        return lambda _: graph.execute(variants, workspace, handle=handle)

    def close(self) -> None:
        """Give the handle back."""
        self.cudnn.destroy_handle(self.handle)
