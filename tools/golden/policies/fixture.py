"""What a fixture file holds, how its numbers are written, and the one rule by which tokens are kept."""

import json
from pathlib import Path

import numpy as np

# Scores nearer than this (relative) may trade places in float32; no fixture cuts between two such tokens.
CLEAR_GAP = 2e-5


def kept_tokens(scores: np.ndarray, protected: np.ndarray, count: int) -> tuple[list[int], float]:
    """The tokens of one head that a budget of `count` keeps, ascending, and how clear the cut is.

    Protected first, then higher score, then the more recent token. The gap is the relative distance between the
    worst score kept and the best one dropped: 0 for an exact tie, infinite where nothing unprotected is kept or
    nothing is dropped.
    """
    assert protected.sum() <= count <= len(scores)
    order = sorted(range(len(scores)), key=lambda s: (protected[s], scores[s], s), reverse=True)
    kept, dropped = order[:count], order[count:]
    gap = np.inf
    if dropped and not protected[kept[-1]]:
        worst, best = scores[kept[-1]], scores[dropped[0]]
        # Scores about 0 (z-scores, differences) are no more exact than the large ones they come from.
        size = max(abs(worst), abs(best), np.abs(scores[~protected]).max() / 100)
        gap = 0.0 if worst == best else (worst - best) / size
    return sorted(kept), gap


def kept_sets(scores: np.ndarray, protected: np.ndarray, counts: list[int], tied: bool = False) -> list[dict]:
    """Kept sets of [heads, tokens] at about the given counts.

    A count at which some head's cut is unclear moves up to the next clear one. `tied` scores are small integers, ratios
    of them or copies of one maximum: those that are equal here are equal in float32 too, and may be cut between.
    """
    sets = []
    for count in counts:
        while True:
            cuts = [kept_tokens(s, p, count) for s, p in zip(scores, protected)]
            if all(gap > CLEAR_GAP or (tied and gap == 0.0) for _, gap in cuts):
                break
            count += 1
        sets.append({"count": count, "tokens": [tokens for tokens, _ in cuts]})
    return sets


def no_protection(scores: np.ndarray) -> np.ndarray:
    return np.zeros(scores.shape, dtype=bool)


def ends_protected(scores: np.ndarray, first: int = 0, last: int = 0) -> np.ndarray:
    """A mask of scores' shape with the first and last tokens set."""
    token = np.arange(scores.shape[-1])
    return np.broadcast_to((token < first) | (token >= scores.shape[-1] - last), scores.shape).copy()


def with_nulls(scores: np.ndarray, protected: np.ndarray) -> list:
    """Scores [heads, tokens] as they are written: null where the token is protected."""
    return [[None if p else np.float32(s) for s, p in zip(*head)] for head in zip(scores, protected)]


def scored_case(
    name: str,
    options: dict,
    scores: np.ndarray,
    protected: np.ndarray | None = None,
    counts: tuple[int, ...] = (14, 23, 37),
    tied: bool = False,
    **more,
) -> dict:
    """The usual case: scores of every head and the tokens they keep."""
    protected = no_protection(scores) if protected is None else protected
    return {
        "name": name,
        "options": options,
        "scores": with_nulls(scores, protected),
        "kept": kept_sets(scores, protected, list(counts), tied),
        **more,
    }


def number(x) -> str:
    """The shortest decimal that reads back as the same float32; integers as they are."""
    if isinstance(x, (bool, np.bool_)):
        return "true" if x else "false"
    if isinstance(x, (int, np.integer)):
        return str(int(x))
    if not np.isfinite(x):
        raise ValueError(f"JSON has no number for {x}")
    return str(np.float32(x)).removesuffix(".0")


def encoded(x, indent: int = 0) -> str:
    """JSON with a line for every innermost array."""
    if isinstance(x, np.ndarray):
        x = list(x)
    if isinstance(x, dict):
        if not x:
            return "{}"
        pad = " " * (indent + 1)
        body = ",\n".join(f"{pad}{json.dumps(key)}: {encoded(value, indent + 1)}" for key, value in x.items())
        return "{\n" + body + "\n" + " " * indent + "}"
    if isinstance(x, (list, tuple)):
        if not any(isinstance(item, (dict, list, tuple, np.ndarray)) for item in x):
            return "[" + ",".join(encoded(item) for item in x) + "]"
        pad = " " * (indent + 1)
        return "[\n" + ",\n".join(pad + encoded(item, indent + 1) for item in x) + "\n" + " " * indent + "]"
    if x is None or isinstance(x, str):
        return json.dumps(x, ensure_ascii=False)
    return number(x)


def write(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(encoded(content) + "\n", encoding="utf-8")
