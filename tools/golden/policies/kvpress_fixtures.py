#!/usr/bin/env python3
"""Writes kvpress.json: what PyPI kvpress 0.5.4 scores and keeps on the tensors of inputs.json.

    python3 tools/golden/policies/kvpress_fixtures.py [OUT_DIR]

Runs kvpress's own classes over a transformers Llama attention block that holds the weights of `tensors.Layer`, and
compares each score with the numpy one before anything is written. README.md beside this file names the versions.
"""

import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import kvpress
import numpy as np
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaRotaryEmbedding,
)

import allotments
import attention
import fixture
import keys_and_values
import reads_and_channels
import tensors
from generate import OUT_DIR

PINNED = "0.5.4"
# float32 there, float64 here; z-scores and their sums are the largest numbers compared.
TOLERANCE = 1e-5
FRACTIONS = (0.25, 0.5, 0.7)


def attention_block(layer: tensors.Layer) -> LlamaAttention:
    """The layer as transformers has it, whose queries kvpress computes anew from the hidden states."""
    config = LlamaConfig(
        hidden_size=tensors.HIDDEN,
        num_attention_heads=tensors.NUM_QUERY_HEADS,
        num_key_value_heads=tensors.NUM_KV_HEADS,
        head_dim=tensors.HEAD_DIM,
        num_hidden_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": tensors.ROPE_BASE},
        attention_bias=False,
    )
    block = LlamaAttention(config, layer_idx=0).eval()
    for name, weights in [("q_proj", layer.wq), ("k_proj", layer.wk), ("v_proj", layer.wv), ("o_proj", layer.wo)]:
        getattr(block, name).weight.data = torch.tensor(weights.T, dtype=torch.float32)
    # kvpress sets this on the modules it hooks; one class reads it there.
    block.rotary_emb = LlamaRotaryEmbedding(config)
    return block


@dataclass
class Comparison:
    """One press and the numpy scores of the same form."""

    name: str
    press: kvpress.ScorerPress
    scores: np.ndarray | None  # [KV heads, tokens]
    protected: np.ndarray | None = None
    note: str = ""
    # Only the six presses of the fixture are written; the rest are compared as a second reading of the formulas.
    written: bool = True
    needs_rows: bool = False
    # Scores that say keep or drop and nothing else.
    binary: bool = False


def comparisons(layer: tensors.Layer) -> list[Comparison]:
    shape = (tensors.NUM_KV_HEADS, len(layer.positions))

    def ends(first: int = 0, last: int = 0) -> np.ndarray:
        return fixture.ends_protected(np.zeros(shape), first, last)

    def after_sinks(inner: np.ndarray) -> np.ndarray:
        return np.pad(inner, ((0, 0), (shape[1] - inner.shape[1], 0)))

    window = 8
    snap = np.pad(attention.snap_kv_scores(layer, window, 5), ((0, 0), (0, window)))
    found = [
        Comparison(
            "snap-kv", kvpress.SnapKVPress(window_size=window, kernel_size=5), snap, ends(last=window),
            "Equals `pool, then reduce; average of 5`. The window scores its maximum plus 1.",
        ),
        Comparison(
            "streaming-llm", kvpress.StreamingLLMPress(n_sink=4), None, ends(first=4),
            "Scores are 1 for the kept and 0 for the rest and depend on the ratio: those of the first are written.",
            binary=True,
        ),
        Comparison("k-norm", kvpress.KnormPress(), -keys_and_values.norm(layer.k)),
        Comparison(
            "tova", kvpress.TOVAPress(), np.tile(layer.rows[:, -1].mean(axis=0), (shape[0], 1)), ends(last=1),
            "Equals `last protected`; the last token scores its maximum plus 1.",
        ),
        Comparison(
            "key-diff", kvpress.KeyDiffPress(), keys_and_values.key_diff_scores(layer.k), None, "Equals `one shot`."
        ),
    ]  # fmt: skip
    for covariance, value_norm in [(True, True), (True, False), (False, True), (False, False)]:
        press = kvpress.ExpectedAttentionPress(
            n_future_positions=32, n_sink=4, use_covariance=covariance, use_vnorm=value_norm
        )
        inner = attention.expected_attention_scores(layer, 4, 32, covariance, value_norm)
        name = f"expected-attention, {'covariance' if covariance else 'mean'}{', value norm' if value_norm else ''}"
        found.append(Comparison(name, press, after_sinks(inner), ends(first=4)))
    found += further(layer, ends)
    return found


