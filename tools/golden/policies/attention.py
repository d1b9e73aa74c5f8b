"""Policies that score tokens by the attention they receive, or are expected to."""

import numpy as np

from fixture import (
    CLEAR_GAP,
    ends_protected,
    kept_sets,
    kept_tokens,
    no_protection,
    scored_case,
    with_nulls,
)
from keys_and_values import norm
from tensors import (
    GROUP_SIZE,
    HEAD_DIM,
    NUM_KV_HEADS,
    ROPE_BASE,
    Layer,
    by_group,
    normal,
    per_query_head,
    rounded,
    softmax,
)


def pooled(x: np.ndarray, width: int, kind: str) -> np.ndarray:
    """Stride-1 pooling along the last axis, same length; an average counts what lies outside as 0."""
    half = width // 2
    outside = 0.0 if kind == "average" else -np.inf
    wide = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(half, half)], constant_values=outside)
    windows = np.lib.stride_tricks.sliding_window_view(wide, width, axis=-1)
    return windows.mean(axis=-1) if kind == "average" else windows.max(axis=-1)


def column_sums(layer: Layer) -> np.ndarray:
    """[KV heads, group, tokens]: attention each token received from all rows."""
    return by_group(layer.rows).sum(axis=2)


def h2o(layer: Layer) -> dict:
    """Accumulated attention."""
    tokens = len(layer.positions)
    total = column_sums(layer).sum(axis=1)
    average = column_sums(layer).mean(axis=1) / (tokens - layer.positions)
    return {
        "policy": "h2o",
        "paper": "arXiv:2306.14048",
        "reads": ["rows"],
        "departures": [
            "sum: over all rows and over the query heads of the group (the paper has one query head a KV head).",
            "average: the mean over the group of the sum over the number of rows that see the token, as in kvpress.",
            "`recent` tokens are protected inside the budget; kvpress protects none.",
        ],
        "cases": [
            scored_case("sum", {"normalise": "none", "recent": 8}, total, ends_protected(total, last=8)),
            scored_case("sum, nothing recent", {"normalise": "none", "recent": 0}, total),
            scored_case("average", {"normalise": "visible_count", "recent": 0}, average),
        ],
    }


def scissorhands(layer: Layer) -> dict:
    """How often a token fell below an even share of attention."""
    tokens, history = len(layer.positions), 16
    rows = by_group(layer.rows).mean(axis=1)
    share = 1 / (layer.positions + 1.0)
    causal = np.tril(np.ones((tokens, tokens), dtype=bool))
    seen = causal[-history:]
    margin = np.abs(rows[:, -history:] / share[-history:, None] - 1)[:, seen].min()
    assert margin > 1e-5, "an unclear share: change the seed"
    below = ((rows < share[:, None]) & causal)[:, -history:].sum(axis=1)
    times = seen.sum(axis=0)
    held = ((rows >= share[:, None]) & causal)[:, -history:].sum(axis=1) / times
    paper = scored_case(
        "count below",
        {"history": history, "recent": 4},
        -below.astype(float),
        ends_protected(below, last=4),
        tied=True,
    )
    rate = scored_case(
        "rate at or above", {"history": history, "recent": 4, "sinks": 4}, held, ends_protected(held, 4, 4), tied=True
    )
    return {
        "policy": "scissorhands",
        "paper": "arXiv:2305.17118",
        "reads": ["rows"],
        "departures": [
            "There is no official code; rows are the mean over the group, the share of row t is 1/(t + 1).",
            "count below: minus the number of the last 16 rows that give the token less than a share (the paper).",
            "rate at or above: rows that give at least a share over the rows that see the token, of the last 16.",
            "Counts tie on purpose; the more recent token stays.",
        ],
        "cases": [paper, rate],
    }


