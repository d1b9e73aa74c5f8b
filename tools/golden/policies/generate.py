#!/usr/bin/env python3
"""Writes the golden files of the eviction policies: inputs.json and NAME.json for every scorer.

    python3 tools/golden/policies/generate.py [OUT_DIR]

numpy only, float64 inside, float32 in and out. README.md beside this file describes the formats.
"""

import sys
from pathlib import Path

import allotments
import attention
import fixture
import gates
import keys_and_values
import reads_and_channels
from tensors import SEED, Layer

OUT_DIR = Path(__file__).resolve().parents[3] / "crates/entrokv-cache/tests/golden/policies"

POLICIES = [
    keys_and_values.streaming_llm,
    keys_and_values.k_norm,
    keys_and_values.key_diff,
    keys_and_values.lag_kv,
    keys_and_values.cur,
    keys_and_values.compactor,
    keys_and_values.paged_eviction,
    attention.h2o,
    attention.scissorhands,
    attention.fast_gen,
    attention.snap_kv,
    attention.head_pooling,
    attention.tova,
    attention.expected_attention,
    attention.critical_kv,
    attention.kv_zip,
    attention.r_kv,
    attention.rocket_kv,
    attention.pooled_pages,
    allotments.pyramid_kv,
    allotments.ada_kv,
    allotments.duo_attention,
    allotments.kv_compress,
    reads_and_channels.quest,
    reads_and_channels.think,
    reads_and_channels.kivi,
    gates.fast_kv_zip,
    gates.kv_zap,
    gates.dms,
]


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT_DIR
    layer = Layer.seeded()
    made_by = {"made_by": "tools/golden/policies/generate.py", "seed": SEED}
    fixture.write(out / "inputs.json", made_by | layer.written())
    for policy in POLICIES:
        content = policy(layer)
        fixture.write(out / f"{content['policy']}.json", made_by | content)


if __name__ == "__main__":
    main()