def further(layer: tensors.Layer, ends) -> list[Comparison]:
    """Presses beyond the fixture, compared to check the reading of their formulas."""
    count_rows = len(layer.positions) - layer.positions
    average = attention.column_sums(layer).mean(axis=1) / count_rows
    found = [Comparison("h2o average", kvpress.ObservedAttentionPress(), average, written=False, needs_rows=True)]
    for name, cross in [("within its block", False), ("cross scoring", True)]:
        scores, protected = from_case(keys_and_values.lag_kv(layer), name)
        press = kvpress.LagKVPress(n_sink=4, lag_size=12, cross_scoring=cross)
        found.append(Comparison(f"lag-kv, {name}", press, scores, protected, written=False))
    for name, kind in [("product", "kv_product"), ("key", "key"), ("value", "value"), ("average", "kv_avg")]:
        scores, protected = from_case(keys_and_values.cur(layer), name)
        found.append(Comparison(f"cur, {name}", kvpress.CURPress(leverage_type=kind), scores, protected, written=False))
    whole = keys_and_values.compactor_scores(layer, keys_and_values.compactor_sketch(), 17, 1.0, 0.35)["scores"]
    press = kvpress.CompactorPress(chunk_size=17, sketch_dimension=8, blending=0.35)
    found.append(Comparison("compactor, whole chunks", press, whole, ends(8, 4), written=False))
    ragged = keys_and_values.compactor_scores(layer, keys_and_values.compactor_sketch(), 16, 1.0, 0.35)["scores"]
    press = kvpress.CompactorPress(chunk_size=16, sketch_dimension=8, blending=0.35)
    found.append(Comparison("compactor, ragged", press, ragged, ends(8, 4), "differs by its padding", written=False))
    return found


