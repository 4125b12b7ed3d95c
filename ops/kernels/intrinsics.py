"""Single-element operations emitted as LLVM IR, and the decorator all kernels share.

Numba widens 32-bit integer arithmetic to 64 bits and has no bit cast, bfloat16 or fused
multiply-add, so these are written as IR: every operation stays in 32-bit lanes and a kernel
remains one vectorised loop. No operation here may be reassociated or contracted by the compiler:
vector body, scalar remainder, other CPUs and later compilers give the same bits.

Invariant: a master weight never leaves [-CLAMP, CLAMP], CLAMP = float32 bits 0x7F7F7FFF, so that
rounding its upper half to bfloat16 cannot reach infinity (NaN and infinity map to +-CLAMP; the
finite check on gradients comes first).

This module knows nothing of arrays, threads or optimizers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numba.extending
from llvmlite import ir
from numba import types

CLAMP_BITS = 0x7F7F7FFF
FLUSH_BELOW = 1e-38
SIGN = 0x80000000

# Untyped: Numba's own annotation counts the typing context among the caller's arguments.
intrinsic: Any = numba.extending.intrinsic

_F32, _F64 = ir.FloatType(), ir.DoubleType()
_I16, _I32 = ir.IntType(16), ir.IntType(32)


def _package_digest() -> str:
    """Digest of every source file of this package: a kernel inlines functions of other files."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


_DIGEST = _package_digest()


