"""Write one small random-weight GGUF per architecture, and what a model of these weights must answer.

    python3 tools/golden/architectures.py [--peer PROGRAM] [--only NAME] [OUT_DIR]

Needs PyPI `gguf` 0.19 and `numpy`. For every variant OUT_DIR (default: the fixtures of crates/entrokv) gets
`NAME.gguf` (the same bytes on every run) and `NAME.json`. PROGRAM is another engine, to answer for the same file:
`PROGRAM nll MODEL TOKENS GENERATE < TEXT` prints one JSON object with `tokens`, `mean_nll`, `top20_last` and `greedy`.
Without it the peer's answers already in NAME.json are kept if the model file has not changed.

NAME.json:
  model, sha256, architecture   the file beside it
  script, seed, versions        what made it
  text, tokens                  the prompt and its ids (the first 256, as the file's own tokenizer gives them)
  reference                     the float64 decoder of decoder.py on the dequantised weights: nll of every position,
                                mean_nll, the whole last row of logits, top20_last, greedy ids with the gap to the second
  roundings                     the same decoder with the roundings of an engine: f32 throughout; keys and values in
                                f16; also every matrix's input in int8 (per block of 32). Mean NLL and the largest
                                differences from `reference`: what such an engine may be off by
  tolerance                     what an engine that makes the same roundings may be off by
  mistakes                      how far each wrong reading of the model moves the same figures: why a test that holds
                                the f32 tolerance means something
  peer, peer_f32                the peer on the file, and on a copy with every tensor dequantised to F32
"""
import argparse
import hashlib
import json
import math
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from decoder import EXACT, Arithmetic, Decoder, mistakes

SCRIPT = "tools/golden/architectures.py"
SCRIPT_VERSION = 1
SEED = 20_261_003
NUM_TOKENS = 256
NUM_GREEDY = 16
PEER = "llama.cpp by llama-cpp-2 0.1.160, CPU, f16 cache, no flash attention"
DEFAULT_OUT = Path(__file__).parents[2] / "crates/entrokv/tests/fixtures/architectures"


@dataclass(frozen=True)
class Variant:
    """One fixture: geometry, tensor types and the keys of the file that are not the same for all."""

    name: str
    arch: str
    layers: int
    types: dict[str, str]  # tensor (without "blk.N." and ".weight") -> type; others are F32
    vocab: str  # "smollm", "llama-bpe", "qwen2", "gpt-2": byte-level BPE of that pre-tokenizer; "spm": SentencePiece
    embedding: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    feed_forward: int = 96
    tied: bool = True
    eps: float = 2e-3  # large enough for a wrong one to show
    rope_base: float = 10_000.0
    keys: dict[str, object] = field(default_factory=dict)  # further metadata, without the architecture's prefix
    rope_factors: tuple[float, float, float, float] | None = None  # Llama 3: factor, low, high, original context

    @property
    def qk_norm(self):
        return self.arch in ("qwen3", "gemma3")

    @property
    def post_norms(self):
        return self.arch == "gemma3"


