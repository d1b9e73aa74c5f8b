"""Compare the ids two programs give for random text, on model files or on every way to cut text.

    python3 tools/golden/compare_tokenizers.py OURS PEER MODEL.gguf ...
    python3 tools/golden/compare_tokenizers.py OURS PEER --pre qwen2 llama-bpe ...

OURS and PEER are programs that answer `PROGRAM tokenize MODEL < JSON array of strings` with a JSON array of objects with
`ids` and `ids_with_special`, as `entrokv` does. With --pre, a model of one layer is written for each `pre` type, whose
vocabulary is the 256 bytes and all pairs of bytes, merged in random order: nearly every cut in the wrong place shows in
the ids, which it does not in the vocabulary of a real model. Needs PyPI `gguf` 0.19 and `numpy` for that.

Exits with 1 if any text differs.
"""
import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

RANGES = [
    (0x20, 0x7E), (0x20, 0x7E), (0x00, 0x1F), (0x7F, 0x9F), (0xA0, 0x24F), (0x250, 0x36F), (0x370, 0x52F), (0x590, 0x6FF),
    (0x900, 0x97F), (0xE00, 0xE7F), (0x1100, 0x11FF), (0x1E00, 0x1EFF), (0x2000, 0x23FF), (0x2600, 0x27BF),
    (0x2E80, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xE0FF), (0xFB00, 0xFFFF), (0x10000, 0x1005D),
    (0x1D400, 0x1D7FF), (0x1F300, 0x1F9FF), (0xE0020, 0xE007F),
]
SPACES = " |  |   |        |\t|\n|\n\n|\r\n|\u00a0|\u3000|\u2028|\u0085|\x0b|\x0c|\u200b".split("|")
WORDS = (
    "the I'll don't we've it's 'S ' ’s x Hello WORLD CamelCase snake_case naïve İstanbul ſ 'ſ é ß ﬁ 1234567 3.14 0x1F １２３ "
    "٣٤ ½ Ⅷ x² 中文 日本語 한국어 مرحبا שלום हिन्दी ไทย 😀 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 1️⃣ ❤️ 'for(i=0;i<n;i++){' }; // /* */ => != <div> C:\\x a/b?c=d&e"
).split()
SPECIAL = (
    "<|im_start|> <|im_end|> <|endoftext|> <bos> <eos> <s> </s> <start_of_turn> <end_of_turn> <tool_call> </tool_call> "
    "<|fim_prefix|> <table> </td> <h1> [multimodal] <unused42> <repo_name> <0x0A> ▁ ▁▁ <unk> <pad> <|im_start |> <|user|>"
).split()
SEPARATORS = ["", "", " ", " ", "\n", "  "]


def part(rng):
    kind = rng.randrange(8)
    if kind == 0:
        low, high = rng.choice(RANGES)
        return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 12)))
    if kind == 1:
        return rng.choice(SPACES) * rng.randint(1, 6)
    if kind == 2:
        return "".join(rng.choice(SPACES) for _ in range(rng.randint(1, 6)))
    if kind == 3:
        return "".join(rng.choice("0123456789,. -$%") for _ in range(rng.randint(1, 12)))
    if kind == 4:
        return rng.choice(SPECIAL)
    return rng.choice(SEPARATORS).join(rng.choice(WORDS) for _ in range(rng.randint(1, 8)))


def texts(seed, count):
    rng = random.Random(seed)
    return ["".join(part(rng) for _ in range(rng.randint(1, 7))) for _ in range(count)]


def byte_characters():
    """What stands for each byte in a byte-level vocabulary."""
    characters, stand_in = [], 0x100
    for byte in range(256):
        prints = 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE
        characters.append(chr(byte if prints else stand_in))
        stand_in += not prints
    return characters


def write_pair_model(path, pre, seed):
    """A model of one layer of zeros, for a vocabulary of bytes and pairs of bytes."""
    import gguf
    import numpy as np

    characters = byte_characters()
    pairs = [(a, b) for a in characters for b in characters]
    random.Random(seed).shuffle(pairs)
    tokens = ["<s>", "</s>", "<|user|>", *characters, *(a + b for a, b in pairs)]
    width = 32
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(width)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 4] + [1] * (len(tokens) - 3))
    writer.add_token_merges([f"{a} {b}" for a, b in pairs])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), width), np.float16))
    for norm in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{norm}.weight", np.zeros(width, np.float32))
    for matrix in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{matrix}.weight", np.zeros((width, width), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokenize(program, model, batch):
    answer = subprocess.run([program, "tokenize", model], input=json.dumps(batch), capture_output=True, text=True)
    if answer.returncode:
        sys.exit(f"{program} tokenize {model}: {answer.stderr.strip()[-2000:]}")
    return json.loads(answer.stdout)


def compare(name, model, batch, args):
    """The number of texts that differ; shows the shortest."""
    ours, peer = (tokenize(program, model, batch) for program in (args.ours, args.peer))
    differing = []
    for text, a, b in zip(batch, ours, peer):
        form = next((form for form in ("ids", "ids_with_special") if a[form] != b[form]), None)
        if form:
            differing.append((text, form, a[form], b[form]))
    print(f"{name}: {len(differing)} of {len(batch)} texts differ", flush=True)
    for text, form, a, b in sorted(differing, key=lambda row: len(row[0]))[: args.show]:
        at = next((i for i, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), min(len(a), len(b)))
        print(f"  {form} of {text!r} from {at}: ours {a[at : at + 8]}, peer {b[at : at + 8]}")
    return len(differing)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("ours")
    parser.add_argument("peer")
    parser.add_argument("models", nargs="*")
    parser.add_argument("--pre", nargs="+", default=[], metavar="TYPE")
    parser.add_argument("--texts", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=int, default=5)
    args = parser.parse_args()
    batch = texts(args.seed, args.texts)
    total = sum(compare(Path(model).stem, model, batch, args) for model in args.models)
    with tempfile.TemporaryDirectory() as folder:
        for pre in args.pre:
            model = str(Path(folder) / "pairs.gguf")
            write_pair_model(model, pre, args.seed)
            total += compare(pre, model, batch, args)
    sys.exit(total > 0)


if __name__ == "__main__":
    main()
