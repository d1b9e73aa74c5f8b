#!/usr/bin/env python3
"""Makes crates/entrokv-kernels/tests/fixtures/dequantize.json: random blocks of every weight type and their values.

The reference is PyPI's gguf 0.19.0 (gguf.quants.dequantize), numpy's PCG64 with seed 20260 decides the bytes. Per
type: blocks whose f16 scales are drawn from sane values, then blocks whose scales are the extremes of f16 (zero,
negative zero, the least denormal, the greatest denormal, the least normal, the greatest finite value and its negative,
both infinities). Everything else in a block is uniformly random bytes. NaN is left out: its payload is the FPU's.

    pip install gguf==0.19.0 && python3 tools/golden/dequantize.py > crates/entrokv-kernels/tests/fixtures/dequantize.json
"""

import json
import sys
from importlib.metadata import version

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

SEED = 20260
# Type: (blocks with sane scales, offsets of its f16 fields in a block).
TYPES = {
    Type.F32: (32, []),
    Type.F16: (32, []),
    Type.BF16: (32, []),
    Type.Q4_0: (4, [0]),
    Type.Q4_1: (4, [0, 2]),
    Type.Q5_0: (4, [0]),
    Type.Q5_1: (4, [0, 2]),
    Type.Q8_0: (4, [0]),
    Type.Q2_K: (2, [80, 82]),
    Type.Q3_K: (2, [108]),
    Type.Q4_K: (2, [0, 2]),
    Type.Q5_K: (2, [0, 2]),
    Type.Q6_K: (2, [208]),
}
EXTREMES = np.array([0x0000, 0x8000, 0x0001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00], dtype=np.uint16)


def blocks_of(type_, num_sane, fields, rng):
    """Raw bytes [blocks, block bytes] of one type."""
    size = GGML_QUANT_SIZES[type_][1]
    if type_ is Type.F32:
        sane = (rng.standard_normal(num_sane) * 10.0 ** rng.integers(-40, 38, num_sane)).astype(np.float32)
        return sane.reshape(-1, 1).view(np.uint8)
    if type_ is Type.F16:
        sane = rng.standard_normal(num_sane).astype(np.float16).view(np.uint16)
        return np.concatenate([sane, EXTREMES]).reshape(-1, 1).view(np.uint8)
    if type_ is Type.BF16:
        sane = (rng.standard_normal(num_sane).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        extremes = np.array([0x0000, 0x8000, 0x0001, 0x007F, 0x0080, 0x7F7F, 0x7F80, 0xFF80], dtype=np.uint16)
        return np.concatenate([sane, extremes]).reshape(-1, 1).view(np.uint8)
    # For types with a minimum, extreme scales meet extreme minima of another kind.
    pairs = [(e, EXTREMES[(i * 2 + 1) % len(EXTREMES)]) for i, e in enumerate(EXTREMES)]
    blocks = rng.integers(0, 256, (num_sane + len(pairs), size), dtype=np.uint8)
    for i, block in enumerate(blocks):
        for f, offset in enumerate(fields):
            sane = np.float16(rng.standard_normal() * 0.02).view(np.uint16)
            value = sane if i < num_sane else np.uint16(pairs[i - num_sane][f])
            block[offset : offset + 2] = np.array([value], dtype="<u2").view(np.uint8)
    return blocks


def main():
    rng = np.random.Generator(np.random.PCG64(SEED))
    cases = []
    for type_, (num_sane, fields) in TYPES.items():
        blocks = blocks_of(type_, num_sane, fields, rng)
        with np.errstate(invalid="ignore", over="ignore"):
            values = dequantize(blocks.reshape(-1) if blocks.shape[1] <= 4 else blocks, type_)
        values = np.ascontiguousarray(values, dtype="<f4").reshape(-1)
        bits = values.view("<u4")
        # NaN of infinity times zero: sign and payload are the FPU's, so only "is NaN" is recorded.
        bits = np.where(np.isnan(values), np.uint32(0x7FC00000), bits)
        cases.append({"type": type_.name, "bytes": blocks.tobytes().hex(), "values": bits})
    # All values in full are several hundred KB: a 64-bit FNV-1a hash of every block's values, and the first one in full.
    out = []
    for case in cases:
        block_len = GGML_QUANT_SIZES[Type[case["type"]]][0]
        per_block = case["values"].reshape(-1, block_len if block_len > 1 else len(case["values"]))
        out.append(
            {
                "type": case["type"],
                "bytes": case["bytes"],
                "first_block": "".join(f"{int(b):08x}" for b in per_block[0]),
                "block_fnv1a": [f"{fnv1a(row):016x}" for row in per_block],
            }
        )
    header = {"script": "tools/golden/dequantize.py", "reference": f"gguf {version('gguf')}", "seed": SEED, "numpy": np.__version__}
    json.dump({"made_by": header, "cases": out}, sys.stdout, indent=1)
    sys.stdout.write("\n")


def fnv1a(bits):
    """FNV-1a, 64 bits, over the little-endian bytes of 32-bit words."""
    state = 0xCBF29CE484222325
    for byte in np.ascontiguousarray(bits, dtype="<u4").tobytes():
        state = ((state ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return state


if __name__ == "__main__":
    main()