LINEAR_4 = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
VARIANTS = [
    Variant(
        "llama-untied", "llama", 2, vocab="smollm", tied=False,
        types=dict(token_embd="F16", output="Q8_0", attn_q="Q8_0", attn_k="F16", attn_v="Q8_0", attn_output="Q5_1",
                   ffn_gate="Q8_0", ffn_up="Q4_1", ffn_down="Q8_0"),
    ),
    Variant(  # 256 columns in ffn_down, for the k-quants
        "llama-tied", "llama", 2, vocab="gpt-2", feed_forward=256, kv_heads=1,
        types=dict(token_embd="Q8_0", attn_q="BF16", attn_k="Q8_0", attn_v="F16", attn_output="Q8_0", ffn_gate="Q4_0",
                   ffn_up="Q5_0", ffn_down="K"),
    ),
    Variant(  # an original context short enough for 256 tokens to feel all three bands of the formula
        "llama-rope-factors", "llama", 2, vocab="llama-bpe", rope_base=500_000.0, rope_factors=(8.0, 1.0, 4.0, 128.0),
        types=dict(token_embd="F16", attn_q="F16", attn_k="F16", attn_v="BF16", attn_output="Q8_0", ffn_gate="Q8_0",
                   ffn_up="Q8_0", ffn_down="Q8_0"),
    ),
    Variant(
        "llama-rope-linear", "llama", 2, vocab="gpt-2", keys=LINEAR_4,
        types=dict(token_embd="Q8_0", attn_q="Q8_0", attn_k="Q8_0", attn_v="Q8_0", attn_output="Q8_0", ffn_gate="Q5_0",
                   ffn_up="Q5_1", ffn_down="F16"),
    ),
    Variant(
        "qwen2-tied", "qwen2", 2, vocab="qwen2", rope_base=1_000_000.0,
        types=dict(token_embd="Q8_0", attn_q="Q5_0", attn_k="Q8_0", attn_v="Q8_0", attn_output="Q4_0", ffn_gate="Q8_0",
                   ffn_up="Q8_0", ffn_down="Q8_0"),
    ),
    Variant(
        "qwen2-untied", "qwen2", 2, vocab="qwen2", tied=False, kv_heads=1,
        types=dict(token_embd="Q8_0", output="F16", attn_q="F16", attn_k="F16", attn_v="F16", attn_output="F16",
                   ffn_gate="BF16", ffn_up="Q8_0", ffn_down="Q8_0"),
    ),
    Variant(
        "qwen3-tied", "qwen3", 2, vocab="qwen2", head_dim=32, rope_base=1_000_000.0,
        types=dict(token_embd="Q8_0", attn_q="Q8_0", attn_k="Q5_0", attn_v="F16", attn_output="Q8_0", ffn_gate="Q8_0",
                   ffn_up="Q8_0", ffn_down="Q4_1"),
    ),
    Variant(
        "qwen3-untied", "qwen3", 2, vocab="qwen2", head_dim=32, heads=6, kv_heads=3, tied=False,
        types=dict(token_embd="Q8_0", output="Q8_0", attn_q="Q8_0", attn_k="F16", attn_v="Q8_0", attn_output="BF16",
                   ffn_gate="Q8_0", ffn_up="Q8_0", ffn_down="Q8_0"),
    ),
    Variant(  # seven layers: five windows, a global one, a window; the pattern and the windows' base are not in the file
        "gemma3", "gemma3", 7, vocab="spm", kv_heads=1, head_dim=32, feed_forward=64, rope_base=1_000_000.0,
        keys={"attention.sliding_window": 32},
        types=dict(token_embd="Q8_0", attn_q="Q5_0", attn_k="Q8_0", attn_v="Q8_0", attn_output="Q4_1", ffn_gate="Q5_0",
                   ffn_up="Q4_0", ffn_down="Q8_0"),
    ),
    Variant(  # the larger gemma3: global layers at an eighth of the position; and a file that does say what others leave out
        "gemma3-rope-linear", "gemma3", 4, vocab="spm", heads=2, head_dim=48, feed_forward=64, tied=False,
        rope_base=1_000_000.0,
        keys={"attention.sliding_window": 24, "attention.sliding_window_pattern": 3, "rope.freq_base_swa": 5_000.0,
              "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        types=dict(token_embd="Q8_0", output="Q8_0", attn_q="Q8_0", attn_k="F16", attn_v="Q8_0", attn_output="Q8_0",
                   ffn_gate="Q4_0", ffn_up="Q5_1", ffn_down="Q5_0"),
    ),
]


