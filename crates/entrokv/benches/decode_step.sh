#!/bin/sh
# Counts the instructions of a step of decoding, function by function: `make callgrind`. Needs valgrind.
# decode_step.txt is what this prints; how to read it is said there.
set -eu
cd "$(dirname "$0")/../../.."
steps=8
cargo build --quiet --release -p entrokv --example token_path
# Valgrind knows no AVX-512. One thread: the figures are then the same in every run, but for a few hundred instructions.
ENTROKV_ISA=avx2 valgrind --tool=callgrind --callgrind-out-file=target/decode_step.callgrind \
    --toggle-collect='*token_path*generate*' target/release/examples/token_path tiny 64 "$steps" 1 >/dev/null 2>&1
callgrind_annotate --auto=no --threshold=100 --show-percs=no target/decode_step.callgrind 2>/dev/null | awk -v steps="$steps" '
    # A line is "count file:function [object]"; a function has a line for every file it was inlined from.
    $1 ~ /^[0-9,]+$/ && $2 ~ /:/ {
        count = $1; gsub(",", "", count)
        name = $0; sub(/^ *[0-9,]+ +[^:]*:/, "", name); sub(/ \[[^]]*\]$/, "", name); sub(/\x27[0-9]+$/, "", name)
        by_name[name] += count; total += count
    }
    END {
        printf "%9d  a step, all functions\n", total / steps
        for (name in by_name) if (by_name[name] * 100 >= total) printf "%9d  %s\n", by_name[name] / steps, name
    }' | LC_ALL=C sort -k1,1nr -k2
