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
        self.plans: dict[tuple[Any, ...], tuple[Any, dict[str, Any]]] = {}  # layers share them
        self.handle = cudnn.create_handle()
        cudnn.set_stream(self.handle, int(backend.stream.handle))

    def bind(self, call: gpu.Call, pointers: list[int]) -> Any:
        """A function that puts attention, or its gradient, on the first stream."""
        h, k, d = call.dims[2:]
        if call.launch.kernel == "sdpa_forward":
            y, lse, qkv = pointers
            places = {"y": y} | ({"lse": lse} if lse else {})
        else:
            dqkv, dy, qkv, y, lse = pointers
            places = {"y": y, "lse": lse, "dy": dy}
        for name, at in (("q", 0), ("k", h * d), ("v", (h + k) * d)):
            places[name] = qkv + at * 2
            if "dy" in places:
                places[f"d{name}"] = dqkv + at * 2
        key = (call.launch.kernel, tuple(call.dims), float(call.launch.nums[0]), "lse" in places)
        if key not in self.plans:
            self.plans[key] = self._plan(*key)
        graph, tensors = self.plans[key]
        variants = {tensor: places[name] for name, tensor in tensors.items()}
        workspace = self.libraries.for_attention(max(1, int(graph.get_workspace_size())))
        handle = self.handle
        return lambda _: graph.execute(variants, workspace, handle=handle)

    def _plan(
        self, kernel: str, dims: tuple[int, ...], scale: float, statistics_wanted: bool
    ) -> tuple[Any, dict[str, Any]]:
        """A built graph, and its tensors by name."""
        b, t, h, k, d = dims
        graph = self.cudnn.pygraph(
            io_data_type=self.cudnn.data_type.BFLOAT16,
            intermediate_data_type=self.cudnn.data_type.FLOAT,
            compute_data_type=self.cudnn.data_type.FLOAT,
            handle=self.handle,
        )
        row = (h + 2 * k) * d
        heads_of = {"q": h, "k": k, "v": k}
        packed = [t * row, d, row, 1]
        plain = [t * h * d, d, h * d, 1]
        inputs = {
            name: graph.tensor(name=name, dim=[b, heads, t, d], stride=packed)
            for name, heads in heads_of.items()
        }
        statistics = {
            "dim": [b, h, t, 1],
            "stride": [h * t, t, 1, 1],
            "data_type": self.cudnn.data_type.FLOAT,
        }
        tensors: dict[str, Any] = dict(inputs)
        if kernel == "sdpa_forward":
            out, stats = graph.sdpa(
                **inputs,
                attn_scale=scale,
                use_causal_mask=True,
                is_inference=not statistics_wanted,
                name="sdpa",
            )
            out.set_output(True).set_dim([b, h, t, d]).set_stride(plain)
            tensors["y"] = out
            if statistics_wanted:
                stats.set_output(True).set_dim(statistics["dim"])
                stats.set_stride(statistics["stride"]).set_data_type(statistics["data_type"])
                tensors["lse"] = stats
        else:
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
            for gradient, (name, heads) in zip(gradients, heads_of.items(), strict=True):
                gradient.set_output(True).set_dim([b, heads, t, d]).set_stride(packed)
                tensors[f"d{name}"] = gradient
            tensors |= {"y": o, "dy": do, "lse": stats}
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self.cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        return graph, tensors

    def close(self) -> None:
        """Give the handle back."""
        self.cudnn.destroy_handle(self.handle)
