"""The tensors every fixture is computed from: one attention layer over 46 tokens, and the arithmetic around it.

Inputs are float32, so that a reader holds exactly what is written; everything computed from them is float64.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

SEED = 20261130
NUM_KV_HEADS = 2
GROUP_SIZE = 3
NUM_QUERY_HEADS = NUM_KV_HEADS * GROUP_SIZE
HEAD_DIM = 16
HIDDEN = 24
# Not a multiple of 4, 8, 12 or 16: every page, lag and window of the fixtures ends in a partial one.
NUM_TOKENS = 46
ROPE_BASE = 10_000.0


def generator(name: str) -> np.random.Generator:
    """A generator of its own for each use, so that adding a fixture leaves the others as they are."""
    return np.random.default_rng([SEED, *name.encode()])


def normal(name: str, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Seeded Gaussian numbers, rounded to float32 and held in float64."""
    return rounded(generator(name).standard_normal(shape) * scale)


def rounded(x: np.ndarray) -> np.ndarray:
    """The nearest float32 numbers, held in float64."""
    return np.asarray(x).astype(np.float32).astype(np.float64)


def rotate(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """RoPE in half-split layout: channel i and channel i + d/2 turn by position * base^(-2i/d).

    x is [..., tokens, d], positions [tokens].
    """
    half = x.shape[-1] // 2
    angle = np.outer(positions, ROPE_BASE ** (-np.arange(half) / half))
    cos, sin = np.cos(angle), np.sin(angle)
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def by_group(x: np.ndarray) -> np.ndarray:
    """[query heads, ...] as [KV heads, group, ...]; query head q serves KV head q // group."""
    return x.reshape(NUM_KV_HEADS, GROUP_SIZE, *x.shape[1:])


def per_query_head(x: np.ndarray) -> np.ndarray:
    """[KV heads, ...] as [query heads, ...]."""
    return np.repeat(x, GROUP_SIZE, axis=0)


@dataclass(frozen=True)
class Layer:
    """Weights and input of one attention layer; projections map rows: q = x @ wq."""

    x: np.ndarray  # [tokens, hidden], after the input norm
    wq: np.ndarray  # [hidden, query heads * d]
    wk: np.ndarray  # [hidden, KV heads * d]
    wv: np.ndarray  # [hidden, KV heads * d]
    wo: np.ndarray  # [query heads * d, hidden]

    @staticmethod
    def seeded() -> "Layer":
        scale = HIDDEN**-0.5
        x = normal("x", NUM_TOKENS, HIDDEN)
        # Unequal token sizes, so that norms of keys and values rank tokens clearly.
        x = rounded(x * np.exp(normal("token sizes", NUM_TOKENS, 1, scale=0.3)))
        return Layer(
            x=x,
            wq=normal("wq", HIDDEN, NUM_QUERY_HEADS * HEAD_DIM, scale=1.5 * scale),
            wk=normal("wk", HIDDEN, NUM_KV_HEADS * HEAD_DIM, scale=scale),
            wv=normal("wv", HIDDEN, NUM_KV_HEADS * HEAD_DIM, scale=scale),
            wo=normal("wo", NUM_QUERY_HEADS * HEAD_DIM, HIDDEN, scale=(NUM_QUERY_HEADS * HEAD_DIM) ** -0.5),
        )

    @property
    def positions(self) -> np.ndarray:
        return np.arange(len(self.x))

    def _heads(self, weights: np.ndarray) -> np.ndarray:
        """[heads, tokens, d] of the input through one projection."""
        return rounded((self.x @ weights).reshape(len(self.x), -1, HEAD_DIM).transpose(1, 0, 2))

    @cached_property
    def q_pre(self) -> np.ndarray:
        return self._heads(self.wq)

    @cached_property
    def k_pre(self) -> np.ndarray:
        return self._heads(self.wk)

    @cached_property
    def v(self) -> np.ndarray:
        return self._heads(self.wv)

    @cached_property
    def q(self) -> np.ndarray:
        return rounded(rotate(self.q_pre, self.positions))

    @cached_property
    def k(self) -> np.ndarray:
        return rounded(rotate(self.k_pre, self.positions))

    @cached_property
    def rows(self) -> np.ndarray:
        """Causal attention [query heads, tokens (query), tokens (key)], as float32."""
        logits = self.q @ per_query_head(self.k).transpose(0, 2, 1) / HEAD_DIM**0.5
        future = np.triu(np.ones(logits.shape[1:], dtype=bool), 1)
        return rounded(softmax(np.where(future, -np.inf, logits)))

    def written(self) -> dict:
        """inputs.json: what a scorer may read."""
        return {
            "rope": {"base": ROPE_BASE, "layout": "half-split"},
            "shape": {
                "kv_heads": NUM_KV_HEADS,
                "group": GROUP_SIZE,
                "head_dim": HEAD_DIM,
                "hidden": HIDDEN,
                "tokens": NUM_TOKENS,
            },
            "positions": self.positions,
            "x": self.x,
            "q_pre": self.q_pre,
            "k_pre": self.k_pre,
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "wo": self.wo.reshape(NUM_QUERY_HEADS, HEAD_DIM, HIDDEN),
            "rows": [[row[: t + 1] for t, row in enumerate(head)] for head in self.rows],
        }
