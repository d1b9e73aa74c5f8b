"""What every eviction policy holds and costs, as a markdown table: one process a cell, figures from `entrokv bench --json`.

    python3 tools/policies/table.py --entrokv target/release/entrokv --model smollm2-135m --tokens 8000

Of each policy and budget: the budget and what is held of it, metadata and policy state (each at the end; the ledger counts them
apart), the most payload at any time, how much less memory the process takes than one with the full cache, beside what the ledger
says of the same, and the time for observing rows, scoring and selecting, beside that of reading the prompt. Resident memory is read
at the end of the answer, while the cache is still held; it depends on the allocator too and differs by some hundred kilobytes
from run to run. A cell that fails has its error line for a row, and Ctrl-C leaves the rows there are.

Policies are those of `entrokv policies` that need no file; `--policy TEXT` (again and again) names others, options and all.
"""

import argparse
import json
import os
import subprocess
import sys

HEAD = [
    "policy", "budget", "held", "metadata KiB", "policy state KiB", "peak", "less resident", "less in the ledger",
    "observe + evict ms", "prefill ms",
]


def run(command, timeout):
    """Runs it -> the JSON object on its stdout. Raises ValueError with one line where there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise ValueError(f"not done after {timeout} s") from None
    except OSError as error:
        raise ValueError(f"{command[0]}: {error.strerror}") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ValueError(lines[-1])
    try:
        return json.loads(done.stdout)
    except json.JSONDecodeError:
        raise ValueError("no JSON object on stdout") from None


def mib(count):
    return "-" if count is None else f"{count / 2**20:.2f}"


def ledger(row):
    """Every byte the ledger counts for the sequence at the end."""
    kinds = ("kv_bytes_held", "kv_bytes_window", "kv_bytes_metadata", "kv_bytes_policy_state")
    return sum(row[kind] for kind in kinds)


def cells(row, full):
    """The figures of one row, as HEAD names them from `held` on."""
    resident = None
    if row["rss_bytes"] is not None and full["rss_bytes"] is not None:
        resident = full["rss_bytes"] - row["rss_bytes"]
    return [
        f"{mib(row['kv_bytes_held'])} of {mib(row['kv_bytes_budget'])}",
        f"{row['kv_bytes_metadata'] / 2**10:.1f}",
        f"{row['kv_bytes_policy_state'] / 2**10:.1f}",
        mib(row["kv_bytes_peak"]),
        mib(resident),
        mib(ledger(full) - ledger(row)),
        f"{1000 * (row['observe_s'] + row['evict_s']):.1f}",
        f"{1000 * row['prefill_s']:.0f}",
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entrokv", default="entrokv", metavar="PROGRAM")
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=2000, help="of the prompt")
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--budgets", default="5%,10%,20%,50%", help="comma separated")
    parser.add_argument("--policy", action="append", metavar="TEXT", help="instead of all of them")
    parser.add_argument("--timeout", type=float, default=1800, metavar="SECONDS", help="of one cell")
    parser.add_argument("--json", metavar="FILE", help="also write every figure of every cell")
    args = parser.parse_args()

    def bench(*words):
        command = [args.entrokv, "bench", "--model", args.model, "--prompt", str(args.tokens), "--json"]
        command += ["--generate", str(args.generate), "--threads", str(args.threads)]
        report = run(command + list(words), args.timeout)
        return report, report["rows"][0]

    try:
        listed = run([args.entrokv, "policies", "--json"], args.timeout)
        report, full = bench()
    except ValueError as error:
        sys.exit(f"table.py: {error}")
    policies = args.policy or [entry["name"] for entry in listed if not entry["requires_file"]]
    every = [{"policy": "none", "budget": None} | full]
    print(f"{report['model']} on {report['cpu']}, {report['isa']}, {report['threads']} threads, {report['cache_type']} cache; ", end="")
    print(f"{args.tokens} tokens read, {args.generate} generated; MiB where no other unit is said\n")
    print(f"| {' | '.join(HEAD)} |")
    print(f"|{'---|' * len(HEAD)}")
    print(f"| none | 100% | {' | '.join(cells(full, full))} |", flush=True)
    violations = 0
    try:
        for policy in policies:
            for budget in args.budgets.split(","):
                try:
                    _, row = bench("--kv-budget", budget, "--policy", policy)
                except ValueError as error:
                    print(f"| {policy} | {budget} | {error} |{' |' * (len(HEAD) - 3)}", flush=True)
                    every.append({"policy": policy, "budget": budget, "error": str(error)})
                    continue
                violations += row["budget_violations"]
                print(f"| {policy} | {budget} | {' | '.join(cells(row, full))} |", flush=True)
                every.append({"policy": policy, "budget": budget} | row)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
    finally:
        if args.json:
            with open(args.json, "w") as file:
                json.dump(every, file, indent=1)
    print(f"\nSteps that ended over their budget: {violations}.")


if __name__ == "__main__":
    main()
