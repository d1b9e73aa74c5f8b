#!/usr/bin/env python3
"""Cuts the golden files of coded pages to what the tests of crates/entrokv-kernels/src/codes read.

    python3 tools/golden/page_formats.py GOLDEN_DIR crates/entrokv-kernels/tests/fixtures

GOLDEN_DIR holds codes.py, an independent float64 reference of rotated codes, and NAME.safetensors: real keys and values
`[KV heads, T, d]` and queries `[query heads, T, d]`, after RoPE. Of KV head 0 of each, `page-formats-NAME.json` gets the keys,
the values and the last query of its first head (the bits of each f32 as 8 hexadecimal digits), the moments, the constants
and, for each number of bits, all codes (a hexadecimal digit each), all scales, the places whose ratio lies within 1e-4 of a
boundary, relative errors and the logits of that query. Needs numpy and safetensors.
"""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

NAMES = ["qwen25_05b-layer0", "smollm2_135m-layer12"]
SINKS = 4


def load_reference(path: Path):
    spec = importlib.util.spec_from_file_location("codes", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digits(codes: np.ndarray) -> list[str]:
    """A string of hexadecimal digits for each token."""
    return ["".join(f"{code:x}" for code in token) for token in codes]


def near_boundary(ref, x, bits, mu, c) -> list[list[int]]:
    """[token, dim] of the elements whose ratio lies within 1e-4 of a boundary."""
    y = ref.hadamard(ref.signs(x.shape[-1]) * ((x - mu) / c))
    rho = np.maximum(ref.f16(np.sqrt((y**2).mean(-1, keepdims=True))), 2.0**-24)
    book = ref.codebook(bits)
    distance = np.abs((y / rho)[..., None] - (book[1:] + book[:-1]) / 2).min(-1)
    return np.argwhere(distance < 1e-4).tolist()


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    ref = load_reference(source / "codes.py")
    for name in NAMES:
        tensors = load_file(source / f"{name}.safetensors")
        k, v, q = (tensors[n] for n in "kvq")
        r = len(q) // len(k)
        k, v, q = k[0], v[0], q[:r]
        vectors = [row.astype(">f4").tobytes().hex() for row in (*k, *v, q[0, -1])]
        k, v, q = (x.astype(np.float64) for x in (k, v, q))
        mu, c = ref.moments(k, q, first=SINKS)
        d = k.shape[-1]
        rows = []
        for bits in (4, 3, 2):
            row = {"bits": bits}
            for part, x, centre, scale in (("k", k, mu, c), ("v", v, np.zeros(d), np.ones(d))):
                codes, scales = ref.encode(x, bits, centre, scale)
                decoded = ref.decode(codes, scales, bits, centre, scale)
                row |= {
                    f"{part}_codes": digits(codes),
                    f"{part}_scales": scales.tolist(),
                    f"{part}_near_boundary": near_boundary(ref, x, bits, centre, scale),
                    f"{part}_relative_error": float(np.sqrt(((decoded - x) ** 2).sum() / ((x - centre) ** 2).sum())),
                }
                if part == "k":
                    row["logits"] = [float(f"{x:.7g}") for x in decoded @ q[0, -1]]
            rows.append(row)
        golden = {
            "made_by": "tools/golden/page_formats.py, reference codes.py (numpy, float64)",
            "num_tokens": len(k),
            "head_dim": d,
            "first": SINKS,
            "key_mean": k[SINKS:].mean(0).tolist(),
            "key_std": k[SINKS:].std(0).tolist(),
            "query_rms": np.sqrt((q[:, SINKS:] ** 2).mean((0, 1))).tolist(),
            "centre": mu.tolist(),
            "channel_scale": c.tolist(),
            "rows": rows,
            "vectors": vectors,
        }
        (target / f"page-formats-{name}.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