def fast_gen(layer: Layer) -> dict:
    """The cheapest class of tokens that recovers enough of each head's attention."""
    tokens = len(layer.positions)
    special, punctuation = [0, 1, 2, 3], [9, 17, 18, 26, 33, 40]
    local = frequent = int(0.3 * tokens)
    rows = by_group(layer.rows).mean(axis=1)
    f = rows.sum(axis=1) / (tokens - layer.positions)
    is_special = np.isin(layer.positions, special)
    with_punctuation = is_special | np.isin(layer.positions, punctuation)
    near = layer.positions[:, None] - layer.positions[None, :]
    near = (near >= 0) & (near < local)
    heads = []
    for h in range(NUM_KV_HEADS):
        picked = kept_sets(f[h : h + 1], with_punctuation[None], [int(with_punctuation.sum()) + frequent])[0]
        assert picked["count"] == with_punctuation.sum() + frequent, "an unclear cut: change the seed"
        with_frequent = np.isin(layer.positions, picked["tokens"][0])
        masks = [is_special, with_punctuation, with_frequent, with_frequent | near, np.ones(tokens, dtype=bool)]
        masks = [np.broadcast_to(mask, (tokens, tokens)) for mask in masks]
        recovery = [(rows[h] * mask).sum(axis=1).mean() for mask in masks]
        heads.append(
            {
                "frequency": f[h],
                "recovery": recovery,
                "kept_by_class": [np.flatnonzero(mask[-1]) for mask in masks],
                "chosen": [
                    {"threshold": t, "class": next(c for c, r in enumerate(recovery) if r >= t or c == 4)}
                    for t in (0.25, 0.5, 0.7, 0.9, 0.95)
                ],
            }
        )
    case = {
        "name": "recovery",
        "options": {"special": special, "punctuation": punctuation, "local": local, "frequent": frequent},
        "classes": ["special", "+ punctuation", "+ frequent", "+ local", "full"],
        "heads": heads,
    }
    return {
        "policy": "fastgen",
        "paper": "arXiv:2310.01801",
        "reads": ["rows"],
        "departures": [
            "One class a KV head, by rows averaged over the group (undefined in the paper).",
            "recovery: mean over all rows of the attention inside the class; local is t - s < 13, for each row t.",
            "frequent: the 13 tokens of highest mean received attention among those neither special nor punctuation.",
            "kept_by_class: as the last row sees it. full is chosen when no other reaches the threshold.",
        ],
        "cases": [case],
    }


def window_attention(layer: Layer, window: int) -> np.ndarray:
    """[KV heads, group, window, tokens before the window]."""
    return by_group(layer.rows)[:, :, -window:, :-window]


def snap_kv_scores(layer: Layer, window: int, width: int, kind: str = "average") -> np.ndarray:
    """[KV heads, tokens before the window]: mean over the window, pooled, then the mean over the group."""
    return pooled(window_attention(layer, window).mean(axis=2), width, kind).mean(axis=1)


def snap_kv(layer: Layer) -> dict:
    """What the last queries look at."""
    window = 8

    def case(name: str, scores: np.ndarray, **options) -> dict:
        padded = np.pad(scores, ((0, 0), (0, window)))
        options = {"window": window, **options}
        return scored_case(
            name, options, padded, ends_protected(padded, last=window), tied=options.get("pooling") == "max"
        )

    seen = window_attention(layer, window)
    cases = []
    for kind, width in [("average", 5), ("max", 5), ("max", 7)]:
        cases.append(
            case(
                f"pool, then reduce; {kind} of {width}",
                snap_kv_scores(layer, window, width, kind),
                kernel=width,
                pooling=kind,
                order="pool_then_reduce",
            )
        )
        cases.append(
            case(
                f"reduce, then pool; {kind} of {width}",
                pooled(seen.mean(axis=2).mean(axis=1), width, kind),
                kernel=width,
                pooling=kind,
                order="reduce_then_pool",
            )
        )
    # Official: the sum, and every query head for itself (keys are repeated to the query heads before they are cut).
    for kind, width in [("average", 5), ("max", 7)]:
        alone = pooled(seen.sum(axis=2), width, kind).reshape(-1, seen.shape[-1])
        cases.append(
            case(f"official, a query head; {kind} of {width}", alone, kernel=width, pooling=kind, order="query_heads")
        )
    ones = {"name": "average of six ones", "options": {"kernel": 5, "pooling": "average"}}
    ones["pooled"] = pooled(np.ones(6), 5, "average")
    assert np.allclose(ones["pooled"], [0.6, 0.8, 1, 1, 0.8, 0.6])
    return {
        "policy": "snap-kv",
        "paper": "arXiv:2404.14469",
        "reads": ["rows"],
        "departures": [
            "The window is protected and counts inside the budget (official: capacity - window before it, the same).",
            "Orders agree for the average and differ for the maximum; kvpress is pool_then_reduce with the average.",
            "query_heads: scores and kept sets of the 6 query heads, as the official code holds them.",
            "Neighbours share a maximum: such ties are cut, and the more recent token stays.",
            "A mean over the window; the official sum (query_heads) is 8 times as large and ranks the same.",
        ],
        "cases": [*cases, ones],
    }


