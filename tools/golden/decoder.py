"""A decoder-only transformer in numpy, read from a GGUF file: the oracle of the architecture fixtures.

Written from the published model descriptions, whole sequences at once, no cache and no cleverness: for every layer
the full [T, T] matrix of attention is formed. In float64 it is the exact answer for the weights of the file; the
`Arithmetic` given to `Decoder.logits` adds, one at a time, the roundings a real engine makes.

Shapes: T tokens, E embedding, Hq query heads, Hkv KV heads, D head dimension, V vocabulary.
"""
import math
from dataclasses import dataclass, replace

import gguf
import numpy as np

# What a gemma3 file does not say: every sixth layer is global, the others see a window and rotate with their own base.
GEMMA3_PATTERN = 6
GEMMA3_WINDOW_BASE = 10_000.0


@dataclass(frozen=True)
class Config:
    """Everything that decides the arithmetic of one model; a wrong reading of the file is a changed field."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope_base: float
    rope_layout: str  # "interleaved": pairs (2i, 2i+1); "halves": pairs (i, i + D/2)
    rope_scale: float  # positions are divided by it (linear scaling)
    use_rope_factors: bool
    window: int | None  # a window layer sees keys at positions > query - window
    window_layers: tuple[bool, ...]
    window_rope_base: float
    window_rope_scale: float
    activation: str
    embedding_scale: float
    attention_scale: float
    use_biases: bool = True
    use_qk_norm: bool = True
    qk_norm_after_rope: bool = False
    use_post_norms: bool = True
    head_grouping: str = "blocks"  # query head h reads KV head h // r; "strided" (h mod Hkv) is the classic mistake


@dataclass(frozen=True)
class Arithmetic:
    """Which roundings are made: `cache` is the type keys and values are kept in, `activations` what a matrix sees."""

    dtype: type = np.float64
    cache: str = "exact"  # or "f16"
    activations: str = "exact"  # or "int8": per block of 32, scale = largest magnitude / 127


EXACT = Arithmetic()


class Decoder:
    """One model: its configuration and its weights, dequantised by the `gguf` package, in float64."""

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.fields = {name: field.contents() for name, field in reader.fields.items()}
        self.weights = {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64).reshape([int(n) for n in t.shape[::-1]])
            for t in reader.tensors
        }
        self.config = self._config()

    def _config(self):
        arch = self.fields["general.architecture"]

        def value(key, default=None):
            found = self.fields.get(f"{arch}.{key}", default)
            if found is None:
                raise KeyError(f"{arch}.{key}")
            return found

        embedding, heads = value("embedding_length"), value("attention.head_count")
        head_dim = value("attention.key_length", embedding // heads)
        layers = value("block_count")
        gemma = arch == "gemma3"
        window = value("attention.sliding_window") if gemma else None
        pattern = value("attention.sliding_window_pattern", GEMMA3_PATTERN) if gemma else 1
        scaled = value("rope.scaling.type", "none") == "linear"
        return Config(
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=value("attention.head_count_kv"),
            head_dim=head_dim,
            eps=value("attention.layer_norm_rms_epsilon"),
            rope_base=value("rope.freq_base"),
            rope_layout="interleaved" if arch == "llama" else "halves",
            rope_scale=value("rope.scaling.factor") if scaled else 1.0,
            use_rope_factors=True,
            window=window,
            window_layers=tuple((i + 1) % pattern != 0 for i in range(layers)) if gemma else (False,) * layers,
            window_rope_base=value("rope.freq_base_swa", GEMMA3_WINDOW_BASE) if gemma else 0.0,
            window_rope_scale=1.0,
            activation="gelu_tanh" if gemma else "silu",
            embedding_scale=math.sqrt(embedding) if gemma else 1.0,
            attention_scale=1 / math.sqrt(head_dim),
        )

    def logits(self, tokens, arithmetic=EXACT, config=None):
        """Logits [T, V] of every position of `tokens`."""
        return _Pass(self, config or self.config, arithmetic).run(np.asarray(tokens))


class _Pass:
    """One forward pass: the weights cast to the arithmetic's type, and the operations a layer is made of."""

    def __init__(self, decoder, config, arithmetic):
        self.c, self.a = config, arithmetic
        self.w = {name: w.astype(arithmetic.dtype) for name, w in decoder.weights.items()}

    def run(self, tokens):
        c, w = self.c, self.w
        x = w["token_embd.weight"][tokens] * self.a.dtype(c.embedding_scale)
        for layer in range(c.num_layers):
            name = f"blk.{layer}.{{}}.weight".format
            y = self.attention(layer, self.rms_norm(x, w[name("attn_norm")]))
            x = x + self.post_norm(y, name("post_attention_norm"))
            y = self.feed_forward(layer, self.rms_norm(x, w[name("ffn_norm")]))
            x = x + self.post_norm(y, name("post_ffw_norm"))
        x = self.rms_norm(x, w["output_norm.weight"])
        return self.matmul(x, w.get("output.weight", w["token_embd.weight"]))

    def attention(self, layer, x):
        """Causal attention of one layer over x [T, E]; heads are [T, H, D]."""
        c = self.c
        num_tokens = len(x)
        q = self.project(layer, "attn_q", x).reshape(num_tokens, c.num_heads, c.head_dim)
        k = self.project(layer, "attn_k", x).reshape(num_tokens, c.num_kv_heads, c.head_dim)
        v = self.project(layer, "attn_v", x).reshape(num_tokens, c.num_kv_heads, c.head_dim)
        q_norm = self.w.get(f"blk.{layer}.attn_q_norm.weight") if c.use_qk_norm else None
        k_norm = self.w.get(f"blk.{layer}.attn_k_norm.weight") if c.use_qk_norm else None
        if q_norm is not None and not c.qk_norm_after_rope:
            q, k = self.rms_norm(q, q_norm), self.rms_norm(k, k_norm)
        q, k = self.rope(layer, q), self.rope(layer, k)
        if q_norm is not None and c.qk_norm_after_rope:
            q, k = self.rms_norm(q, q_norm), self.rms_norm(k, k_norm)
        if self.a.cache == "f16":
            k, v = (z.astype(np.float16).astype(self.a.dtype) for z in (k, v))
        heads = np.arange(c.num_heads)
        of_head = heads // (c.num_heads // c.num_kv_heads) if c.head_grouping == "blocks" else heads % c.num_kv_heads
        q, k, v = q.transpose(1, 0, 2), k[:, of_head].transpose(1, 2, 0), v[:, of_head].transpose(1, 0, 2)
        scores = q @ k * self.a.dtype(c.attention_scale)  # [Hq, T, T]
        distance = np.arange(num_tokens)[:, None] - np.arange(num_tokens)[None, :]
        hidden = distance < 0
        if c.window_layers[layer]:
            hidden |= distance >= c.window
        scores[:, hidden] = -np.inf
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        out = (p @ v).transpose(1, 0, 2).reshape(num_tokens, -1)
        return self.matmul(out, self.w[f"blk.{layer}.attn_output.weight"])

    def feed_forward(self, layer, x):
        gate, up = (self.matmul(x, self.w[f"blk.{layer}.{name}.weight"]) for name in ("ffn_gate", "ffn_up"))
        return self.matmul(ACTIVATIONS[self.c.activation](gate) * up, self.w[f"blk.{layer}.ffn_down.weight"])

    def project(self, layer, name, x):
        y = self.matmul(x, self.w[f"blk.{layer}.{name}.weight"])
        bias = self.w.get(f"blk.{layer}.{name}.bias")
        return y if bias is None or not self.c.use_biases else y + bias

    def rope(self, layer, x):
        """Rotate x [T, H, D] by position x base^(-2i/D), divided by the file's factors where it has them."""
        c = self.c
        windowed = c.window_layers[layer]
        base, scale = (c.window_rope_base, c.window_rope_scale) if windowed else (c.rope_base, c.rope_scale)
        frequency = base ** (-np.arange(0, c.head_dim, 2) / c.head_dim)
        factors = self.w.get("rope_freqs.weight")
        if factors is not None and c.use_rope_factors:
            frequency = frequency / factors.astype(np.float64)
        angle = np.arange(len(x))[:, None] / scale * frequency
        cos, sin = (f(angle)[:, None, :].astype(self.a.dtype) for f in (np.cos, np.sin))
        if c.rope_layout == "interleaved":
            a, b = x[..., 0::2], x[..., 1::2]
            return np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    def rms_norm(self, x, weight):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.a.dtype(self.c.eps)) * weight

    def post_norm(self, x, name):
        weight = self.w.get(name) if self.c.use_post_norms else None
        return x if weight is None else self.rms_norm(x, weight)

    def matmul(self, x, weight):
        """x [T, in] times weight [out, in]."""
        if self.a.activations == "int8":
            blocks = x.reshape(len(x), -1, 32)
            scale = np.abs(blocks).max(axis=-1, keepdims=True) / 127
            blocks = np.rint(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0)) * scale
            x = blocks.reshape(x.shape)
        return x @ weight.T


