"""Matrix products through cuBLASLt: the launches that ops/vendor.py makes.

cuBLASLt's matrices are column by column, ours row by row: C = A · B is Cᵀ = Bᵀ · Aᵀ there, so that
our B is its first operand and our A its second. Algorithms are chosen by measurement at first use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from treadle.backends import gpu, kernel_cache
from treadle.errors import BackendError

WORKSPACE = 32 << 20  # most that an algorithm may take
CANDIDATES = 8
REAL = {"f32": 0, "bf16": 14}  # cudaDataType
COMPUTE_F32, COMPUTE_TF32 = 68, 77  # cublasComputeType_t
DEFAULT, BIAS, GELU_AUX, DGELU = 1, 4, 32 | 128, 64 | 128  # cublasLtEpilogue_t
# Ways to add up the parts of a split sum: all but with atomics, whose order is that of chance.
DETERMINISTIC_SCHEMES = 0x2 | 0x4


class CublasLt:
    """A handle, and the calls bound to it."""

    def __init__(self, backend: Any, libraries: Any) -> None:
        try:
            from nvmath.bindings import cublasLt as lt
        except ImportError as error:
            raise BackendError(
                f"--device cuda needs nvmath-python ({error}): pip install 'treadle[cuda]', "
                "or use --device cpu"
            ) from None
        self.lt, self.backend, self.libraries = lt, backend, libraries
        self.handle = lt.create()
        # While algorithms are measured, on the first stream alone.
        self.workspaces = [libraries.allocate(WORKSPACE)]
        self.streams = [int(stream.handle) for stream in backend.streams]
        self.file = "cublaslt-" + kernel_cache.digest(
            *backend.identity().values(), str(lt.get_version())
        )
        self.known = kernel_cache.load_choices(self.file + ".json")
        self.one, self.zero = np.ones(1, np.float32), np.zeros(1, np.float32)

    def bind(self, call: gpu.Call, pointers: list[int]) -> Any:
        """A function that puts a product on a stream, by its number. Arguments: y, pre, a, b,
        bias, residual; dims as ops/vendor.py writes them. pre: GELU's argument, which the product
        writes; `matmul_slope` reads it instead and multiplies by GELU's slope."""
        y, pre, a, b, bias, residual = pointers
        m, n, k, ta, tb, lda, ldb, ldy, accumulate = call.dims
        kinds = dict(call.grids[0].defines)
        operands, out = REAL[str(kinds["T"])], REAL[str(kinds["U"])]
        lt = self.lt
        compute = COMPUTE_F32
        if self.backend.tf32 and operands == REAL["f32"]:
            compute = COMPUTE_TF32
        description = lt.matmul_desc_create(compute, REAL["f32"])
        attribute = lt.MatmulDescAttribute
        self._set(description, attribute.TRANSA, int(tb), np.int32)
        self._set(description, attribute.TRANSB, int(ta), np.int32)
        with_pre = DGELU if call.launch.kernel == "matmul_slope" else GELU_AUX
        epilogue = (BIAS if bias else 0) | (with_pre if pre else 0) or DEFAULT
        self._set(description, attribute.EPILOGUE, epilogue, np.int32)
        if bias:
            self._set(description, attribute.BIAS_POINTER, bias, np.int64)
        if pre:
            self._set(description, attribute.EPILOGUE_AUX_POINTER, pre, np.int64)
            self._set(description, attribute.EPILOGUE_AUX_LD, n, np.int64)
        first = lt.matrix_layout_create(operands, *((k, n) if tb else (n, k)), ldb)
        second = lt.matrix_layout_create(operands, *((m, k) if ta else (k, m)), lda)
        result = lt.matrix_layout_create(out, n, m, ldy)
        added = y if accumulate else residual
        alpha, beta = self.one, self.one if added else self.zero
        added = added or y
        workspaces, streams = self.workspaces, self.streams  # which `settle` changes

        def start(algorithm: int, workspace: int, stream: int = 0) -> None:
            lt.matmul(
                *(self.handle, description, alpha.ctypes.data, b, first, a, second),
                *(beta.ctypes.data, added, result, y, result),
                *(algorithm, workspaces[stream] if workspace else 0, workspace, streams[stream]),
            )

        found = self._algorithms(description, first, second, result)
        key = f"{call.dims} {sorted(kinds.items())} {epilogue} {bool(added != y)}"
        chosen = found[self._fastest(key, found, start)]
        return _Product(chosen, start)

    def settle(self, needs: list[int]) -> None:
        """Every stream gets the workspace that its products need."""
        (measuring,) = self.workspaces
        self.libraries.give_back(measuring)
        self.workspaces[:] = [self.libraries.allocate(n) if n else 0 for n in needs]

    def _set(self, description: int, attribute: Any, value: int, dtype: Any) -> None:
        data = np.array([value], dtype)
        self.lt.matmul_desc_set_attribute(description, attribute, data.ctypes.data, data.nbytes)

    def _algorithms(self, description: int, first: int, second: int, result: int) -> list[Any]:
        """What cuBLASLt's heuristic offers, the likely best first."""
        lt = self.lt
        preference = lt.matmul_preference_create()
        attribute = lt.MatmulPreferenceAttribute
        values: list[tuple[Any, np.ndarray]] = [
            (attribute.MAX_WORKSPACE_BYTES, np.array([WORKSPACE], np.uint64))
        ]
        if self.backend.deterministic:
            schemes = np.array([DETERMINISTIC_SCHEMES], np.uint32)
            values.append((attribute.REDUCTION_SCHEME_MASK, schemes))
        for name, data in values:
            lt.matmul_preference_set_attribute(preference, name, data.ctypes.data, data.nbytes)
        found, count = lt.MatmulHeuristicResult(CANDIDATES), np.zeros(1, np.int32)
        lt.matmul_algo_get_heuristic(
            *(self.handle, description, first, second, result, result, preference),
            *(CANDIDATES, found.ptr, count.ctypes.data),
        )
        lt.matmul_preference_destroy(preference)
        if count[0] == 0:
            raise BackendError("cuBLASLt offers no algorithm for a matrix product")
        return [_Algorithm(found, i) for i in range(int(count[0]))]

    def _fastest(self, key: str, found: list[Any], start: Any) -> int:
        """The index of the algorithm to use: as this run began with, as found before, or measured
        now. Algorithms differ in the order of their sums, so it can change bits."""
        choices = self.backend.choices
        if key in choices:
            self.known[key] = choices[key]
        if key not in self.known:
            times = []
            for algorithm in found:
                try:
                    run = partial(start, algorithm.ptr, algorithm.workspace)
                    times.append(gpu.fastest(run, self.backend.stream.sync))
                except Exception:
                    times.append(float("inf"))
            # Of several processes that measure at once the first decides, so that their bits agree.
            measured = {key: times.index(min(times))}
            self.known |= kernel_cache.store_choices(self.file + ".json", measured)
        choices[key] = min(self.known[key], len(found) - 1)
        return choices[key]

    def close(self) -> None:
        """Give the handle back."""
        self.lt.destroy(self.handle)


class _Algorithm:
    """One of the heuristic's results, which begins with the algorithm itself. workspace: bytes."""

    def __init__(self, results: Any, index: int) -> None:
        self.results = results  # keeps the memory alive
        one = results[index : index + 1]
        self.ptr = int(one.ptr)
        self.workspace = int(np.ravel(one.workspace_size)[0])


class _Product:
    """A bound product. Called with a stream's number it starts there. workspace: bytes."""

    def __init__(self, algorithm: _Algorithm, start: Callable[[int, int, int], None]) -> None:
        self.algorithm, self.start, self.workspace = algorithm, start, algorithm.workspace

    def __call__(self, stream: int) -> None:
        self.start(self.algorithm.ptr, self.workspace, stream)
