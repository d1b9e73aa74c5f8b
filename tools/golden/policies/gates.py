"""Policies that ask learned gates; the gates here are seeded, not learned."""

import math

import numpy as np

from fixture import ends_protected, scored_case
from tensors import GROUP_SIZE, HIDDEN, NUM_KV_HEADS, Layer, by_group, normal

EPSILON = 1e-6


def rms_norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPSILON) * gain


def fast_kv_zip(layer: Layer) -> dict:
    """The probability of a token itself against learned sinks."""
    m, base, sinks, window = 4, 3, 4, 6
    gate = {
        "wq": normal("gate wq", NUM_KV_HEADS * GROUP_SIZE * m, HIDDEN, scale=HIDDEN**-0.5),
        "bq": normal("gate bq", NUM_KV_HEADS * GROUP_SIZE * m, scale=0.1),
        "wk": normal("gate wk", NUM_KV_HEADS * m, HIDDEN, scale=HIDDEN**-0.5),
        "query_gain": 1 + normal("gate qn", m, scale=0.2),
        "key_gain": 1 + normal("gate kn", m, scale=0.2),
        "base": normal("gate base", NUM_KV_HEADS, base, m),
        "bias": normal("gate bias", NUM_KV_HEADS, GROUP_SIZE, scale=0.5),
    }
    gate = {name: x.astype(np.float32).astype(np.float64) for name, x in gate.items()}
    q = rms_norm((layer.x @ gate["wq"].T + gate["bq"]).reshape(-1, NUM_KV_HEADS, GROUP_SIZE, m), gate["query_gain"])
    k = rms_norm((layer.x @ gate["wk"].T).reshape(-1, NUM_KV_HEADS, m), gate["key_gain"])
    own = np.einsum("thgm,thm->thg", q, k) / m**0.5 + gate["bias"]
    others = np.einsum("thgm,hjm->thgj", q, gate["base"]) / m**0.5
    scores = (1 / (1 + np.exp(others - own[..., None]).sum(axis=-1))).mean(axis=-1).T
    case = scored_case(
        "gate", {"sinks": sinks, "window": window, "epsilon": EPSILON}, scores, ends_protected(scores, sinks, window)
    )
    return {
        "policy": "fast-kvzip",
        "paper": "arXiv:2601.17668",
        "reads": ["x"],
        "gate": gate,
        "departures": [
            "wq rows are [KV head][query head of the group][m], wk rows [KV head][m]; x is the block's input "
            "after its norm.",
            "The window is given; upstream takes 2 % of the tokens, and below 50 tokens protects all of them.",
        ],
        "cases": [case],
    }


def kv_zap(layer: Layer) -> dict:
    """Logarithms of kvzip scores, predicted from the layer's input."""
    wide = 12
    gate = {
        "linear": {"weight": normal("zap w", NUM_KV_HEADS, HIDDEN, scale=0.3), "bias": normal("zap b", NUM_KV_HEADS)},
        "mlp": {
            "weight_in": normal("zap w1", wide, HIDDEN, scale=HIDDEN**-0.5),
            "bias_in": normal("zap b1", wide, scale=0.1),
            "weight_out": normal("zap w2", NUM_KV_HEADS, wide, scale=0.5),
            "bias_out": normal("zap b2", NUM_KV_HEADS),
        },
    }
    linear = (layer.x @ gate["linear"]["weight"].T + gate["linear"]["bias"]).T
    mlp = gate["mlp"]
    inner = layer.x @ mlp["weight_in"].T + mlp["bias_in"]
    inner = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / 2**0.5))
    cases = []
    for name, scores in [("linear", linear), ("mlp", (inner @ mlp["weight_out"].T + mlp["bias_out"]).T)]:
        window, cuts = 8, []
        for quantile in (0.25, 0.6):
            threshold = float(np.float32(np.quantile(scores, quantile)))
            assert np.abs(scores - threshold).min() > 1e-5, "an unclear threshold: change the seed"
            keep = (scores >= threshold) | ends_protected(scores, last=window)
            cuts.append({"threshold": threshold, "tokens": [np.flatnonzero(head) for head in keep]})
        cases.append(scored_case(name, {"window": window}, scores, by_threshold=cuts))
    return {
        "policy": "kvzap",
        "paper": "arXiv:2601.07891",
        "reads": ["x"],
        "gate": gate,
        "departures": [
            "`kept` protects nothing; `by_threshold` keeps scores at or above it and the last `window` tokens.",
            "GELU is the exact one (erf).",
        ],
        "cases": cases,
    }


def dms(layer: Layer) -> dict:
    """A channel of the query decides whether its token is to go."""
    scale, offset = 100.0, 5.0
    logit = scale * by_group(layer.q_pre)[:, 0, :, -1] - offset
    assert np.abs(logit).min() > 1e-3, "an unclear decision: change the seed"
    steps = []
    for length in (8, 20, 33, 46):
        for window in (0, 8, 16):
            held = ~((logit > 0) & (layer.positions < length - window)) & (layer.positions < length)
            steps.append({"tokens": length, "window": window, "held": [np.flatnonzero(head) for head in held]})
    return {
        "policy": "dms",
        "paper": "arXiv:2506.05345",
        "reads": ["q_pre"],
        "departures": [
            "decision(t) is of token t: scale * (last channel of the group's first query head, before RoPE) - "
            "offset > 0.",
            "A token marked goes when `window` later tokens have arrived; held is after token `tokens` - 1.",
            "Clearing the channel in the query and the retrofitted weights are the model's matter and not in here.",
        ],
        "cases": [{"name": "decisions", "options": {"scale": scale, "offset": offset}, "logits": logit, "kept": steps}],
    }