def kernel(function: Callable[..., Any]) -> Any:
    """Compile `function` with Numba: GIL released, IEEE division, cached on disk.

    Numba's cache watches only the file of the function itself; here it also watches the rest of
    this package, whose functions are inlined. Where no cache folder is writable, or Numba's cache
    cannot be made to watch, the kernel is compiled anew in each process.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False}
    try:
        compiled = numba.njit(cache=True, **options)(function)
        index = compiled._cache._cache_file
        index._source_stamp = (index._source_stamp, _DIGEST)
    except (RuntimeError, AttributeError):
        return numba.njit(**options)(function)
    return compiled


def _c32(value: int) -> ir.Constant:
    return ir.Constant(_I32, value)


def _call(builder: ir.IRBuilder, name: str, *args: ir.Value) -> ir.Value:
    """Call an LLVM intrinsic on float32 operands."""
    kind = ir.FunctionType(_F32, [_F32] * len(args))
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, kind, name)
    return builder.call(function, list(args))


def _half_up(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    return builder.trunc(builder.lshr(builder.add(bits, _c32(0x8000)), _c32(16)), _I16)


@intrinsic
def fma(typingctx, a, b, c):  # type: ignore[no-untyped-def]
    """a * b + c of float32, rounded once."""
    if not all(kind == types.float32 for kind in (a, b, c)):
        return None

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return _call(builder, "llvm.fma.f32", *args)

    return types.float32(a, b, c), codegen


@intrinsic
def sqrt(typingctx, x):  # type: ignore[no-untyped-def]
    """Correctly rounded square root of a float32."""
    if x != types.float32:
        return None

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return _call(builder, "llvm.sqrt.f32", *args)

    return types.float32(x), codegen


@intrinsic
def flush(typingctx, x):  # type: ignore[no-untyped-def]
    """+0 where |x| < 1e-38 (float32), else x; -0 becomes +0, NaN stays."""
    if x != types.float32:
        return None

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        magnitude = _call(builder, "llvm.fabs.f32", args[0])
        small = builder.fcmp_ordered("<", magnitude, ir.Constant(_F32, FLUSH_BELOW))
        return builder.select(small, ir.Constant(_F32, 0.0), args[0])

    return types.float32(x), codegen


@intrinsic
def clamp(typingctx, x):  # type: ignore[no-untyped-def]
    """x with its magnitude limited to CLAMP; the sign is kept, NaN becomes +-CLAMP."""
    if x != types.float32:
        return None

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        bits = builder.bitcast(args[0], _I32)
        magnitude = builder.and_(bits, _c32(SIGN - 1))
        inside = builder.icmp_unsigned("<", magnitude, _c32(CLAMP_BITS))
        magnitude = builder.select(inside, magnitude, _c32(CLAMP_BITS))
        return builder.bitcast(builder.or_(builder.and_(bits, _c32(SIGN)), magnitude), _F32)

    return types.float32(x), codegen


@intrinsic
def weight_of(typingctx, x):  # type: ignore[no-untyped-def]
    """bfloat16 bits (uint16) of a clamped master: (bits + 0x8000) >> 16."""
    if x != types.float32:
        return None

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return _half_up(builder, builder.bitcast(args[0], _I32))

    return types.uint16(x), codegen


@intrinsic
def residual_of(typingctx, x):  # type: ignore[no-untyped-def]
    """int16 difference bits - (weight << 16) of a clamped master: its lower half, signed."""
    if x != types.float32:
        return None

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.trunc(builder.bitcast(args[0], _I32), _I16)

    return types.int16(x), codegen


@intrinsic
def master_of(typingctx, weight, residual):  # type: ignore[no-untyped-def]
    """float32 master of bits (weight << 16) + residual."""
    if weight != types.uint16 or residual != types.int16:
        return None

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        upper = builder.shl(builder.zext(args[0], _I32), _c32(16))
        return builder.bitcast(builder.add(upper, builder.sext(args[1], _I32)), _F32)

    return types.float32(weight, residual), codegen


@intrinsic
def widen(typingctx, x):  # type: ignore[no-untyped-def]
    """float32 value of a bfloat16 (uint16 bits) or of a float32, exactly."""
    if x not in (types.uint16, types.float32):
        return None

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        if signature.args[0] == types.float32:
            return args[0]
        return builder.bitcast(builder.shl(builder.zext(args[0], _I32), _c32(16)), _F32)

    return types.float32(x), codegen


@intrinsic
def bf16_of(typingctx, x):  # type: ignore[no-untyped-def]
    """bfloat16 bits of a float32 rounded half up in magnitude; NaN stays NaN, infinity stays."""
    if x != types.float32:
        return None

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        bits = builder.bitcast(args[0], _I32)
        upper = builder.trunc(builder.lshr(bits, _c32(16)), _I16)
        quiet = builder.or_(upper, ir.Constant(_I16, 0x0040))
        nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.select(nan, quiet, _half_up(builder, bits))

    return types.uint16(x), codegen


@intrinsic
def f16_of(typingctx, x):  # type: ignore[no-untyped-def]
    """float16 bits (uint16) of a float32, to nearest even as IEEE 754 has it.

    Integer arithmetic rather than a conversion instruction, which not every CPU has. Below 2^-14
    adding 0.5 lets the float adder round at float16's fixed denormal spacing of 2^-24.
    """
    if x != types.float32:
        return None

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        bits = builder.bitcast(args[0], _I32)
        magnitude = builder.and_(bits, _c32(SIGN - 1))
        sign = builder.lshr(builder.and_(bits, _c32(SIGN)), _c32(16))
        odd = builder.and_(builder.lshr(magnitude, _c32(13)), _c32(1))
        rebias = _c32((0xFFF - (112 << 23)) & 0xFFFFFFFF)
        normal = builder.lshr(builder.add(builder.add(magnitude, rebias), odd), _c32(13))
        shifted = builder.fadd(builder.bitcast(magnitude, _F32), ir.Constant(_F32, 0.5))
        denormal = builder.sub(builder.bitcast(shifted, _I32), _c32(0x3F000000))
        small = builder.icmp_unsigned("<", magnitude, _c32(0x38800000))
        result = builder.select(small, denormal, normal)
        large = builder.icmp_unsigned(">=", magnitude, _c32(0x47800000))
        result = builder.select(large, _c32(0x7C00), result)
        nan = builder.fcmp_unordered("uno", args[0], args[0])
        payload = builder.and_(builder.lshr(magnitude, _c32(13)), _c32(0x3FF))
        result = builder.select(nan, builder.or_(payload, _c32(0x7E00)), result)
        return builder.trunc(builder.or_(result, sign), _I16)

    return types.uint16(x), codegen


@intrinsic
def overflow_mark(typingctx, x, mark):  # type: ignore[no-untyped-def]
    """`mark` (int32) with its sign bit set too when float32 x is infinite or NaN."""
    if x != types.float32 or mark != types.int32:
        return None

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        magnitude = builder.and_(builder.bitcast(args[0], _I32), _c32(SIGN - 1))
        return builder.or_(args[1], builder.add(magnitude, _c32(0x00800000)))

    return types.int32(x, mark), codegen


@intrinsic
def to_f64(typingctx, x):  # type: ignore[no-untyped-def]
    """float64 value of a float32, exactly."""
    if x != types.float32:
        return None

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.fpext(args[0], _F64)

    return types.float64(x), codegen
