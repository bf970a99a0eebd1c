"""Packed rows of the window and entry pools (spec 7.1): fp8 e4m3 with a power-of-two scale per 64 values, rotated dims in bfloat16.

A row of DIM values whose leading ROPE ones are rotated is DIM - ROPE bytes of fp8, 2 ROPE bytes of bfloat16, one ue8m0 byte per block of
64 fp8 values, and padding to a multiple of 8 that nothing reads: 584 bytes for 512 and 64. DIM / 64 is a power of two, ROPE a multiple
of 64. The pass packs the rows of its nodes and entries, attention reads every key packed, and commit moves bytes: a row has the same
value as a node of a tree and after its commit, so that the text does not depend on the tree.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

LEAST = tl.constexpr(1e-4)
"""A block's largest magnitude counts as at least this (spec 2.3)."""


def row_bytes(dim: int, rope: int) -> int:
    """Bytes of a packed row."""
    return -(-(dim + rope + (dim - rope) // 64) // 8) * 8


@triton.jit
def exponent_of(x):
    """floor(log2 |x|) of fp32; -127 for zero and subnormal numbers."""
    return ((x.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127


@triton.jit
def power_of_two(exponent):
    """2 ** exponent in fp32 for int32 exponents from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_exponent(largest):
    """Least e with largest <= 448 * 2 ** e, exactly: 448 is 1.75 * 2 ** 8."""
    mantissa = largest.to(tl.int32, bitcast=True) & 0x7FFFFF
    return exponent_of(largest) - 8 + (mantissa > 0x600000).to(tl.int32)


@triton.jit
def round_e4m3(x):
    """The e4m3 value nearest to x, |x| <= 448, ties to even and zero without a sign, still in fp32.

    Adding 1.5 * 2 ** 23 steps leaves whole steps; the conversion that follows is exact, on a chip and in the interpreter.
    """
    shift = 1.5 * power_of_two(tl.maximum(exponent_of(x), -6) - 3 + 23)
    return (x + shift) - shift


@triton.jit
def round_bfloat16(x):
    """The bfloat16 nearest to x, ties to even, still in fp32."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def pack_rows_kernel(rows, out, DIM: tl.constexpr, ROPE: tl.constexpr, ROW: tl.constexpr):
    """Grid (R,). rows [R, DIM] -> out [R, ROW] bytes."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, DIM // 64)
    channel = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    plain = block >= ROPE // 64
    x = tl.load(rows + row * DIM + channel).to(tl.float32)
    exponent = scale_exponent(tl.maximum(tl.max(tl.abs(x), axis=1), LEAST))
    code = round_e4m3(x * power_of_two(-exponent)[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    target = out + row * ROW
    tl.store(target + channel - ROPE, code, mask=plain[:, None])
    rotated = (target + DIM - ROPE).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    tl.store(rotated + channel, round_bfloat16(x).to(tl.bfloat16), mask=(block < ROPE // 64)[:, None])
    tl.store(target + DIM + ROPE + block - ROPE // 64, (exponent + 127).to(tl.uint8), mask=plain)


@triton.jit
def decode(code, scale):
    """fp32 of e4m3 bytes and their ue8m0 bytes."""
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_packed(pointers, use, DIM: tl.constexpr, ROPE: tl.constexpr, DTYPE: tl.constexpr):
    """Values [R, DIM] of the packed rows that `pointers` [R] point at, zeros where not `use` [R]. All of them are bfloat16 numbers."""
    block, lane = tl.arange(0, DIM // 64), tl.arange(0, 64)
    channel = (block[:, None] * 64 + lane[None, :])[None, :, :]
    plain = use[:, None] & (block >= ROPE // 64)[None, :]
    turned = use[:, None] & (block < ROPE // 64)[None, :]
    scale = tl.load(pointers[:, None] + DIM + ROPE + block[None, :] - ROPE // 64, mask=plain, other=0)
    start = pointers[:, None, None]
    code = tl.load(start + channel - ROPE, mask=plain[:, :, None], other=0)
    rotated = (start + DIM - ROPE).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    rope = tl.load(rotated + channel, mask=turned[:, :, None], other=0.0)
    value = tl.where(plain[:, :, None], decode(code, scale[:, :, None]).to(tl.bfloat16), rope)
    return tl.reshape(value, [pointers.shape[0], DIM]).to(DTYPE)


@triton.jit
def load_packed_part(
    pointers, use, first: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, DTYPE: tl.constexpr
):
    """Columns first .. first + WIDTH of the same; they lie in one block of 64."""
    channel = first + tl.arange(0, WIDTH)[None, :]
    if first < ROPE:
        rotated = (pointers + DIM - ROPE).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        value = tl.load(rotated[:, None] + channel, mask=use[:, None], other=0.0).to(DTYPE)
    else:
        scale = tl.load(pointers + DIM + ROPE + (first - ROPE) // 64, mask=use, other=0)
        code = tl.load(pointers[:, None] + channel - ROPE, mask=use[:, None], other=0)
        value = decode(code, scale[:, None]).to(DTYPE)
    return value


def pack_rows(rows: torch.Tensor, rope: int) -> torch.Tensor:
    """rows [..., dim] -> bytes [..., row_bytes]; the padding is left as it was allocated."""
    *shape, dim = rows.shape
    assert rope % 64 == 0 and dim % 64 == 0 and (dim // 64).bit_count() == 1, (dim, rope)
    width = row_bytes(dim, rope)
    out = torch.empty(*shape, width, dtype=torch.uint8, device=rows.device)
    if out.numel():
        pack_rows_kernel[(out.numel() // width,)](rows, out, DIM=dim, ROPE=rope, ROW=width)
    return out


E4M3 = np.array(
    [(-1) ** (c >> 7) * ((c & 7) + 8 * (c & 120 > 0)) * 2.0 ** (max(c >> 3 & 15, 1) - 10) for c in range(256)]
)
"""Value of every e4m3 byte (4 bits of exponent, bias 7, 3 of mantissa); the two bytes that are no number are NaN."""
E4M3[[127, 255]] = np.nan


def naive_pack_block(values: np.ndarray) -> tuple[np.ndarray, int]:
    """(bytes of a block, exponent of its scale), value by value: the nearest of all numbers, of two the one with an even byte."""
    largest, exponent = max(np.abs(values).max(), np.float64(np.float32(LEAST.value))), -40
    while largest > 448 * 2.0**exponent:
        exponent += 1
    numbers = np.delete(np.arange(256), [127, 128, 255])
    codes = [min(numbers, key=lambda c: (abs(E4M3[c] - x / 2.0**exponent), c % 2)) for x in values]
    return np.array(codes, np.uint8), exponent


def naive_pack_row(row: np.ndarray, rope: int) -> np.ndarray:
    """Bytes of one row [dim] of fp32 or narrower values, the padding zero."""
    out = np.zeros(row_bytes(len(row), rope), np.uint8)
    plain = len(row) - rope
    turned = torch.from_numpy(row[:rope].astype(np.float32)).to(torch.bfloat16)
    out[plain : plain + 2 * rope] = turned.view(torch.uint8).numpy()
    for i, block in enumerate(row[rope:].reshape(-1, 64)):
        out[64 * i : 64 * (i + 1)], exponent = naive_pack_block(block)
        out[plain + 2 * rope + i] = exponent + 127
    return out


def naive_unpack(rows: np.ndarray, dim: int, rope: int) -> np.ndarray:
    """Values [..., dim] in float64 of packed rows [..., row_bytes]."""
    plain = dim - rope
    scales = np.repeat(2.0 ** (rows[..., dim + rope : dim + rope + plain // 64].astype(np.float64) - 127), 64, axis=-1)
    high = np.ascontiguousarray(rows[..., plain : plain + 2 * rope]).view("<u2").astype(np.uint32) << 16
    return np.concatenate([high.view(np.float32).astype(np.float64), E4M3[rows[..., :plain]] * scales], axis=-1)
