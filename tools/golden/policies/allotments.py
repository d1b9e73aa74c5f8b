"""Policies that say how many tokens each layer and head may keep."""

import numpy as np

from attention import mask_of, top
from fixture import CLEAR_GAP
from tensors import (
    GROUP_SIZE,
    HEAD_DIM,
    NUM_KV_HEADS,
    Layer,
    by_group,
    generator,
    normal,
    per_query_head,
    rotate,
    rounded,
    softmax,
)


def pyramid_kvpress(tokens: int, evicted: float, layers: int, window: int, steepness: int) -> list[int]:
    """Tokens of each layer, window included; uniform where the pyramid does not fit."""
    base = tokens * (1 - evicted)
    low = base / steepness
    high = 2 * base - low
    if high >= tokens - window:
        high = tokens - window
        low = 2 * base - high
    if not tokens >= high >= low >= window:
        return [round(base)] * layers
    return [round(high - layer * (high - low) / (layers - 1)) for layer in range(layers)]


def pyramid_official(tokens: int, capacity: int, layers: int, window: int, steepness: int) -> list[int]:
    """Integers throughout; the window comes on top."""
    base = capacity - window
    if tokens < capacity:
        return [tokens] * layers
    if tokens < 2 * base:
        return [capacity] * layers
    low = base // steepness
    high = 2 * base - low
    if high >= tokens - window:
        high = tokens - window
        low = 2 * base - high
    step = (high - low) // (layers - 1)
    return [high - layer * step + window for layer in range(layers)]


def pyramid_kv(_: Layer) -> dict:
    """Counts only: the scores are those of snap-kv."""
    press = []
    for tokens, evicted, window in [
        (4096, 0.25, 64),
        (4096, 0.5, 64),
        (4096, 0.75, 64),
        (4096, 0.875, 64),
        (16384, 0.75, 64),
        (3900, 0.5, 64),
        (2000, 0.5, 8),
    ]:
        counts = pyramid_kvpress(tokens, evicted, 32, window, 20)
        press.append({"tokens": tokens, "evicted_fraction": evicted, "window": window, "counts": counts})
    sums = [sum(p["counts"]) for p in press]
    assert sums[:6] == [98304, 65536, 32 * 1024, 32 * 512, 131072, 62400]
    assert press[0]["counts"][:2] + press[0]["counts"][-1:] == [4032, 3970, 2112]
    official = []
    for tokens, capacity, layers, window in [
        (8000, 2048, 32, 8),
        (4000, 2048, 32, 8),
        (2000, 2048, 32, 8),
        (4090, 2048, 32, 8),
        (900, 128, 6, 8),
    ]:
        counts = pyramid_official(tokens, capacity, layers, window, 20)
        official.append({"tokens": tokens, "capacity": capacity, "window": window, "counts": counts})
    first = official[0]["counts"]
    assert (first[0], first[-1], sum(first)) == (3986, 111, 65552)
    return {
        "policy": "pyramid-kv",
        "paper": "arXiv:2406.02069",
        "reads": [],
        "departures": [
            "kvpress: the window counts inside; fractions are binary floating point and halves round to even. Without "
            "room for a pyramid every layer gets round(tokens * kept fraction).",
            "official: the window is on top of the pyramid, inside the capacity elsewhere; integer division.",
            "Either may add up to more or fewer than layers * base.",
        ],
        "cases": [
            {"name": "kvpress", "options": {"steepness": 20}, "counts": press},
            {"name": "official", "options": {"steepness": 20}, "counts": official},
        ],
    }


