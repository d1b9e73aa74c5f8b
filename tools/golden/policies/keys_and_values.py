"""Policies that look at positions, keys and values only."""

import numpy as np

from fixture import ends_protected, scored_case
from tensors import HEAD_DIM, NUM_KV_HEADS, Layer, by_group, normal, rotate, softmax


def norm(x: np.ndarray) -> np.ndarray:
    return np.sqrt((x * x).sum(axis=-1))


def streaming_llm(layer: Layer) -> dict:
    """Sinks and the most recent tokens; the score is the position."""
    scores = np.tile(layer.positions.astype(float), (NUM_KV_HEADS, 1))
    case = scored_case("sinks and recent", {"sinks": 4}, scores, ends_protected(scores, first=4), (8, 23, 46))
    hand = np.tile(np.arange(20.0), (1, 1))
    by_hand = scored_case("20 tokens by hand", {"sinks": 4}, hand, ends_protected(hand, first=4), (10,))
    assert by_hand["kept"][0]["tokens"] == [[0, 1, 2, 3, 14, 15, 16, 17, 18, 19]]
    tokens = np.array(case["kept"][0]["tokens"][0])
    # Slot i takes the place of position i: turning the cached key by i - p gives the unrotated key turned by i.
    turned = rotate(layer.k[:, tokens], np.arange(len(tokens)) - tokens)
    assert np.abs(turned - rotate(layer.k_pre[:, tokens], np.arange(len(tokens)))).max() < 1e-6
    rotated = {"name": "re-rotated keys", "options": {"sinks": 4}, "tokens": tokens, "keys": turned}
    return {
        "policy": "streaming-llm",
        "paper": "arXiv:2309.17453",
        "reads": ["positions", "k"],
        "departures": [
            "Sinks count inside the budget.",
            "kvpress scores the pruned middle 0 and the rest 1 and keeps the same set; below `sinks` it cuts "
            "among ties.",
            "`re-rotated keys` is the form of the paper: the survivors' keys as if they stood at slots 0, 1, 2 ...",
        ],
        "cases": [case, by_hand, rotated],
    }


def k_norm(layer: Layer) -> dict:
    """score = -|K|."""
    return {
        "policy": "k-norm",
        "paper": "arXiv:2406.11430",
        "reads": ["k"],
        "departures": ["The paper leaves the first two layers whole; that is an allotment, not a score."],
        "cases": [scored_case("paper", {}, -norm(layer.k))],
    }


def key_diff_scores(keys: np.ndarray) -> np.ndarray:
    """Minus the cosine of each key with the mean of the normalised keys."""
    unit = keys / norm(keys)[..., None]
    anchor = unit.mean(axis=1)
    return -np.einsum("hsd,hd->hs", unit, anchor) / norm(anchor)[:, None]


def key_diff(layer: Layer) -> dict:
    """One shot over all keys, and the paper's blocks, which evict as they go."""
    budget, block = 20, 8
    held = [np.arange(0)] * NUM_KV_HEADS
    steps = []
    for start in range(0, len(layer.positions), block):
        new = layer.positions[start : start + block]
        held = [np.concatenate([tokens, new]) for tokens in held]
        if len(held[0]) > budget:
            scores = np.array([key_diff_scores(layer.k[h : h + 1, tokens])[0] for h, tokens in enumerate(held)])
            chosen = scored_case("", {}, scores, counts=(budget,))["kept"][0]
            assert chosen["count"] == budget, "an unclear cut: change the seed"
            held = [tokens[slots] for tokens, slots in zip(held, chosen["tokens"])]
            steps.append({"seen": int(new[-1]) + 1, "tokens": [list(tokens) for tokens in held]})
    blocks = {"name": "blocks", "options": {"block": block, "budget": budget}, "steps": steps}
    return {
        "policy": "key-diff",
        "paper": "arXiv:2504.15364",
        "reads": ["k"],
        "departures": [
            "Keys are those of the cache, after RoPE.",
            "`blocks` joins 8 tokens at a time and evicts down to the budget; `tokens` are those held afterwards.",
        ],
        "cases": [scored_case("one shot", {}, key_diff_scores(layer.k)), blocks],
    }


