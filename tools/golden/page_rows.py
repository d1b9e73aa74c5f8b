#!/usr/bin/env python3
"""Cuts the Page-EntroKV golden files to what crates/entrokv-cache/tests/golden_pages.rs reads.

    python3 tools/golden/page_rows.py GOLDEN_DIR crates/entrokv-cache/tests/fixtures

GOLDEN_DIR holds synthetic.json and, for each model, NAME.json and NAME.safetensors, as the independent float64
reference wrote them. synthetic.json and the tensors are copied whole; a model's JSON loses its texts, token ids and
end-to-end figures, which need the model itself.
"""

import json
import shutil
import sys
from pathlib import Path

MODELS = ["smollm2_135m", "qwen25_05b"]
KEPT = [
    "T", "B", "n_pages", "tau", "n_sink", "rules", "layout", "avgpool5",
    "expect", "expect_win32", "min_rel_boundary_gap",
]


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source / "synthetic.json", target / "synthetic.json")
    for model in MODELS:
        shutil.copyfile(source / f"{model}.safetensors", target / f"{model}.safetensors")
        golden = json.loads((source / f"{model}.json").read_text())
        cut = {key: golden[key] for key in KEPT}
        (target / f"{model}.json").write_text(json.dumps(cut, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
