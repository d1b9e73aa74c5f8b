#!/usr/bin/env python3
"""Writes what codes between the smallest and the largest element (KIVI's) make of real keys and values.

    python3 tools/golden/min_max.py [FIXTURES_DIR]

FIXTURES_DIR (crates/entrokv-kernels/tests/fixtures) holds `page-formats-NAME.json`, made by page_formats.py, and gets
`min-max.json`: for each NAME and number of bits, of the first 32 keys (`k_`) and values (`v_`),

- `codes`, a hexadecimal digit each, a string for each group: of keys [2 strips][d channels] of 16 tokens, of values
  [32 tokens][d / 32] of 32 channels;
- `scales` and `minima` of those groups, the bits of each f16 as 4 hexadecimal digits;
- `last_slots`: what the 16th token of each strip stands for, the bits of each f32 as 8 digits.

numpy only (made with 2.4). Every operation is one of f32 that IEEE 754 defines, so that an engine has the same bits.
"""

import json
import sys
from pathlib import Path

import numpy as np

NAMES = ["qwen25_05b-layer0", "smollm2_135m-layer12"]
FIXTURES = Path(__file__).resolve().parents[2] / "crates/entrokv-kernels/tests/fixtures"
STRIP = 16
CHANNELS = 32
TOKENS = 32


def quantise(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and minima of groups along the last axis, the codes being nearest to the numbers as stored."""
    levels = np.float32(2**bits - 1)
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    scale = ((high - low) / levels).astype(np.float16)
    scale[scale == 0] = 1
    minimum = low.astype(np.float16)
    level = (x - minimum.astype(np.float32)) / scale.astype(np.float32)
    return np.rint(np.clip(level, 0, levels)).astype(np.uint8), scale, minimum


def dequantise(codes: np.ndarray, scale: np.ndarray, minimum: np.ndarray) -> np.ndarray:
    return codes.astype(np.float32) * scale.astype(np.float32) + minimum.astype(np.float32)


def digits(x: np.ndarray) -> list[str]:
    """The bits of the numbers of each row."""
    return [row.astype(row.dtype.newbyteorder(">")).tobytes().hex() for row in x]


def main() -> None:
    fixtures = Path(sys.argv[1]) if len(sys.argv) > 1 else FIXTURES
    golden = {"made_by": "tools/golden/min_max.py (numpy, float32)"}
    for name in NAMES:
        source = json.loads((fixtures / f"page-formats-{name}.json").read_text())
        vectors = np.array([np.frombuffer(bytes.fromhex(v), ">f4") for v in source["vectors"]]).astype(np.float32)
        k, v = vectors[:TOKENS], vectors[source["num_tokens"] :][:TOKENS]
        d, strips = source["head_dim"], TOKENS // STRIP
        # By channel along the tokens of a strip, and by token along channels.
        groups = {
            "k": k.reshape(strips, STRIP, d).transpose(0, 2, 1),
            "v": v.reshape(TOKENS, d // CHANNELS, CHANNELS),
        }
        rows = []
        for bits in (4, 2):
            row = {"bits": bits}
            for part, x in groups.items():
                codes, scale, minimum = quantise(x, bits)
                back = dequantise(codes, scale, minimum)
                last = back[:, :, -1] if part == "k" else back.reshape(TOKENS, d)[STRIP - 1 :: STRIP]
                row |= {
                    f"{part}_codes": ["".join(f"{code:x}" for code in group) for group in codes.reshape(-1, x.shape[-1])],
                    f"{part}_scales": digits(scale.reshape(-1, 1)),
                    f"{part}_minima": digits(minimum.reshape(-1, 1)),
                    f"{part}_last_slots": digits(last),
                }
            rows.append(row)
        golden[name] = rows
    (fixtures / "min-max.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