def lag_scores(x: np.ndarray) -> np.ndarray:
    """[heads, blocks, lag, d] to [heads, blocks - 1, lag]: each block against the range of the one after it."""
    low = x[:, 1:].min(axis=2, keepdims=True)
    high = x[:, 1:].max(axis=2, keepdims=True)
    return softmax(((x[:, :-1] - low) / (high - low)).std(axis=-1, ddof=1))


def lag_kv(layer: Layer) -> dict:
    """Tokens that vary unlike the block that follows."""
    sinks, lag = 4, 12
    num_blocks = (len(layer.positions) - sinks) // lag
    end = sinks + num_blocks * lag
    tail = lag + len(layer.positions) - end

    def blocks(x: np.ndarray) -> np.ndarray:
        return x[:, sinks:end].reshape(NUM_KV_HEADS, num_blocks, lag, -1)

    cross = (lag_scores(blocks(layer.k)) + lag_scores(blocks(layer.v))) / 2
    rank = cross.argsort(axis=-1).argsort(axis=-1) / lag
    cases = []
    for name, inner in [("within its block", rank), ("cross scoring", cross)]:
        scores = np.pad(inner.reshape(NUM_KV_HEADS, -1), ((0, 0), (sinks, tail)))
        options = {"sinks": sinks, "lag": lag, "cross_scoring": inner is cross}
        protected = ends_protected(scores, sinks, tail)
        # Ranks are equal from block to block: ties on purpose.
        cases.append(scored_case(name, options, scores, protected, (26, 32, 40), tied=inner is rank))
    short = np.tile(np.arange(26.0), (NUM_KV_HEADS, 1))
    few = scored_case(
        "too short", {"sinks": sinks, "lag": lag, "tokens": 26}, short, ends_protected(short, first=sinks), (9, 20)
    )
    few["note"] = "26 tokens are fewer than sinks + 2 lags: sinks, then the most recent tokens."
    return {
        "policy": "lag-kv",
        "paper": "arXiv:2504.04704",
        "reads": ["k", "v"],
        "departures": [
            "Sinks and the tail (last whole block and the remainder) are protected; kvpress gives them the score 1.",
            "Deviation over channels divides by d - 1.",
            "A rank is the number of tokens of its block that score lower, over the lag.",
        ],
        "cases": [*cases, few],
    }


def window_shares(x: np.ndarray, window: int) -> np.ndarray:
    """Squared norms over the sum of their window's, windows one after the other from token 0."""
    squares = (x * x).sum(axis=-1)
    starts = np.arange(0, squares.shape[1], window)
    sums = np.add.reduceat(squares, starts, axis=1)
    return squares / np.repeat(sums, window, axis=1)[:, : squares.shape[1]]


def cur(layer: Layer) -> dict:
    """Squared norms as leverage."""
    window, sinks = 16, 4
    key, value = window_shares(layer.k, window), window_shares(layer.v, window)
    forms = {"product": key * value, "key": key, "value": value, "average": (key + value) / 2}
    cases = []
    for name, shares in forms.items():
        scores = shares / shares.sum(axis=-1, keepdims=True)
        options = {"combine": name, "window": window, "sinks": sinks}
        cases.append(scored_case(name, options, scores, ends_protected(scores, first=sinks)))
    return {
        "policy": "cur",
        "paper": "arXiv:2509.15038",
        "reads": ["k", "v"],
        "departures": [
            "The last window may be partial; its sum is over the tokens it has.",
            "The sum that normalises a sequence includes the sinks, whose own scores then do not matter.",
        ],
        "cases": cases,
    }


def z_score(x: np.ndarray) -> np.ndarray:
    """Over all heads and tokens together, deviation with N - 1."""
    return (x - x.mean()) / x.std(ddof=1)


def leverage(k_pre: np.ndarray, sketch: np.ndarray, damping: float) -> np.ndarray:
    x = (k_pre - k_pre.mean(axis=1, keepdims=True)) @ sketch
    gram = x.transpose(0, 2, 1) @ x + damping * np.eye(sketch.shape[-1])
    return np.maximum(0.0, np.einsum("hsi,hij,hsj->hs", x, np.linalg.inv(gram), x))