def ada_kv(_: Layer) -> dict:
    """One pool for the heads of a layer: a floor, or a pull to the middle."""
    heads, tokens = 4, 24
    # Heads as unlike as attention makes them: nearly even to nearly all on a few tokens.
    sharpness = np.array([[0.3], [1.0], [2.0], [4.0]])
    scores = rounded(softmax(normal("ada scores", heads, tokens) * sharpness))
    none = np.zeros((heads, tokens), dtype=bool)
    floor = []
    for count, alpha in [(12, 0.2), (6, 0.5), (6, 1.0), (3, 0.2)]:
        safe = int(alpha * count)
        flags = mask_of(top(scores, none, [safe] * heads)[0], tokens) if safe else none
        pool, gap = top(scores.reshape(1, -1), flags.reshape(1, -1), [heads * count])
        assert gap > CLEAR_GAP, "an unclear cut: change the seed"
        kept = [np.flatnonzero(head) for head in mask_of(pool, heads * tokens).reshape(heads, tokens)]
        floor.append({"count": count, "alpha": alpha, "safe": safe, "counts": [len(k) for k in kept], "tokens": kept})
    pulled = []
    for base, alpha, normalise in [(12, 0.2, False), (6, 0.5, False), (6, 0.2, True)]:
        ranked = scores
        if normalise:
            best = np.sort(scores, axis=1)[:, ::-1][:, :base].sum(axis=1) / scores.sum(axis=1)
            ranked = scores * best[:, None]
        pool, gap = top(ranked.reshape(1, -1), none.reshape(1, -1), [heads * base])
        raw = [int((np.array(pool[0]) // tokens == h).sum()) for h in range(heads)]
        exact = [(1 - alpha) * c + int(alpha * base) for c in raw]
        counts = [round(e) for e in exact]
        kept, cut = top(scores, none, [min(c, tokens) for c in counts])
        assert min(gap, cut) > CLEAR_GAP, "an unclear cut: change the seed"
        pulled.append(
            {
                "base": base,
                "alpha": alpha,
                "normalise": normalise,
                "pooled_counts": raw,
                "before_rounding": exact,
                "counts": counts,
                "tokens": kept,
            }
        )
    hand = {
        "name": "by hand",
        "options": {"base": 100, "alpha": 0.2},
        "pooled_counts": [250, 90, 40, 20],
        "interpolated": [round(0.8 * c + 20) for c in (250, 90, 40, 20)],
        "floored": [250, 90, 40, 20],
    }
    assert hand["interpolated"] == [220, 92, 52, 36]
    assert int(int(6 * 0.5) * 0.2) == 0
    return {
        "policy": "ada-kv",
        "paper": "arXiv:2407.11550",
        "reads": [],
        "scores": scores,
        "departures": [
            "floor (kvpress): floor(alpha * count) best tokens of each head are flagged, then heads * count of "
            "the layer.",
            "interpolated (official): (1 - alpha) * pooled count + floor(alpha * base), halves to even; the "
            "window, which "
            "the official code adds to each head, is left out. Rounding may miss the sum: before_rounding is given.",
            "normalise: a head's scores times (the mass of its best `base` tokens / its whole mass), for the "
            "pooled count only.",
        ],
        "cases": [
            {"name": "floor", "options": {}, "kept": floor},
            {"name": "interpolated", "options": {}, "kept": pulled},
            hand,
        ],
    }


def attention_area(q: np.ndarray, k: np.ndarray, places: int) -> np.ndarray:
    """Mean of the cumulative attention, of query heads, from the last of `places` copies of q to as many of k."""
    last = rotate(q[:, None], np.array([places - 1]))
    turned = rotate(np.repeat(per_query_head(k)[:, None], places, axis=1), np.arange(places))
    weights = softmax(np.einsum("qtd,qsd->qs", last, turned) / HEAD_DIM**0.5)
    return weights.cumsum(axis=1).mean(axis=1)


def duo_attention(layer: Layer) -> dict:
    """Heads that keep all, and heads that keep sinks and the recent."""
    layers, heads, tokens, sinks, recent = 4, 4, 100, 16, 32
    table = rounded(np.clip(generator("duo table").random((layers, heads)) * 1.2 - 0.1, 0, 1))
    order = sorted((float(table[n, h]), n, h) for n in range(layers) for h in range(heads))
    given = []
    for fraction in (0.25, 0.5, 0.8):
        streaming = sorted([n, h] for _, n, h in order[: round(layers * heads * fraction)])
        held = layers * heads * tokens - len(streaming) * (tokens - sinks - recent)
        given.append({"head_fraction": fraction, "streaming": streaming, "held_tokens": held})
    table_case = {
        "name": "given table",
        "options": {"tokens": tokens, "sinks": sinks, "recent": recent},
        "table": table,
        "kept": given,
    }
    places = 500
    given_means = {
        "q": normal("duo q", NUM_KV_HEADS * GROUP_SIZE, HEAD_DIM, scale=1.5),
        "k": normal("duo k", NUM_KV_HEADS, HEAD_DIM, scale=1.5),
    }
    own_means = {"q": layer.q_pre.mean(axis=1), "k": layer.k_pre.mean(axis=1)}
    estimates = []
    for name, means in [("estimate from given means", given_means), ("estimate from the layer", own_means)]:
        area = by_group(attention_area(means["q"], means["k"], places))
        case = {"name": name, "options": {"places": places}}
        if means is given_means:
            case["means"] = means
        estimates.append(case | {"area_of_query_heads": area.reshape(-1), "area": area.mean(axis=1)})
    return {
        "policy": "duo-attention",
        "paper": "arXiv:2410.10819",
        "reads": ["q_pre", "k_pre"],
        "departures": [
            "The fraction is of heads; the round(heads * fraction) smallest of the table stream, as in kvpress.",
            "Values that were clipped to 0 tie towards the lower layer, then the lower head.",
            "estimate: mean query and key before RoPE, the key at places 0 to 499, the query at 499; mean of the "
            "cumulative "
            "sum of its attention. Small: local. Means are over one text here; kvpress averages 50.",
        ],
        "cases": [table_case, *estimates],
    }


def block_prices(metrics: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Slots in the order they would go, and the metric of the dearest token of each block freed in turn."""
    order = np.lexsort((np.arange(len(metrics)), metrics))
    hang = len(metrics) % block or block
    ends = np.arange(hang - 1, len(metrics), block)
    return order, metrics[order][ends]


def freed(metrics: list[np.ndarray], block: int, count: int) -> list[np.ndarray]:
    """The slots that freeing `count` blocks takes from each head, ascending."""
    priced = [block_prices(m, block) for m in metrics]
    all_prices = sorted((p, h) for h, (_, prices) in enumerate(priced) for p in prices if np.isfinite(p))
    taken = [sum(1 for _, h in all_prices[:count] if h == head) for head in range(len(metrics))]
    sizes = [(len(m) % block or block) + (n - 1) * block if n else 0 for m, n in zip(metrics, taken)]
    return [np.sort(order[:size]) for (order, _), size in zip(priced, sizes)]


def kv_compress(layer: Layer) -> dict:
    """Blocks of all heads in one pool, each at the price of its dearest token."""
    block, window, observed = 4, 8, 8
    tokens = len(layer.positions)
    apart = layer.positions[-observed:, None] - layer.positions[None, :]
    cases = []
    for power, buffer, width in [(2, 0, 7), (2, 0, 1), (1, 0, 1), (2, 4, 7)]:
        rows = layer.rows[:, -observed:] * (apart >= buffer)
        seen = (rows**power).sum(axis=1)
        half = width // 2
        wide = np.pad(seen, ((0, 0), (half, half)))
        metric = by_group(np.lib.stride_tricks.sliding_window_view(wide, width, axis=1).max(axis=-1)).sum(axis=1)
        open_ = np.where(layer.positions < tokens - window, metric, np.inf)
        kept = []
        for count in (1, 5, 11, 16, 30):
            gone = freed(list(open_), block, count)
            kept.append({"blocks": count, "evicted": gone, "tokens": [np.setdiff1d(layer.positions, g) for g in gone]})
        prices = [block_prices(m, block)[1] for m in open_]
        # Near prices may trade places in float32, unless they are the same number (pooling repeats maxima).
        finite = np.sort(open_[np.isfinite(open_)])
        near = np.diff(finite)
        assert not ((near > 0) & (near < 1e-6 * finite[1:])).any(), "unclear metrics: change the seed"
        cases.append(
            {
                "name": f"power {power}, buffer {buffer}, max of {width}",
                "options": {
                    "block": block,
                    "window": window,
                    "observed": observed,
                    "power": power,
                    "buffer": buffer,
                    "kernel": width,
                },
                "metric": metric,
                "prices": [[p for p in head if np.isfinite(p)] for head in prices],
                "kept": kept,
            }
        )
    a = np.array([0.9, 0.1, 0.5, 0.05, 0.2, 0.8])
    b = np.array([0.3, 0.31, 0.32, 0.33, 0.6, 0.7, 0.95, 0.99])
    hand = {"name": "two heads by hand", "options": {"block": 4}, "metrics": [a, b]}
    hand["prices"] = [block_prices(m, 4)[1] for m in (a, b)]
    hand["kept"] = [{"blocks": n, "evicted": freed([a, b], 4, n)} for n in (1, 2, 3, 4)]
    assert hand["prices"][0].tolist() == [0.1, 0.9] and hand["prices"][1].tolist() == [0.33, 0.99]
    assert [[list(g) for g in k["evicted"]] for k in hand["kept"][:3]] == [
        [[1, 3], []],
        [[1, 3], [0, 1, 2, 3]],
        [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3]],
    ]
    budgets = []
    for length, layers, heads, window_, cap, rate in [
        (46, 1, 2, 8, 24, None),
        (1000, 4, 2, 64, 130, None),
        (1000, 4, 2, 62, None, 0.25),
    ]:
        current = -(-length // 4) * layers * heads
        if cap is not None:
            target = -(-(-(-cap // 4) * 4 * layers * heads) // 4)
        else:
            guarded = -(-window_ // 4) * 4
            held = int(np.ceil((length - guarded) * layers * heads * rate)) + guarded * layers * heads
            target = -(-held // 4)
        budgets.append(
            {
                "tokens": length,
                "layers": layers,
                "kv_heads": heads,
                "window": window_,
                "max_cache_tokens": cap,
                "kept_fraction": rate,
                "allowed_blocks": target,
                "evict_blocks": max(0, current - target),
            }
        )
    return {
        "policy": "kv-compress",
        "paper": "arXiv:2410.00161",
        "reads": ["rows"],
        "departures": [
            "metric: over the last 8 rows, attention to the power, pairs with t - s < buffer left out; "
            "max-pooled a query "
            "head, then summed over the group. Not pooled: kernel 1.",
            "The last `window` tokens cost infinity; `prices` lists the finite ones, and more blocks than those "
            "free those.",
            "Equal metrics: the older slot goes first. Equal prices: the lower head pays first.",
            "evicted slots are positions before any compaction; budgets are for blocks of 4 tokens.",
        ],
        "cases": [*cases, hand, {"name": "budgets", "options": {"block": 4}, "points": budgets}],
    }
