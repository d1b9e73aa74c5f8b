#!/usr/bin/env python3
"""Cuts the golden files of real models to what crates/entrokv/tests/real_models.rs reads.

    python3 tools/golden/real_models.py GOLDEN_DIR crates/entrokv/tests/fixtures/real-models

Copied: the text score of the default model (llama.cpp on a file with every tensor in F32) and, for two models, the prompt,
continuation and end-to-end figures of the independent Page-EntroKV reference, without its texts. The scores of the larger
models are read from GOLDEN_DIR by the test itself, where it lies at hand.
"""

import json
import shutil
import sys
from pathlib import Path

DECISIONS = ["smollm2_135m", "qwen25_05b"]
KEPT = ["T", "B", "token_ids", "cont_ids", "mean_nll_299", "e2e"]


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    target.mkdir(parents=True, exist_ok=True)
    name = "nll-smollm2-135m-instruct-q4_1.json"
    shutil.copyfile(source / name, target / name)
    for model in DECISIONS:
        golden = json.loads((source / "page-entrokv" / f"{model}.json").read_text())
        cut = {key: golden[key] for key in KEPT}
        for row in cut["e2e"].values():
            row.pop("greedy_text", None)
        (target / f"{model}.json").write_text(json.dumps(cut, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
