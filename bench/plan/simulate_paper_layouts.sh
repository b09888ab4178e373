#!/usr/bin/env bash
# The tables of docs/results/simulate-paper-layouts.md: the paper's main set-up with tensor parallelism beside its figures,
# layouts with and without it, every balancing policy on the paper's layouts. Arguments: further files with one length a
# line, a table of each.
set -euo pipefail
cd "$(dirname "$0")/../.."
program=build/cpu/src/cli/sparsebalance
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

printf '## Main set-up: dp 4 x pp 4 x tp 2, global batch 16, one sequence a micro-batch; communication and head counted\n\n'
printf '| model, lengths | profile | paper | published policy (sab+anchor:mean) | sab+order+optimal | sab+order+chunk | sab+order+chunk+optimal | without tp: optimal |\n'
printf '| --- | --- | --- | --- | --- | --- | --- | --- |\n'
main_row() {  # MODEL LENGTHS PROFILE PAPER
  local tp
  for tp in 2 1; do
    $program simulate --model "qwen2.5-$1" --lengths "$2" --profile "$3" --coverage power:0.22 --dp 4 --pp 4 --tp $tp \
      --micro-batch-sequences 1 --global-batch 16 --steps 200 --seed 1 --no-frontier --json "$out/tp$tp.json" \
      --policies in_order,sab+anchor:mean,sab+order+optimal,sab+order+chunk,sab+order+chunk+optimal >/dev/null
  done
  python3 - "$out" "$1" "$2" "$3" "$4" <<'PYTHON'
import json, sys
out, model, lengths, profile, paper = sys.argv[1:]
rows = [{row["policy"]: row for row in json.load(open(f"{out}/tp{tp}.json"))["rows"]} for tp in (2, 1)]
cell = lambda row: f"{row['speedup']:.3f} ({row['makespan_ms']:.0f} ms, coverage {row['mean_coverage']:.3f})"
policies = ("sab+anchor:mean", "sab+order+optimal", "sab+order+chunk", "sab+order+chunk+optimal")
cells = [f"Qwen2.5-{model.upper()}, {lengths}", profile, paper, *(cell(rows[0][policy]) for policy in policies)]
print("|", " | ".join([*cells, cell(rows[1]["sab+order+optimal"])]), "|")
PYTHON
}
for profile in h200 h200-analytic; do
  main_row 3b chatqa2-like $profile "1.30, 1.33"
  main_row 3b longalign-like $profile "1.33, 1.35"
  main_row 0.5b chatqa2-like $profile 1.30
  main_row 0.5b longalign-like $profile "-"
done

printf '\n## Layouts: where tensor parallelism wins (chatqa2-like, global batch 16, h200-analytic, 20 steps)\n\n'
printf '| model | GPUs | policy | fastest with tp: dp x pp x tp x cp | fastest without | tp is so many times as fast | without tp, but does not fit |\n'
printf '| --- | --- | --- | --- | --- | --- | --- |\n'
sweep() {  # MODEL GPUS POLICY
  $program simulate --sweep --gpus "$2" --model "qwen2.5-$1" --profile h200-analytic --coverage power:0.22 --block 256 \
    --steps 20 --seed 1 --policies "$3" --json "$out/sweep.json" >/dev/null
  python3 - "$out/sweep.json" "$1" "$2" "$3" <<'PYTHON'
import json, sys
path, model, gpus, policy = sys.argv[1:]
rows = json.load(open(path))["layouts"]
fastest = lambda chosen: min(chosen, key=lambda row: row["makespan_ms"], default=None)
def cell(row):
    if row is None:
        return "none fits"
    layout = " x ".join(str(row[name]) for name in ("dp", "pp", "tp", "cp"))
    return f"{layout}: {row['makespan_ms']:.0f} ms, bubbles {100 * row['bubble_share']:.0f} %, {row['memory_bytes'] / 2**30:.1f} GiB"
having = fastest([row for row in rows if row["tp"] > 1 and row["fits"]])
without = fastest([row for row in rows if row["tp"] == 1 and row["fits"]])
too_large = fastest([row for row in rows if row["tp"] == 1 and not row["fits"]])
ratio = f"{without['makespan_ms'] / having['makespan_ms']:.3f}" if having and without else "-"
faster = too_large is not None and (having is None or too_large["makespan_ms"] < having["makespan_ms"])
print("|", " | ".join([f"Qwen2.5-{model.upper()}", gpus, policy, cell(having), cell(without), ratio,
                       cell(too_large) if faster else ""]), "|")
PYTHON
}
for model in 3b 14b 32b; do
  for gpus in 8 32 64; do
    for policy in sab+order+optimal sab+order+chunk+optimal; do sweep $model $gpus $policy; done
  done
done

simulate() {
  printf '\n## %s\n\n```\n' "$1"
  shift
  $program simulate --profile h200-analytic --coverage power:0.22 --comm off --head off --block 256 \
    --steps 200 --seed 1 --pp 4 "$@"
  printf '```\n'
}
simulate "One node: Qwen2.5-3B, DP2 PP4, two sequences a micro-batch, chatqa2-like" \
  --model qwen2.5-3b --dp 2 --micro-batch-sequences 2 --lengths chatqa2-like
simulate "Main without tensor parallelism: Qwen2.5-3B, DP4 PP4, one sequence a micro-batch, chatqa2-like" \
  --model qwen2.5-3b --dp 4 --micro-batch-sequences 1 --lengths chatqa2-like
simulate "Main without tensor parallelism: Qwen2.5-0.5B, chatqa2-like" \
  --model qwen2.5-0.5b --dp 4 --micro-batch-sequences 1 --lengths chatqa2-like
simulate "Main without tensor parallelism: Qwen2.5-3B, longalign-like" \
  --model qwen2.5-3b --dp 4 --micro-batch-sequences 1 --lengths longalign-like
simulate "Main without tensor parallelism: Qwen2.5-0.5B, longalign-like" \
  --model qwen2.5-0.5b --dp 4 --micro-batch-sequences 1 --lengths longalign-like
for lengths in "$@"; do
  simulate "Other pools: Qwen2.5-3B, DP4 PP4, global batch 64, two a micro-batch, $(basename "$lengths" .txt)" \
    --model qwen2.5-3b --dp 4 --micro-batch-sequences 2 --global-batch 64 --lengths "$lengths" \
    --policies in_order,in_order+order,length,quadratic,wlb,sab,sab+order,sab+order+anchor:mean,sab+order+optimal
done