_erf = np.vectorize(math.erf)
ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_erf": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
}


def mistakes(config, has):
    """Wrong readings of this model that a test must be able to tell from the right one: name -> Config.

    `has(kind)` says whether the file holds tensors of that kind ("bias", "qk_norm", "post_norm", "rope_factors").
    """
    c = config
    other = "halves" if c.rope_layout == "interleaved" else "interleaved"
    found = {
        "rope layout": replace(c, rope_layout=other),
        "rope base 10 % off": replace(c, rope_base=c.rope_base * 1.1),
        "epsilon ten times smaller": replace(c, eps=c.eps / 10),
        "heads strided": replace(c, head_grouping="strided"),
        "attention scale 3 % off": replace(c, attention_scale=c.attention_scale * 0.97),
    }
    if c.num_kv_heads in (1, c.num_heads):
        del found["heads strided"]  # both orders are the same
    if has("rope_factors"):
        found["rope factors ignored"] = replace(c, use_rope_factors=False)
    if c.rope_scale != 1.0:
        found["rope scaling ignored"] = replace(c, rope_scale=1.0)
    if has("bias"):
        found["biases ignored"] = replace(c, use_biases=False)
    if has("qk_norm"):
        found["q/k norm ignored"] = replace(c, use_qk_norm=False)
        found["q/k norm after rope"] = replace(c, qk_norm_after_rope=True)
    if has("post_norm"):
        found["post norms ignored"] = replace(c, use_post_norms=False)
    if c.window is not None:
        shifted = c.window_layers[1:] + c.window_layers[:1]
        found |= {
            "window one shorter": replace(c, window=c.window - 1),
            "window one longer": replace(c, window=c.window + 1),
            "no window": replace(c, window=1 << 30),
            "window pattern shifted": replace(c, window_layers=shifted),
            "window layers use the global rope base": replace(c, window_rope_base=c.rope_base),
            "exact gelu": replace(c, activation="gelu_erf"),
            "embedding scale ignored": replace(c, embedding_scale=1.0),
        }
        if c.window_rope_base != GEMMA3_WINDOW_BASE:
            every_sixth = tuple((i + 1) % GEMMA3_PATTERN != 0 for i in range(c.num_layers))
            found["the file's window pattern ignored"] = replace(c, window_layers=every_sixth)
            found["the file's window base ignored"] = replace(c, window_rope_base=GEMMA3_WINDOW_BASE)
        if c.rope_scale != 1.0:
            found["rope scaling on window layers too"] = replace(c, window_rope_scale=c.rope_scale)
    if c.activation == "silu":
        found["gelu for silu"] = replace(c, activation="gelu_tanh")
    return found
