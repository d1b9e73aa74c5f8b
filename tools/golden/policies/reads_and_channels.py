"""Policies that evict no token: pages read, channels dropped, codes instead of numbers."""

import numpy as np

from fixture import CLEAR_GAP, kept_tokens
from tensors import HEAD_DIM, Layer, by_group, per_query_head


def quest(layer: Layer) -> dict:
    """Upper bounds of the last query's logits in each page."""
    page, tokens = 8, len(layer.positions)
    starts = np.arange(0, tokens, page)
    low = np.minimum.reduceat(layer.k, starts, axis=1)
    high = np.maximum.reduceat(layer.k, starts, axis=1)
    query = layer.q[:, -1:]
    bound = np.maximum(query * per_query_head(low), query * per_query_head(high)).sum(axis=-1)
    reduced = {
        "query heads": bound,
        "group maximum": by_group(bound).max(axis=1),
        "group sum": by_group(bound).sum(axis=1),
    }
    cases = [{"name": "bounds", "options": {"page_size": page}, "low": low, "high": high}]
    for name, bounds in reduced.items():
        selected = []
        for force_last in (False, True):
            flags = np.zeros(bounds.shape, dtype=bool)
            flags[:, -1] = force_last
            for count in (3, 4):
                cuts = [kept_tokens(b, f, count) for b, f in zip(bounds, flags)]
                assert min(gap for _, gap in cuts) > CLEAR_GAP, "an unclear cut: change the seed"
                selected.append({"pages": count, "force_last": force_last, "selected": [p for p, _ in cuts]})
        cases.append({"name": name, "options": {"page_size": page}, "scores": bounds, "kept": selected})
    logits = np.einsum("qd,qsd->qs", layer.q[:, -1], per_query_head(layer.k))
    assert (np.maximum.reduceat(logits, starts, axis=1) <= bound).all()
    return {
        "policy": "quest",
        "paper": "arXiv:2406.10774",
        "reads": ["q", "k"],
        "departures": [
            "Nothing is freed. The query is that of the last token; the last page holds 6 tokens and bounds those.",
            "force_last: the last page is read always and counts, as in the kernels; the evaluation code ranks it.",
            "query heads is the official form; the group forms read a page once for a KV head.",
            "Bounds are not divided by sqrt(d).",
        ],
        "cases": cases,
    }


def think(layer: Layer) -> dict:
    """Key channels that weigh least in the logits."""
    window = 8
    query = by_group((layer.q[:, -window:] ** 2).mean(axis=1)).mean(axis=1)
    scores = query * (layer.k**2).mean(axis=1)
    kept = []
    for fraction in (0.25, 0.4, 0.5):
        drop = int(HEAD_DIM * fraction)
        order = [sorted(range(HEAD_DIM), key=lambda i: (head[i], i)) for head in scores]
        assert all(head[o[drop]] - head[o[drop - 1]] > CLEAR_GAP * head[o[drop]] for head, o in zip(scores, order))
        kept.append({"dropped_fraction": fraction, "dropped": [sorted(o[:drop]) for o in order]})
    return {
        "policy": "think",
        "paper": "arXiv:2407.21018",
        "reads": ["q", "k"],
        "departures": [
            "Channels after RoPE, means over the window, all 46 keys and the group; floor(d * fraction) go."
        ],
        "cases": [{"name": "channels", "options": {"window": window}, "scores": scores, "kept": kept}],
    }


def min_max(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Codes, scales and minima of groups along the last axis, and the distance of the nearest tie between codes."""
    low = x.min(axis=-1, keepdims=True)
    scale = halves((x.max(axis=-1, keepdims=True) - low) / (2**bits - 1))
    scale, low = np.where(scale == 0, 1.0, scale), halves(low)
    level = np.clip((x - low) / scale, 0, 2**bits - 1)
    tie = np.abs(np.abs(level - np.floor(level)) - 0.5).min()
    return np.rint(level).astype(int), scale[..., 0], low[..., 0], tie


def halves(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float64)


def kivi(layer: Layer) -> dict:
    """Keys coded by channel, values by token, a recent part left as it is."""
    group, residual, tokens = 8, 16, len(layer.positions)
    coded_keys = tokens // residual * residual
    coded_values = tokens - residual
    cases = []
    for bits in (2, 4):
        keys = layer.k[:, :coded_keys].transpose(0, 2, 1).reshape(-1, HEAD_DIM, coded_keys // group, group)
        values = layer.v[:, :coded_values].reshape(-1, coded_values, HEAD_DIM // group, group)
        case = {"name": f"{bits} bits", "options": {"bits": bits, "group": group, "residual": residual}}
        for name, part in [("keys", keys), ("values", values)]:
            codes, scale, low, tie = min_max(part, bits)
            assert tie > 1e-5, "an unclear code: change the seed"
            case[name] = {"codes": codes, "scale": scale, "minimum": low}
        cases.append(case)
    flat = min_max(np.full((1, group), 0.75), 2)
    zero = {"name": "group of equals", "options": {"bits": 2, "group": group}, "codes": flat[0], "scale": flat[1]}
    zero["minimum"] = flat[2]
    states, fp_keys, fp_values = [], 0, 0
    for length in range(1, 70):
        fp_keys = (fp_keys + 1) % residual
        fp_values = min(fp_values + 1, residual)
        if length in (1, 15, 16, 17, 32, 46, 64, 69):
            states.append({"tokens": length, "plain_keys": fp_keys, "plain_values": fp_values})
    grown = {"name": "plain parts", "options": {"residual": residual}, "points": states}
    return {
        "policy": "kivi",
        "paper": "arXiv:2402.02750",
        "reads": ["k", "v"],
        "departures": [
            "keys.codes [KV heads, d, groups of 8 tokens, 8] of the first 32 tokens; values.codes [KV heads, "
            "tokens, groups "
            "of 8 channels, 8] of the first 30.",
            "Scale and minimum are f16, as upstream computes them, and codes come of them as stored.",
            "A group of equals has scale 1 and codes 0; upstream divides by 0.",
            "plain parts: tokens not coded, the same whether a prompt brought them or decoding did.",
        ],
        "cases": [*cases, zero, grown],
    }