def taken_by_turns(heads: np.ndarray) -> list[int]:
    """Tokens in the order in which the heads [heads, tokens] pick them: each its best left, the higher mean first."""
    means = heads.mean(axis=0)
    order: list[int] = []
    for named in np.argsort(-heads, axis=1, kind="stable").T:
        fresh = [int(s) for s in sorted(set(named.tolist()), key=lambda s: -means[s]) if s not in order]
        order.extend(fresh)
    return order


def head_pooling(layer: Layer) -> dict:
    """Query heads of a group scored apart, and the ways to make one score of theirs."""
    window, sinks, temperature = 8, 4, 0.5
    rows = by_group(layer.rows)
    snap = pooled(window_attention(layer, window).mean(axis=2), 5, "average")
    seen = rows[:, :, -window:].mean(axis=2)
    read = {
        "tova": (rows[:, :, -1], rows[:, :, -1]),
        "h2o": (rows.sum(axis=2), rows.mean(axis=2)),
        # The window is not pooled along positions.
        "snapkv": (np.concatenate([snap, seen[:, :, -window:]], axis=2), seen),
    }
    cases = []
    for policy, (scores, observed) in read.items():
        residual = observed[:, :, sinks:] / observed[:, :, sinks:].sum(axis=2, keepdims=True)
        weights = softmax(np.log((residual**2).sum(axis=2)) / temperature)
        ordered = np.sort(np.concatenate([scores, scores.mean(axis=1, keepdims=True)], axis=1), axis=2)
        assert np.diff(ordered, axis=2).min() > 2e-7 * scores.max(), "scores too near: change the seed"
        places = [np.argsort(taken_by_turns(heads)) for heads in scores]
        pools = {
            "mean": scores.mean(axis=1),
            "max": scores.max(axis=1),
            "entropy": (weights[:, :, None] * scores).sum(axis=1),
            "union": -np.array(places, dtype=float),
        }
        for pool, of_group in pools.items():
            cases.append(scored_case(f"{policy}, {pool}", {"heads": pool, "weights": weights}, of_group, tied=True))
    return {
        "policy": "head-pooling",
        "paper": "arXiv:2610.03135 for the weights",
        "reads": ["rows"],
        "departures": [
            "Each query head is scored as if it were alone: tova by the last row, h2o by the sum of all rows, snapkv by "
            "the mean of the last 8, pooled over 5 (the window's own tokens as they are).",
            "entropy: the softmax of minus the collision entropy over 0.5, of the mean of the rows read, without its "
            "first 4 entries.",
            "union: minus the place at which the heads, picking by turns, come to the token.",
        ],
        "cases": cases,
    }


def tova(layer: Layer) -> dict:
    """The last row, averaged over all query heads: one set for the layer."""
    scores = np.tile(layer.rows[:, -1].mean(axis=0), (NUM_KV_HEADS, 1))
    return {
        "policy": "tova",
        "paper": "arXiv:2401.06104",
        "reads": ["rows"],
        "departures": ["The paper lets the newest token compete; kvpress protects it."],
        "cases": [
            scored_case("paper", {"protect_last": False}, scores),
            scored_case("last protected", {"protect_last": True}, scores, ends_protected(scores, last=1)),
        ],
    }


def mean_rotation(first: int, count: int) -> np.ndarray:
    """[d, d]: the mean of the RoPE rotations of `count` positions from `first`, half-split."""
    half = HEAD_DIM // 2
    angle = np.outer(np.arange(first, first + count), ROPE_BASE ** (-np.arange(half) / half))
    cos, sin = np.diag(np.cos(angle).mean(axis=0)), np.diag(np.sin(angle).mean(axis=0))
    return np.block([[cos, -sin], [sin, cos]])