def two_way_sums(layer: Layer, tokens: slice, chunk: int, scale: float) -> np.ndarray:
    """Column sums of attention without a causal mask inside chunks, mean over the group."""
    q, k = by_group(layer.q[:, tokens]), layer.k[:, tokens]
    sums = []
    for start in range(0, k.shape[1], chunk):
        part = slice(start, start + chunk)
        sums.append(softmax(np.einsum("hgtd,hsd->hgts", q[:, :, part], k[:, part]) * scale).sum(axis=2).mean(axis=1))
    return np.concatenate(sums, axis=1)


def mean_of_three(x: np.ndarray) -> np.ndarray:
    """Average pooling of width 3; what lies beyond the ends counts as 0."""
    wide = np.pad(x, ((0, 0), (1, 1)))
    return (wide[:, :-2] + wide[:, 1:-1] + wide[:, 2:]) / 3


def compactor_scores(layer: Layer, sketch: np.ndarray, chunk: int, scale: float, blending: float) -> dict:
    first, last = 8, 4
    inner = slice(first, len(layer.positions) - last)
    lev = z_score(leverage(layer.k_pre[:, inner], sketch, 1e-2))
    attention = z_score(mean_of_three(two_way_sums(layer, inner, chunk, scale) * norm(layer.v[:, inner])))
    return {
        "leverage": lev,
        "attention": attention,
        "scores": np.pad(blending * lev + attention, ((0, 0), (first, last))),
    }


def compactor_sketch() -> np.ndarray:
    """[KV heads, d, 8], entries of variance 1/8."""
    return normal("sketch", NUM_KV_HEADS, HEAD_DIM, 8, scale=8**-0.5)


def compactor(layer: Layer) -> dict:
    """Leverage of the keys before RoPE, and attention that looks both ways."""
    sketch = compactor_sketch()
    cases = []
    for name, chunk, scale in [
        ("whole chunks, logits unscaled", 17, 1.0),
        ("ragged last chunk, logits unscaled", 16, 1.0),
        ("ragged last chunk, logits over sqrt(d)", 16, 0.25),
    ]:
        parts = compactor_scores(layer, sketch, chunk, scale, 0.35)
        options = {"first": 8, "last": 4, "chunk": chunk, "logit_scale": scale, "blending": 0.35, "damping": 0.01}
        scores = parts["scores"]
        extra = {key: parts[key] for key in ("leverage", "attention")}
        cases.append(scored_case(name, options, scores, ends_protected(scores, 8, 4), **extra))
    return {
        "policy": "compactor",
        "paper": "arXiv:2507.08143",
        "reads": ["q", "k", "k_pre", "v"],
        "sketch": sketch,
        "departures": [
            "The random sketch is given, [KV heads, d, 8].",
            "`leverage` and `attention` are the two z-scores over the 34 unprotected tokens.",
            "kvpress pads a ragged last chunk with logits of about 0 that take part in the softmax; here it is "
            "shorter.",
            "kvpress leaves logits unscaled; the third case divides them by sqrt(d).",
        ],
        "cases": cases,
    }


def ratio_of_norms(layer: Layer) -> np.ndarray:
    return norm(layer.v) / norm(layer.k)


def paged_eviction(layer: Layer) -> dict:
    """|V| / |K|, one decision for all heads."""
    page = 8
    per_head = ratio_of_norms(layer)
    shared = per_head.mean(axis=0, keepdims=True)
    last = len(layer.positions) % page
    prompt = scored_case(
        "prompt", {"page_size": page}, shared, ends_protected(shared, page, last), (20, 28, 37), per_head=per_head
    )
    num_pages = -(-len(layer.positions) // page)
    pages = np.array([shared[0, p * page : (p + 1) * page].mean() for p in range(num_pages)])
    middle = sorted(range(1, num_pages - 1), key=lambda p: (pages[p], p))
    decode = {"name": "pages", "options": {"page_size": page}, "page_scores": pages, "evicted_in_order": middle}
    return {
        "policy": "paged-eviction",
        "paper": "arXiv:2509.04377",
        "reads": ["k", "v"],
        "departures": [
            "The paper's direction: a high ratio (small key) stays. The public code's global mode has it the "
            "other way.",
            "A token's score is the mean over KV heads of the ratio; a page's the mean over its tokens.",
            "Prompt: the first page and the last, here of 6 tokens, are protected. Pages: so are they, worst first.",
        ],
        "cases": [prompt, decode],
    }
