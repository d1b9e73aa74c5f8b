"""Write where the tokenizers of well-known models cut text, by PyPI `tokenizers`.

    python3 tools/golden/pre_types.py [OUT_FILE]

Needs PyPI `tokenizers` 0.23. OUT_FILE (default: the fixture of crates/entrokv) gets one JSON object:
  script, versions   what made it
  texts              what is cut: the texts of the tokenize fixtures, and some that tell the types apart
  pieces             by `pre` type, by text: the lengths of the pieces, in bytes

The patterns are those of the models' own tokenizer.json, written down here apart from the engine's table. Contractions
in any case are spelled out: by case folding `'s` would match a long s too, which no other engine does.
"""
import argparse
import json
from pathlib import Path

import tokenizers
from tokenizers import Regex
from tokenizers import pre_tokenizers as pre

SCRIPT = "tools/golden/pre_types.py"
SCRIPT_VERSION = 1
FIXTURES = Path(__file__).parents[2] / "crates/entrokv/tests/fixtures/tokenizer"
TEXTS = FIXTURES / "tokenize-qwen2.5-0.5b.json"

CONTRACTION = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
CAPITALISED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
CAPITALS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
MARKED = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"


def isolate(pattern):
    """Matches become pieces, and so does what lies between them."""
    return pre.Split(Regex(pattern), "isolated")


def gpt_2():
    """GPT-2's pattern is built into the byte-level pre-tokenizer."""
    return pre.ByteLevel(add_prefix_space=False, use_regex=True)


PRE_TYPES = {
    "gpt-2": [gpt_2()],
    "smollm": [pre.Digits(individual_digits=True), gpt_2()],
    "qwen2": [isolate(rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{TAIL}")],
    "llama-bpe": [
        isolate(rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{TAIL}")
    ],
    "tekken": [isolate(rf"{CAPITALISED}|{CAPITALS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{TAIL}")],
    "gpt-4o": [
        isolate(
            rf"{CAPITALISED}(?:{CONTRACTION})?|{CAPITALS}(?:{CONTRACTION})?|\p{{N}}{{1,3}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{TAIL}"
        )
    ],
    "deepseek-coder": [
        isolate(r"[\r\n]"),
        isolate(r"\s?\p{L}+"),
        isolate(r"\s?\p{P}+"),
        isolate("[一-龥\u0800-一가-\ud7ff]+"),
        pre.Digits(individual_digits=True),
    ],
    "deepseek-v3": [isolate(r"\p{N}{1,3}"), isolate("[一-龥\u3040-\u309f\u30a0-\u30ff]+"), isolate(rf"{MARKED}|{TAIL}")],
    "bloom": [isolate(r" ?[^(\s|.,!?…。，、।۔،)]+")],
}

MORE_TEXTS = [
    "HTTPServer getHTTPResponse iPhone ÉCOLE École ǅungla ΑΒΓδ ДЖигит",
    "IT'S he'Ll 'tis rock'n'roll don''t 'RE'",
    "1234567 12,345,678.90 ١٢٣٤ ½⅓ Ⅷ 2²",
    "a/b//c\n/d (e)/\r\n",
    "\t\tif x:\n\t\t\treturn  y;  \n\n\n",
    "one\u3000two\u00a0 three\u2028four\u0085 five",
    "中文，日本語カタカナ。한국어123 中x文",
    "e\u0301\u0302 ก็ नी\u200dक ـَ",
    "x=$y+`z`^|~<a> #tag @name _under_ -- ...!",
    " .. , !a ?b。c",
]


def cut(passes, text):
    """The lengths in bytes of the pieces of `text`."""
    if not text:
        return []
    pieces = pre.Sequence(passes).pre_tokenize_str(text)
    lengths = [len(text[start:end].encode()) for _, (start, end) in pieces]
    assert sum(lengths) == len(text.encode()), (text, pieces)
    return lengths


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("out", nargs="?", type=Path, default=FIXTURES / "pre-types.json")
    out = parser.parse_args().out
    texts = [row["text"] for row in json.loads(TEXTS.read_text())] + MORE_TEXTS
    fixture = {
        "script": f"{SCRIPT}, version {SCRIPT_VERSION}",
        "versions": {"tokenizers": tokenizers.__version__},
        "texts": texts,
        "pieces": {name: [cut(passes, text) for text in texts] for name, passes in PRE_TYPES.items()},
    }
    out.write_text(json.dumps(fixture, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