def from_case(content: dict, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Scores and protection of a case as generate.py writes it."""
    case = next(c for c in content["cases"] if c["name"] == name)
    protected = np.array([[s is None for s in head] for head in case["scores"]])
    return np.array([[0.0 if s is None else float(s) for s in head] for head in case["scores"]]), protected


class Driver:
    """Calls presses as kvpress's hook would, and tells which tokens their cache still holds."""

    def __init__(self, layer: tensors.Layer):
        self.layer = layer
        self.block = attention_block(layer)
        self.x, self.keys, self.values = (
            torch.tensor(a, dtype=torch.float32)[None] for a in (layer.x, layer.k, layer.v)
        )
        places = torch.arange(len(layer.positions))[None]
        self.kwargs = {"position_embeddings": self.block.rotary_emb(self.x, places), "hidden_states": self.x}
        self.rows = torch.tensor(layer.rows, dtype=torch.float32)[None]

    def score(self, case: Comparison) -> np.ndarray:
        rows = self.rows if case.needs_rows else None
        sketch = torch.tensor(keys_and_values.compactor_sketch(), dtype=torch.float32)[None]
        drawn = torch.randn
        # Compactor draws its sketch unseeded and scales it by 1/sqrt(8); it gets ours.
        torch.randn = lambda *_, **__: sketch * 8**0.5
        try:
            scores = case.press.score(self.block, self.x, self.keys, self.values, rows, self.kwargs)
        finally:
            torch.randn = drawn
        return scores[0].double().numpy()

    def kept(self, press: kvpress.ScorerPress, fraction: float) -> list[np.ndarray]:
        press.compression_ratio = fraction
        return [np.sort(head) for head in self.stored(press)]

    def stored(self, press: kvpress.ScorerPress) -> np.ndarray:
        """[KV heads, kept] tokens in the order in which the press stores them, told by their keys."""
        keys, _ = press.compress(self.block, self.x, self.keys, self.values, None, self.kwargs)
        names = (keys[0, :, :, None] == self.keys[0, :, None]).all(dim=-1)
        assert (names.sum(dim=-1) == 1).all(), "a key that cannot be told from another"
        return names.int().argmax(dim=-1).numpy()


def run(case: Comparison, driver: Driver) -> tuple[dict, float]:
    """The fixture's entry and the largest difference from the numpy scores where neither is protected."""
    case.press.compression_ratio = FRACTIONS[0]
    scores = driver.score(case)
    protected = np.zeros(scores.shape, bool) if case.protected is None else case.protected
    difference = 0.0
    if case.scores is not None:
        size = np.abs(case.scores[~protected]).max()
        difference = float(np.abs(scores - case.scores)[~protected].max() / size)
    kept = []
    for fraction in FRACTIONS if case.written else ():
        tokens = driver.kept(case.press, fraction)
        count = len(tokens[0])
        ours = None
        if case.scores is not None:
            ours, gap = attention.top(case.scores, protected, [count] * len(protected))
            assert gap > fixture.CLEAR_GAP, f"{case.name}: an unclear cut at {count}"
            assert ours == [t.tolist() for t in tokens], f"{case.name} at {count}: kept sets differ"
        if case.binary:
            positions = np.tile(driver.layer.positions.astype(float), (len(protected), 1))
            ours, _ = attention.top(positions, protected, [count] * len(protected))
            assert ours == [t.tolist() for t in tokens], f"{case.name} at {count}: kept sets differ"
        kept.append({"evicted_fraction": fraction, "count": count, "tokens": tokens})
    entry = {"policy": case.name, "press": type(case.press).__name__}
    if case.note:
        entry["note"] = case.note
    entry |= {"scores": fixture.with_nulls(scores, protected), "kept": kept}
    return entry, difference


def traps(driver: Driver) -> list[dict]:
    """What kvpress does where its selection is not ours, on the same tensors."""
    found = []
    found.append(
        {
            "trap": "truncation",
            "press": "KnormPress",
            "evicted_fraction": 0.98,
            "tokens": driver.kept(kvpress.KnormPress(), 0.98),
            "note": "floor(46 * 0.02) is 0: nothing is kept.",
        }
    )
    tokens = driver.kept(kvpress.SnapKVPress(window_size=8, kernel_size=5), 0.9)
    assert all(t >= 38 for head in tokens for t in head)
    found.append(
        {
            "trap": "window above the budget",
            "press": "SnapKVPress",
            "evicted_fraction": 0.9,
            "tokens": tokens,
            "note": "4 tokens of a window of 8 that all score the same: which of them is not specified. A policy with "
            "protection refuses such a budget.",
        }
    )
    press = kvpress.SnapKVPress(window_size=8, kernel_size=5)
    press.compression_ratio = 0.5
    stored = driver.stored(press)
    found.append(
        {
            "trap": "order",
            "press": "SnapKVPress",
            "evicted_fraction": 0.5,
            "tokens": stored,
            "note": "as stored: by descending score and not by position. Compare sorted.",
        }
    )
    return found


@dataclass
class Given(kvpress.ScorerPress):
    """A press of given scores, for those that only choose."""

    scores: torch.Tensor | None = None

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return self.scores.clone()


def check_choices(driver: Driver) -> None:
    """Compares what is chosen from given scores: PyramidKV's counts, Ada-KV, CriticalKV and ThinK."""
    layer, block = driver.layer, driver.block
    for point in allotments.pyramid_kv(layer)["cases"][0]["counts"]:
        press = kvpress.PyramidKVPress(point["evicted_fraction"], window_size=point["window"], beta=20)
        for index, count in enumerate(point["counts"]):
            stub = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=32), layer_idx=index)
            assert press.get_layer_budget(stub, point["tokens"]) == count

    block.config._attn_implementation = "sdpa"
    ada = allotments.ada_kv(layer)
    scores = torch.tensor(ada["scores"], dtype=torch.float32)[None]
    _, heads, tokens = scores.shape
    for point in ada["cases"][0]["kept"]:
        inner = Given(1 - point["count"] / tokens, scores)
        press = kvpress.AdaKVPress(inner, alpha_safeguard=point["alpha"])
        nothing = torch.zeros(1, heads, tokens, tensors.HEAD_DIM)
        press.compress(block, driver.x, nothing, nothing, None, driver.kwargs)
        gone = torch.zeros(heads, tokens, dtype=bool)
        gone[block.masked_key_indices[1:]] = True
        assert [np.flatnonzero(~head).tolist() for head in gone.numpy()] == [k.tolist() for k in point["tokens"]]

    critical = attention.critical_kv(layer)["cases"]
    inner = kvpress.ExpectedAttentionPress(n_future_positions=32, use_vnorm=False)
    norms = kvpress.CriticalKVPress.vwl1norm(driver.values, block)[0].double().numpy()
    assert np.allclose(norms, critical[0]["output_norms"], rtol=1e-5)
    for uniform, adaptive in zip(critical[0]["kept"], critical[1]["kept"]):
        # The middle of the fractions that truncate to this count.
        fraction = 1 - (uniform["count"] + 0.5) / len(layer.positions)
        tokens = driver.kept(kvpress.CriticalKVPress(inner), fraction)
        assert [t.tolist() for t in tokens] == uniform["tokens"], f"critical-kv at {uniform['count']}"
        inner.compression_ratio = fraction
        press = kvpress.CriticalAdaKVPress(inner)
        press.compress(block, driver.x, driver.keys, driver.values, None, driver.kwargs)
        gone = torch.zeros(driver.keys.shape[1:3], dtype=bool)
        gone[block.masked_key_indices[1:]] = True
        assert [np.flatnonzero(~head).tolist() for head in gone.numpy()] == adaptive["tokens"]

    case = reads_and_channels.think(layer)["cases"][0]
    for point in case["kept"]:
        press = kvpress.ThinKPress(point["dropped_fraction"], window_size=case["options"]["window"])
        keys, _ = press.compress(block, driver.x, driver.keys.clone(), driver.values, None, driver.kwargs)
        zeros = (keys[0] == 0).all(dim=1).numpy()
        assert [np.flatnonzero(head).tolist() for head in zeros] == point["dropped"]


@torch.no_grad()
def main() -> None:
    assert version("kvpress") == PINNED, f"kvpress {PINNED} wanted, {version('kvpress')} found"
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT_DIR
    torch.set_num_threads(1)
    layer = tensors.Layer.seeded()
    driver = Driver(layer)
    entries = []
    for case in comparisons(layer):
        entry, difference = run(case, driver)
        print(f"{case.name:50} {difference:.1e} {case.note if difference > TOLERANCE else ''}")
        assert difference < TOLERANCE or case.note.startswith("differs"), f"{case.name}: scores differ"
        if case.written:
            entries.append(entry)
    check_choices(driver)
    content = {
        "made_by": "tools/golden/policies/kvpress_fixtures.py",
        "seed": tensors.SEED,
        "kvpress": PINNED,
        "reads": "inputs.json",
        "cases": entries,
        "traps": traps(driver),
    }
    fixture.write(out / "kvpress.json", content)


if __name__ == "__main__":
    main()