def main():
    parser = argparse.ArgumentParser(description="random-weight models and their answers")
    parser.add_argument("out", nargs="?", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--peer", help="program that answers for the same file")
    parser.add_argument("--only", help="one variant by name")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    text = seeded_text(np.random.default_rng(SEED))
    for index, variant in enumerate(VARIANTS):
        if args.only not in (None, variant.name):
            continue
        model = args.out / f"{variant.name}.gguf"
        write_model(variant, model, np.random.default_rng([SEED, index]))
        answers = answer(variant, model, text, args.peer)
        model.with_suffix(".json").write_text(compact_json(answers))
        print(summary(answers), flush=True)


# The model file.


def write_model(variant, path, rng):
    """Write the GGUF file of `variant`, weights drawn from `rng`."""
    writer = gguf.GGUFWriter(path, variant.arch)
    writer.add_name(f"random {variant.name}, seed {SEED}")
    writer.add_context_length(2048)
    writer.add_embedding_length(variant.embedding)
    writer.add_block_count(variant.layers)
    writer.add_feed_forward_length(variant.feed_forward)
    writer.add_head_count(variant.heads)
    writer.add_head_count_kv(variant.kv_heads)
    writer.add_layer_norm_rms_eps(variant.eps)
    writer.add_rope_freq_base(variant.rope_base)
    if variant.head_dim * variant.heads != variant.embedding:
        writer.add_key_length(variant.head_dim)
        writer.add_value_length(variant.head_dim)
    if variant.arch == "llama":
        writer.add_rope_dimension_count(variant.head_dim)
    for key, value in variant.keys.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{variant.arch}.{key}", value)
    vocab_size = write_vocabulary(writer, variant.vocab)
    for name, (type_name, weight) in tensors(variant, vocab_size, rng).items():
        add_tensor(writer, name, type_name, weight, rng)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(variant, vocab_size, rng):
    """The tensors of one model: name -> (type, float32 weights).

    The scales keep every part of the layer alive: attention logits of about 2 nats spread over a row (neither uniform
    nor one-hot), updates of the size of the residual stream, output logits that spread over several nats.
    """
    v, e = variant, variant.embedding
    q_width, kv_width = v.heads * v.head_dim, v.kv_heads * v.head_dim

    def matrix(rows, cols, gain):
        return rng.normal(0, gain / math.sqrt(cols), (rows, cols)).astype(np.float32)

    def around_one(n, mean=1.0):
        return (mean * rng.normal(1, 0.2, n)).astype(np.float32)

    def layer():
        yield "attn_norm", around_one(e)
        qk_gain = 1.0 if v.qk_norm else 1.4
        yield "attn_q", matrix(q_width, e, qk_gain)
        yield "attn_k", matrix(kv_width, e, qk_gain)
        yield "attn_v", matrix(kv_width, e, 1.2)
        if v.qk_norm:
            yield "attn_q_norm", around_one(v.head_dim, 1.4)
            yield "attn_k_norm", around_one(v.head_dim, 1.4)
        yield "attn_output", matrix(e, q_width, 1.5)
        if v.post_norms:
            yield "post_attention_norm", around_one(e)
        yield "ffn_norm", around_one(e)
        yield "ffn_gate", matrix(v.feed_forward, e, 1.5)
        yield "ffn_up", matrix(v.feed_forward, e, 1.5)
        yield "ffn_down", matrix(e, v.feed_forward, 1.0)
        if v.post_norms:
            yield "post_ffw_norm", around_one(e)

    found = {"token_embd": matrix(vocab_size, e, 2.0), "output_norm": around_one(e)}
    if not v.tied:
        found["output"] = matrix(vocab_size, e, 2.0)
    if v.rope_factors:
        found["rope_freqs"] = llama3_rope_factors(v.head_dim, v.rope_base, *v.rope_factors)
    for index in range(v.layers):
        found |= {f"blk.{index}.{name}": w for name, w in layer()}
    typed = {f"{name}.weight": (v.types.get(name.rpartition(".")[2], "F32"), w) for name, w in found.items()}
    for name, (type_name, w) in typed.items():
        if type_name == "K":  # one k-quant a layer, in turn
            typed[name] = (("Q4_K", "Q6_K")[int(name.split(".")[1]) % 2], w)
    if v.arch == "qwen2":
        for index in range(v.layers):
            for name, width in (("attn_q", q_width), ("attn_k", kv_width), ("attn_v", kv_width)):
                typed[f"blk.{index}.{name}.bias"] = ("F32", rng.normal(0, 0.7, width).astype(np.float32))
    return typed


def llama3_rope_factors(head_dim, base, factor, low, high, original):
    """The divisors of Llama 3.1's rope frequencies: 1 for wavelengths under original / high, `factor` over
    original / low, a linear blend of the two frequencies between."""
    frequency = base ** (-np.arange(0, head_dim, 2) / head_dim)
    wavelengths = original / (2 * math.pi / frequency)  # how many of them fit the original context
    smooth = np.clip((wavelengths - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def add_tensor(writer, name, type_name, weight, rng):
    if type_name == "F32":
        writer.add_tensor(name, weight)
    elif type_name == "F16":
        writer.add_tensor(name, weight.astype(np.float16))
    elif type_name in K_QUANTS:
        packed = K_QUANTS[type_name](*weight.shape, float(weight.std()), rng)
        writer.add_tensor(name, packed, raw_dtype=Type[type_name])
    else:
        writer.add_tensor(name, gguf.quants.quantize(weight, Type[type_name]), raw_dtype=Type[type_name])


# The `gguf` package reads k-quants but does not write them, so their blocks are drawn instead of computed: random
# codes and scales, centred, with a given standard deviation.


def random_q4_k(rows, cols, std, rng):
    """Blocks of 256: f16 d and dmin, 8 six-bit scales and minima in 12 bytes, 128 bytes of nibbles; x = d s q - dmin m."""
    blocks = rows * cols // 256
    s = rng.integers(16, 64, (blocks, 8), dtype=np.uint8)
    d = np.full(blocks, std / (s.astype(float).mean() * math.sqrt((16**2 - 1) / 12)))
    low, high = s[:, :4], s[:, 4:]  # the minima are the scales: with dmin = 7.5 d every sub-block is centred
    packed = np.concatenate([low | high >> 4 << 6, low | high >> 4 << 6, (high & 15) | (high & 15) << 4], axis=1)
    head = np.stack([d, 7.5 * d], axis=1).astype(np.float16).view(np.uint8)
    nibbles = rng.integers(0, 256, (blocks, 128), dtype=np.uint8)
    return np.concatenate([head, packed, nibbles], axis=1).reshape(rows, -1)


def random_q6_k(rows, cols, std, rng):
    """Blocks of 256: 128 bytes of low nibbles, 64 of high bits, 16 int8 scales, f16 d; x = d s (q - 32)."""
    blocks = rows * cols // 256
    codes = rng.integers(0, 256, (blocks, 192), dtype=np.uint8)
    s = rng.integers(40, 100, (blocks, 16), dtype=np.int8)
    s *= rng.choice(np.array([-1, 1], dtype=np.int8), s.shape)
    d = np.full((blocks, 1), std / (np.abs(s.astype(float)).mean() * math.sqrt((64**2 - 1) / 12)))
    return np.concatenate([codes, s.view(np.uint8), d.astype(np.float16).view(np.uint8)], axis=1).reshape(rows, -1)


K_QUANTS = {"Q4_K": random_q4_k, "Q6_K": random_q6_k}


# The vocabulary: bytes, a few merges, the specials the family has.

BPE_SPECIALS = {
    "gpt-2": ["<|endoftext|>"],
    "smollm": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "qwen2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama-bpe": ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
}
MERGES = ["t h", "th e", "Ġ t", "Ġt he", "Ġ a", "i n", "e r", "o n", "Ġ w", "Ġ s", "in g", "Ġ the", "e s", "Ġ o", "o u"]
SPM_PIECES = ["th", "in", "er", "on", "▁t", "▁a", "▁w", "▁s", "the", "▁the", "ing"]


def write_vocabulary(writer, kind):
    """Write the tokenizer's keys; the number of tokens."""
    return write_spm(writer) if kind == "spm" else write_bpe(writer, kind)


def write_bpe(writer, pre):
    pieces = [byte_to_unicode(b) for b in range(256)]
    pieces += sorted({m.replace(" ", "") for m in MERGES} - set(pieces))
    specials = BPE_SPECIALS[pre]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(pieces + specials)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(pieces) + [gguf.TokenType.CONTROL] * len(specials))
    writer.add_token_merges(MERGES)
    has_bos = pre == "llama-bpe"
    writer.add_bos_token_id(len(pieces))
    writer.add_eos_token_id(len(pieces) + (len(specials) - 1))
    writer.add_add_bos_token(has_bos)
    return len(pieces) + len(specials)


def byte_to_unicode(byte):
    """GPT-2's printable stand-in for a byte: itself where it prints, else the next code point from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))


def write_spm(writer):
    kinds = gguf.TokenType
    tokens = [("<pad>", kinds.CONTROL), ("<eos>", kinds.CONTROL), ("<bos>", kinds.CONTROL), ("<unk>", kinds.UNKNOWN)]
    tokens += [(f"<0x{b:02X}>", kinds.BYTE) for b in range(256)]
    tokens += [(piece, kinds.NORMAL) for piece in [*SPM_PIECES, "▁", *"abcdefghijklmnopqrstuvwxyz,."]]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([t for t, _ in tokens])
    writer.add_token_scores([float(-i) for i in range(len(tokens))])
    writer.add_token_types([k for _, k in tokens])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    return len(tokens)


def seeded_text(rng):
    """Some 200 words of our own making, with accents, digits and line ends."""
    syllables = "the ing er on wa so ta mi le in ou thes ra no ky ".split()
    words = []
    for _ in range(200):
        word = "".join(rng.choice(syllables, rng.integers(1, 4)))
        shape = rng.random()
        word = "café" if shape < 0.03 else str(rng.integers(10, 9999)) if shape < 0.07 else word.title() if shape < 0.12 else word
        words.append(word + (".\n" if shape > 0.95 else "," if shape > 0.9 else ""))
    return " ".join(words).replace("\n ", "\n")


# The answers.


def answer(variant, model, text, peer):
    sha256 = hashlib.sha256(model.read_bytes()).hexdigest()
    peers = peer_answers(model, text, peer) if peer else kept_answers(model, sha256)
    if peers is None:
        raise SystemExit(f"{model.name} is new or has changed: its tokens and the peer's answers need --peer PROGRAM")
    tokens = peers["tokens"]
    decoder = Decoder(model)
    exact = decoder.logits(tokens)
    nll = next_token_nll(exact, tokens)
    roundings = {
        name: difference(decoder.logits(tokens, arithmetic), exact, tokens)
        for name, arithmetic in {
            "f32": Arithmetic(dtype=np.float32),
            "f16_cache": Arithmetic(cache="f16"),
            "f16_cache_int8_activations": Arithmetic(cache="f16", activations="int8"),
        }.items()
    }
    kinds = {"bias": ".bias", "qk_norm": "attn_q_norm", "post_norm": "post_ffw_norm", "rope_factors": "rope_freqs"}
    wrong = mistakes(decoder.config, lambda kind: any(kinds[kind] in name for name in decoder.weights))
    return {
        "script": SCRIPT,
        "script_version": SCRIPT_VERSION,
        "seed": SEED,
        "versions": {"gguf": "0.19.0", "peer": PEER},
        "model": model.name,
        "sha256": sha256,
        "architecture": variant.arch,
        "text": text,
        "tokens": tokens,
        "reference": {
            "mean_nll": round(float(nll.mean()), 9),
            "top20_last": top20(exact[-1]),
            "greedy": greedy(decoder, tokens),
            "nll": [round(float(x), 6) for x in nll],
            "logits_last": [round(float(x), 6) for x in exact[-1]],
        },
        "roundings": roundings,
        "tolerance": tolerance(roundings),
        "mistakes": {
            name: difference(decoder.logits(tokens, EXACT, config), exact, tokens) for name, config in wrong.items()
        },
        **{name: {k: v for k, v in peers[name].items() if k != "tokens"} for name in ("peer", "peer_f32")},
    }


def next_token_nll(logits, tokens):
    """-ln p(token t+1 | tokens up to t) for every position but the last."""
    x = logits[:-1].astype(np.float64)
    top = x.max(axis=-1)
    return np.log(np.exp(x - top[:, None]).sum(axis=-1)) + top - x[np.arange(len(x)), tokens[1:]]


def difference(logits, exact, tokens):
    """How far `logits` are from `exact`, in the figures a test compares."""
    mine, right = next_token_nll(logits, tokens), next_token_nll(exact, tokens)
    return {
        "mean_nll": float(f"{mine.mean() - right.mean():.3g}"),
        "max_nll": float(f"{np.abs(mine - right).max():.3g}"),
        "max_logit_last": float(f"{np.abs(logits[-1] - exact[-1]).max():.3g}"),
        "top20_common": len({i for i, _ in top20(logits[-1])} & {i for i, _ in top20(exact[-1])}),
    }


def tolerance(roundings):
    """What an engine may be off by that makes the same roundings, under the same names.

    Twice what the decoder itself is off by: the roundings are the same, another order of summation only moves where they
    fall. In f32 never under what six printed digits and a polynomial `exp` are good for. The mean of signed errors is
    small by luck, so it may reach what 256 independent ones of the largest size would.
    """

    def limits(r, floor):
        found = {k: max(2 * r[k], floor) for k in ("max_nll", "max_logit_last")}
        found["mean_nll"] = max(2 * abs(r["mean_nll"]), found["max_nll"] / math.sqrt(NUM_TOKENS))
        return {k: float(f"{v:.3g}") for k, v in found.items()}

    return {name: limits(r, 2e-4 if name == "f32" else 0.0) for name, r in roundings.items()}


def top20(row):
    """The 20 largest logits: [id, logit], ties to the lower id."""
    order = np.argsort(-row, kind="stable")[:20]
    return [[int(i), round(float(row[i]), 6)] for i in order]


def greedy(decoder, tokens):
    """NUM_GREEDY ids, each with its distance to the second best: [id, gap]."""
    tokens, found = list(tokens), []
    for _ in range(NUM_GREEDY):
        (best, first), (_, second) = top20(decoder.logits(tokens)[-1])[:2]
        found.append([best, round(first - second, 6)])
        tokens.append(best)
    return found


def peer_answers(model, text, peer):
    """The peer's answers for the file, and for its copy in F32."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "f32.gguf"
        dequantised_copy(model, copy)
        found = {"peer": ask(peer, model, text), "peer_f32": ask(peer, copy, text)}
    if found["peer"]["tokens"] != found["peer_f32"]["tokens"]:
        raise SystemExit(f"{model.name}: the peer tokenises the copy differently")
    return {"tokens": found["peer"]["tokens"], **found}


def ask(peer, model, text):
    command = [peer, "nll", str(model), str(NUM_TOKENS), str(NUM_GREEDY)]
    found = json.loads(subprocess.run(command, input=text.encode(), stdout=subprocess.PIPE, check=True).stdout)
    if len(found["tokens"]) != NUM_TOKENS:
        raise SystemExit(f"{model.name}: the text has {len(found['tokens'])} tokens, not {NUM_TOKENS}")
    found["top20_last"] = [[i, round(x, 6)] for i, x in found["top20_last"]]
    found["mean_nll"] = round(found["mean_nll"], 9)
    return found


def kept_answers(model, sha256):
    """The peer's answers of the JSON beside `model`, if they are for the same bytes."""
    path = model.with_suffix(".json")
    kept = json.loads(path.read_text()) if path.exists() else {}
    return kept if kept.get("sha256") == sha256 else None


def dequantised_copy(source, target):
    """Copy a GGUF with every tensor in F32, so that an engine rounds only its own arithmetic."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, f in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            is_array = f.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, f.contents(), f.types[0], sub_type=f.types[-1] if is_array else None)
    for t in reader.tensors:
        shape = [int(n) for n in t.shape[::-1]]
        writer.add_tensor(t.name, gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def compact_json(answers):
    """One line for each top-level entry, and for each entry of its objects."""
    lines = []
    for key, value in answers.items():
        if isinstance(value, dict):
            inner = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in value.items())
            lines.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def summary(answers):
    """One line a variant: the reference, how far the peer is from it, and the mistake nearest to passing."""
    reference = answers["reference"]

    def against(peer):
        common = len({i for i, _ in peer["top20_last"]} & {i for i, _ in reference["top20_last"]})
        right = dict(enumerate(reference["logits_last"]))
        worst = max(abs(x - right[i]) for i, x in peer["top20_last"])
        return f"{peer['mean_nll'] - reference['mean_nll']:+.5f} nat, {common}/20, logit {worst:.4f}"

    nearest = min(answers["mistakes"].items(), key=lambda m: m[1]["max_nll"])
    return (
        f"{answers['model']:24} nll {reference['mean_nll']:.5f} | peer {against(answers['peer'])} | peer f32 "
        f"{against(answers['peer_f32'])} | roundings {answers['roundings']['f32']['max_nll']:.1e} "
        f"{answers['roundings']['f16_cache']['max_nll']:.1e} {answers['roundings']['f16_cache_int8_activations']['max_nll']:.1e} "
        f"| tolerance {answers['tolerance']['f32']['max_nll']:.1e}, nearest mistake: {nearest[0]} {nearest[1]['max_nll']:.1e}"
    )


if __name__ == "__main__":
    main()