def expected_attention_scores(
    layer: Layer, sinks: int, future: int, covariance: bool, value_norm: bool, epsilon: float = 0.0
) -> np.ndarray:
    """[KV heads, tokens after the sinks]."""
    queries = layer.q_pre[:, sinks:]
    mean = queries.mean(axis=1)
    centred = queries - mean[:, None]
    turn = mean_rotation(len(layer.positions), future)
    mean = mean @ turn.T
    keys = per_query_head(layer.k[:, sinks:])
    logits = np.einsum("qsd,qd->qs", keys, mean) / HEAD_DIM**0.5
    if covariance:
        spread = turn @ (centred.transpose(0, 2, 1) @ centred / queries.shape[1]) @ turn.T
        logits += np.einsum("qsi,qij,qsj->qs", keys, spread, keys) / (2 * HEAD_DIM)
    scores = by_group(softmax(logits)).mean(axis=1)
    return (scores + epsilon) * norm(layer.v[:, sinks:]) if value_norm else scores


def expected_attention(layer: Layer) -> dict:
    """Attention of Gaussian queries at the positions to come."""
    sinks, future = 4, 32
    cases = []
    for covariance, value_norm, epsilon in [
        (True, True, 0.0),
        (True, True, 0.02),
        (True, False, 0.0),
        (False, True, 0.0),
        (False, False, 0.0),
    ]:
        inner = expected_attention_scores(layer, sinks, future, covariance, value_norm, epsilon)
        scores = np.pad(inner, ((0, 0), (sinks, 0)))
        name = f"{'mean and covariance' if covariance else 'mean only'}{', value norm' if value_norm else ''}"
        name += f", epsilon {epsilon}" if epsilon else ""
        options = {
            "sinks": sinks,
            "future": future,
            "covariance": covariance,
            "value_norm": value_norm,
            "epsilon": epsilon,
        }
        cases.append(scored_case(name, options, scores, ends_protected(scores, first=sinks)))
    return {
        "policy": "expected-attention",
        "paper": "arXiv:2510.00636",
        "reads": ["q_pre", "k", "v"],
        "departures": [
            "Queries of the sinks are left out of the moments; the covariance divides by the number of queries, 42.",
            "Future positions are 46 to 77: the first is that of the next token.",
        ],
        "cases": cases,
    }


def output_norms(layer: Layer) -> np.ndarray:
    """[KV heads, tokens]: mean over the group of the 1-norm of the value through the output projection."""
    wo = layer.wo.reshape(NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM, -1)
    return np.abs(np.einsum("hsd,hgdo->hgso", layer.v, wo)).sum(axis=-1).mean(axis=1)


def top(scores: np.ndarray, flagged: np.ndarray, counts: list[int]) -> tuple[list[list[int]], float]:
    """Kept tokens of each head at a count of its own, and the least clear gap."""
    cuts = [kept_tokens(s, f, n) for s, f, n in zip(scores, flagged, counts)]
    return [tokens for tokens, _ in cuts], min(gap for _, gap in cuts)


def mask_of(tokens: list[list[int]], num_tokens: int) -> np.ndarray:
    return np.array([np.isin(np.arange(num_tokens), kept) for kept in tokens])


