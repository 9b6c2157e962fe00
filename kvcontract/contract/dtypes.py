"""The closed table of element types a field may have.

Names are those of torch; the value is the width of one element in bits.
"""

from __future__ import annotations

from typing import Final

DTYPE_BITS: Final[dict[str, int]] = {
    "float64": 64,
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "float8_e8m0fnu": 8,
    "float4_e2m1": 4,
    "int64": 64,
    "int32": 32,
    "int16": 16,
    "int8": 8,
    "int4": 4,
    "uint8": 8,
    "uint4": 4,
    "bool": 8,
}

_FLOATS: Final = frozenset({"float32", "float64"})

WIDER: Final[dict[str, frozenset[str]]] = {
    "float32": frozenset({"float64"}),
    "float16": _FLOATS,
    "bfloat16": _FLOATS,
    "float8_e4m3fn": _FLOATS | {"float16", "bfloat16"},
    "float8_e5m2": _FLOATS | {"float16", "bfloat16"},
    "int8": frozenset({"int16", "int32", "int64"}),
    "uint8": frozenset({"int16", "int32", "int64"}),
    "int16": frozenset({"int32", "int64"}),
    "int32": frozenset({"int64"}),
}
"""Per dtype, those that hold each of its values: widening and narrowing again gives the value back."""
