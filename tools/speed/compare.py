"""Programs that run the same model, timed by turns: A B C, A B C, ..; medians and ratios to the first.

    python3 compare.py --model FILE.gguf --prompt 512,8000 --generate 64 --threads 2 --rounds 5 \
        --run 'llama.cpp=peer-llama-cpp bench {model} {threads} {prompt} {generate} flash' \
        --run 'f16=entrokv bench -m {model} -p {prompt} -n {generate} -t {threads} --json' \
        --run '20%=entrokv bench -m {model} -p {prompt} -n {generate} -t {threads} --kv-budget 20% --json'

A program prints one JSON object, last: `prefill_tokens_per_s` and `decode_tokens_per_s`, or `rows` whose first has them.
Speeds differ from machine to machine and from minute to minute, so that only figures of one run compare; the load of the
machine before each round is printed, because a busy neighbour spoils a round. Peak memory is the resident set of the whole
process, mapped model file included, as the system counts it.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile


def run(command):
    """Runs it -> its figures and its peak resident bytes."""
    # Files, not pipes: wait4 alone tells the memory of one child, and nobody reads a pipe meanwhile.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(shlex.split(command), stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode != 0:
            sys.exit(f"{command}: exit status {process.returncode}\n{err.read().strip()}")
        objects = [line for line in out if line.startswith("{")]
    if not objects:
        sys.exit(f"{command}: no JSON object on stdout")
    figures = json.loads(objects[-1])
    row = figures["rows"][0] if figures.get("rows") else figures
    return row | {"peak_bytes": usage.ru_maxrss * 1024}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt", default="512", help="prompt lengths, comma separated")
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--run", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--json", metavar="FILE", help="also write every figure of every run")
    args = parser.parse_args()

    programs = dict(text.split("=", 1) for text in args.run)
    every = []
    for prompt in map(int, args.prompt.split(",")):
        runs = {name: [] for name in programs}
        for number in range(args.rounds):
            print(f"prompt {prompt}, round {number + 1}, load {os.getloadavg()[0]:.2f}", file=sys.stderr)
            for name, command in programs.items():
                values = {"model": args.model, "prompt": prompt, "generate": args.generate, "threads": args.threads}
                for key, value in values.items():
                    command = command.replace("{" + key + "}", str(value))
                runs[name].append(run(command))
                every.append({"program": name, "prompt": prompt, "round": number} | runs[name][-1])

        def median(name, key):
            return statistics.median(figures[key] for figures in runs[name])

        base = next(iter(programs))
        print(f"\n{os.path.basename(args.model)}, {prompt} tokens, {args.threads} threads, medians of {args.rounds}\n")
        print(f"| | prefill/s | to {base} | decode/s | to {base} | peak MiB |")
        print("|---|---|---|---|---|---|")
        for name in programs:
            cells = []
            for key in ("prefill_tokens_per_s", "decode_tokens_per_s"):
                speed = median(name, key)
                cells += [f"{speed:.1f}", f"{speed / median(base, key):.2f}"]
            print(f"| {name} | {' | '.join(cells)} | {median(name, 'peak_bytes') / 2**20:.0f} |", flush=True)
        if args.json:
            with open(args.json, "w") as file:
                json.dump(every, file, indent=1)


if __name__ == "__main__":
    main()