def critical_kv(layer: Layer) -> dict:
    """Half the budget by the inner score, the rest by score times what the value adds to the output."""
    sinks, epsilon, share, alpha = 4, 1e-4, 0.5, 0.2
    tokens = len(layer.positions)
    inner = np.pad(expected_attention_scores(layer, sinks, 32, True, False), ((0, 0), (sinks, 0)))
    protected = ends_protected(inner, first=sinks)
    omega = output_norms(layer)
    second = (inner + epsilon) * omega
    sets = []
    for count in (14, 23, 37):
        forced, first_gap = top(inner, protected, [int(count * share)] * NUM_KV_HEADS)
        kept, second_gap = top(second, mask_of(forced, tokens) | protected, [count] * NUM_KV_HEADS)
        assert min(first_gap, second_gap) > CLEAR_GAP, "an unclear cut: change the seed"
        sets.append({"count": count, "forced": forced, "tokens": kept})
    options = {"epsilon": epsilon, "first_stage": share, "sinks": sinks}
    uniform = {"name": "uniform", "options": options, "inner_scores": inner, "output_norms": omega}
    uniform |= {"scores": with_nulls(second, protected), "kept": sets}
    adaptive = []
    for count in (14, 23, 37):
        safe, safe_gap = top(inner, protected, [max(int(count * alpha), sinks)] * NUM_KV_HEADS)
        flat_flags = (mask_of(safe, tokens) | protected).reshape(1, -1)
        pool, pool_gap = top(inner.reshape(1, -1), flat_flags, [NUM_KV_HEADS * count])
        budgets = [int((np.array(pool[0]) // tokens == h).sum()) for h in range(NUM_KV_HEADS)]
        flags = mask_of(safe, tokens) | protected
        # The safeguarded tokens rank above all others, so they are the first of those forced in.
        forced, first_gap = top(inner, flags, [max(int(n * share), int(f.sum())) for n, f in zip(budgets, flags)])
        kept, second_gap = top(second, mask_of(forced, tokens), budgets)
        assert min(safe_gap, pool_gap, first_gap, second_gap) > CLEAR_GAP, "an unclear cut: change the seed"
        adaptive.append({"count": count, "budgets": budgets, "forced": forced, "tokens": kept})
    ada = {"name": "adaptive", "options": {**options, "safeguard": alpha}, "kept": adaptive}
    return {
        "policy": "critical-kv",
        "paper": "arXiv:2502.03805",
        "reads": ["q_pre", "k", "v", "wo"],
        "departures": [
            "The inner score is expected attention with covariance and without the value norm, 4 sinks.",
            "Sinks are flagged, count inside the budget and inside the first stage; nothing is marked by a huge score.",
            "adaptive: at least floor(safeguard * count) tokens a head (the sinks at the least), the rest of the "
            "layer's "
            "2 * count by the inner score; then the two stages in each head at its own count. Safeguarded tokens are "
            "forced in even where they are more than the first stage holds.",
        ],
        "cases": [uniform, ada],
    }


def kv_zip(layer: Layer) -> dict:
    """Attention of an extra pass that repeats the context: the maximum over its queries and the group."""
    layers, queries, tokens, sinks = 2, 6, 24, 4
    logits = normal("kvzip rows", layers, NUM_KV_HEADS * GROUP_SIZE, queries, tokens, scale=1.5)
    # The pass's own keys take a part of each row: what is given sums to less than 1.
    rows = rounded(softmax(logits) * 0.8)
    x_norms = rounded(np.abs(normal("kvzip x norms", layers, queries)) + 3.0)
    cut = slice(0, tokens)

    def score(weighted: np.ndarray) -> np.ndarray:
        grouped = weighted.reshape(layers, NUM_KV_HEADS, GROUP_SIZE, queries, tokens)
        return grouped.max(axis=(2, 3))

    wo = layer.wo.reshape(NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM, -1)
    out = norm(np.einsum("hsd,hgdo->hgso", layer.v[:, cut], wo)).reshape(-1, tokens)
    plus = rows * out[None, :, None, :] / x_norms[:, None, :, None]
    cases = []
    for name, scores in [("kvzip", score(rows)), ("kvzip+", score(plus))]:
        protected = np.broadcast_to(np.arange(tokens) < sinks, scores.shape)
        kept = []
        for evicted_fraction in (0.25, 0.5, 0.75):
            total = scores.size
            globally, gap = top(
                scores.reshape(1, -1), protected.reshape(1, -1), [total - int(total * evicted_fraction)]
            )
            mask = mask_of(globally, total).reshape(scores.shape)
            by_layer = []
            for s, p in zip(scores, protected):
                chosen, ngap = top(s.reshape(1, -1), p.reshape(1, -1), [s.size - int(s.size * evicted_fraction)])
                gap = min(gap, ngap)
                by_layer.append([np.flatnonzero(m) for m in mask_of(chosen, s.size).reshape(s.shape)])
            assert gap > CLEAR_GAP, "an unclear cut: change the seed"
            kept.append(
                {
                    "evicted_fraction": evicted_fraction,
                    "global": [[np.flatnonzero(head) for head in one] for one in mask],
                    "layerwise": by_layer,
                }
            )
        written = [with_nulls(*one) for one in zip(scores, protected)]
        cases.append({"name": name, "options": {"sinks": sinks}, "scores": written, "kept": kept})
    flat = np.sort(score(rows).reshape(-1))[::-1]
    kept_of_ratio = [
        {"kept_fraction": r, "kept": int((flat > flat[int(r * flat.size) - 1]).sum())} for r in (0.25, 0.5)
    ]
    strict = {"name": "official threshold", "options": {"sinks": 0}, "counts": kept_of_ratio}
    return {
        "policy": "kvzip",
        "paper": "arXiv:2505.23416",
        "reads": ["v", "wo"],
        "rows": rows,
        "x_norms": x_norms,
        "departures": [
            "`rows` [layers, query heads, queries, tokens] are those of the extra pass, given; its softmax also "
            "covers its own keys.",
            "kvzip+ multiplies by |value through the output projection| / |layer input of the query|, 2-norms. "
            "Both layers "
            "use the values (first 24 tokens) and projection of inputs.json.",
            "scores and kept sets are [layers][KV heads]; evicted entries are floor(fraction * entries), pooled "
            "over all "
            "(global) or over one layer's heads (layerwise). Sinks are protected and count.",
            "official threshold: keeps strictly above the value at rank (fraction * N - 1), one fewer than asked.",
        ],
        "cases": [*cases, strict],
    }


def r_kv(layer: Layer) -> dict:
    """Attention of the last queries, less redundancy among the keys."""
    window, width, tokens = 8, 7, len(layer.positions)
    queries = by_group(layer.q[:, -window:])
    logits = np.einsum("hgtd,hsd->hgts", queries, layer.k[:, :-window]).max(axis=1) / HEAD_DIM**0.5
    importance = pooled(softmax(logits).mean(axis=1), width, "max")
    seen = window_attention(layer, window).max(axis=1)
    by_rows = pooled((seen / seen.sum(axis=-1, keepdims=True)).mean(axis=1), width, "max")
    unit = layer.k / norm(layer.k)[..., None]
    cosine = unit @ unit.transpose(0, 2, 1)
    cosine[:, layer.positions, layer.positions] = 0.0
    assert np.abs(cosine - 0.5).min() > 1e-6, "an unclear similarity: change the seed"
    cases = []
    for quirk in (False, True):
        similar = cosine.copy()
        for h in range(NUM_KV_HEADS):
            for i in range(tokens):
                above = np.flatnonzero(cosine[h, i] > 0.5)
                if len(above):
                    similar[h, i, above[-1]] = 0.0
                elif quirk:
                    similar[h, i, 0] = 0.0
        redundancy = softmax(similar.mean(axis=1))[:, :-window]
        for weight in (0.1, 0.07):
            scores = np.pad(weight * importance - (1 - weight) * redundancy, ((0, 0), (0, window)))
            name = f"lambda {weight}{', first entry cleared' if quirk else ''}"
            options = {"window": window, "kernel": width, "threshold": 0.5, "lambda": weight, "clear_first": quirk}
            cases.append(
                scored_case(
                    name,
                    options,
                    scores,
                    ends_protected(scores, last=window),
                    importance=importance,
                    redundancy=redundancy,
                )
            )
            if not quirk:
                of_rows = np.pad(weight * by_rows - (1 - weight) * redundancy, ((0, 0), (0, window)))
                more = {"importance": by_rows, "redundancy": redundancy}
                flags = ends_protected(of_rows, last=window)
                cases.append(scored_case(f"rows, lambda {weight}", options, of_rows, flags, **more))
    return {
        "policy": "r-kv",
        "paper": "arXiv:2505.24133",
        "reads": ["q", "k"],
        "departures": [
            "importance: logits over sqrt(d), maximum over the group, softmax over tokens before the window, mean over "
            "the window, max of 7.",
            "redundancy: softmax over all 46 tokens of the mean over rows of cosines, the window then cut off; in each "
            "row the last cosine above 0.5 is cleared.",
            "rows: the importance of attention in place of logits, its maximum over the group over its sum before the "
            "window.",
            "clear_first: a row with none above 0.5 clears its entry for token 0, as the public code does by accident.",
        ],
        "cases": cases,
    }


def rocket_kv(layer: Layer) -> dict:
    """Stage 1: the sum over the window and the group, max-pooled; and the parameters of both stages."""
    window, width = 8, 9
    inner = pooled(window_attention(layer, window).sum(axis=(1, 2)), width, "max")
    scores = np.pad(inner, ((0, 0), (0, window)))
    protected = ends_protected(scores, last=window)
    stage = scored_case("stage 1", {"window": window, "kernel": width}, scores, protected, tied=True)
    points = []
    for length, budget, head_dim, reserve in [(32768, 512, 128, 128), (131072, 256, 128, 128), (1024, 2048, 64, 128)]:
        c = max(1.0, length / budget)
        a = min(0.2 + 0.06 * np.log2(c), 0.8)
        cap = int(length / c**a)
        c2 = max(1.0, cap / budget)
        chunk = int(np.ceil(c2**0.5))
        chunk = chunk if chunk <= c2 else 1
        channels = head_dim * chunk / c2
        points.append(
            {
                "length": length,
                "budget": budget,
                "head_dim": head_dim,
                "reserve": reserve,
                "c": c,
                "a": a,
                "capacity": cap,
                "prompt": cap - reserve,
                "k": budget // 2,
                "c2": c2,
                "chunk": chunk,
                "channels": min(max(round(channels), 1), head_dim),
                "channels_truncated": int(channels),
            }
        )
    assert [(p["capacity"], p["prompt"], p["k"], p["chunk"], p["channels"]) for p in points[:2]] == [
        (3191, 3063, 256, 3, 62),
        (1296, 1168, 128, 3, 76),
    ]
    reads = [rocket_kv_pages(layer, channels) for channels in (4, HEAD_DIM)]
    return {
        "policy": "rocket-kv",
        "paper": "arXiv:2502.14051",
        "reads": ["rows", "q", "k"],
        "departures": [
            "Pooled after the reduction over the group; the width is 9 here, 63 by default.",
            "channels is rounded; channels_truncated is the other form.",
            "stage 2: pages of 8 tokens, the last of 6, stand for the chunks, and the softmax runs over pages; the last one "
            "is read always and counts.",
        ],
        "cases": [stage, {"name": "parameters", "options": {}, "points": points}, *reads],
    }


def rocket_kv_pages(layer: Layer, channels: int) -> dict:
    """Stage 2: approximate attention of the last query to the corner of each page's keys."""
    page = 8
    starts = np.arange(0, len(layer.positions), page)
    low = np.minimum.reduceat(layer.k, starts, axis=1)
    high = np.maximum.reduceat(layer.k, starts, axis=1)
    query = by_group(layer.q[:, -1:])[:, :, 0]
    size = np.abs(query).sum(axis=1)
    scores = []
    for q, lo, hi, s in zip(query, low, high, size):
        chosen = np.argsort(-s, kind="stable")[:channels]
        corner = np.where(q.sum(axis=0) > 0, hi, lo)[:, chosen]
        part = np.abs(q[:, chosen]).sum(axis=1) / np.abs(q).sum(axis=1)
        logits = q[:, chosen] @ corner.T / np.sqrt(HEAD_DIM * part)[:, None]
        scores.append(softmax(logits).sum(axis=0))
    scores = np.array(scores)
    flags = np.zeros(scores.shape, dtype=bool)
    flags[:, -1] = True
    kept = []
    for count in (3, 4):
        cuts = [kept_tokens(s, f, count) for s, f in zip(scores, flags)]
        assert min(gap for _, gap in cuts) > CLEAR_GAP, "an unclear cut: change the seed"
        kept.append({"pages": count, "selected": [p for p, _ in cuts]})
    options = {"page_size": page, "channels": channels}
    return {"name": f"stage 2, pages of 8, {channels} channels", "options": options, "scores": scores, "kept": kept}


def pooled_pages(layer: Layer) -> dict:
    """Pages by the mean or the largest attention of their tokens, one set a KV head."""
    page, cases = 8, []
    starts = np.arange(0, len(layer.positions), page)
    sizes = np.diff([*starts, len(layer.positions)])
    for rows_name, window in [("last row", 1), ("last 8 rows", 8)]:
        token = by_group(layer.rows)[:, :, -window:].mean(axis=(1, 2))
        for kind in ("mean", "max"):
            pages = np.add.reduceat(token, starts, axis=1) / sizes
            if kind == "max":
                pages = np.maximum.reduceat(token, starts, axis=1)
            kept = [{"pages": s["count"], "kept": s["tokens"]} for s in kept_low(pages, [2, 4])]
            cases.append(
                {
                    "name": f"{kind} of a page, {rows_name}",
                    "options": {"page_size": page, "pooling": kind, "window": window},
                    "scores": pages,
                    "kept": kept,
                }
            )
    return {
        "policy": "pooled-pages",
        "paper": "baselines of page-level eviction",
        "reads": ["rows"],
        "departures": [
            "Rows are averaged over the group and the window first; a partial page's mean is over the tokens it holds.",
            "Scores and kept sets are of pages; equal pages would be kept from the lower one up.",
        ],
        "cases": cases,
    }


def kept_low(pages: np.ndarray, counts: list[int]) -> list[dict]:
    """kept_sets for pages, which tie towards the lower page; no fixture has such a tie."""
    assert all(len(set(head)) == len(head) for head in pages.tolist())
    return kept_sets(pages, no_protection(pages), counts)
