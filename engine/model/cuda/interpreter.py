"""Mends Triton's interpreter, which runs the kernels where there is no GPU.

On a GPU an element of a tile's product depends on its own row and column alone. The interpreter
asks numpy for the whole tile, whose libraries sum the last rows of a tile otherwise than the first;
it takes the bits of bfloat16 numbers for integers there, and cuts them off where hardware rounds to
the nearest. So the product is made here, one rank after the other in float32, which is elementwise;
and so is the rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

#: "1" in this environment variable has Triton interpret kernels, on CPU tensors.
VARIABLE = "TRITON_INTERPRET"


def mend() -> None:
    """Replaces the interpreter's product of two tiles and its rounding to bfloat16. Triton is
    imported by this."""
    import triton.language as tl
    from triton.runtime import interpreter

    def create_dot(_: Any, a: Any, b: Any, d: Any, *_more: Any) -> Any:
        left, right = (
            _widen(side.data, is_bfloat16=side.dtype.scalar == tl.bfloat16) for side in (a, b)
        )
        return interpreter.TensorHandle(_product(left, right, d.data), d.dtype.scalar)

    def cast(self: Any, source: Any, kind: Any) -> Any:
        before, after = source.dtype.scalar, kind.scalar
        if before == tl.float32 and after == tl.bfloat16:
            return interpreter.TensorHandle(_round(source.data), after)
        if before == tl.bfloat16 and after == tl.float32:
            return interpreter.TensorHandle(_widen(source.data, is_bfloat16=True), after)
        return plain_cast(self, source, kind)

    builder = interpreter.InterpreterBuilder
    plain_cast = builder.cast_impl
    builder.create_dot, builder.cast_impl = create_dot, cast


def _round(data: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16 numbers; of two that are as near, the even one."""
    bits = np.ascontiguousarray(data).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)


def _widen(data: NDArray[Any], *, is_bfloat16: bool) -> NDArray[np.float32]:
    if is_bfloat16:
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return data.astype(np.float32)


def _product(
    left: NDArray[np.float32], right: NDArray[np.float32], start: NDArray[Any]
) -> NDArray[np.float32]:
    """start [M, N] + left [M, K] @ right [K, N], summed over K in ascending order."""
    out = start.astype(np.float32)
    ranks = np.flatnonzero(left.any(axis=0) | ~np.isfinite(right).all(axis=1))
    for k in ranks:  # what is 0 throughout adds nothing
        out += left[:, k, None] * right[k]
    return out
