"""What balancing would gain on a cluster, without the cluster, and a picture of one step before and after.

    python examples/python/simulate_cluster.py            # writes schedule.svg
"""

import argparse
import pathlib
import random

import sparsebalance as sb

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("schedule.svg"))
parser.add_argument("--steps", type=int, default=20)
arguments = parser.parse_args()

# %% Which policy, on 8 GPUs as 2 data-parallel ranks of 4 pipeline stages?
case = dict(model="qwen2.5-3b", profile="h200", dp=2, pp=4, global_batch=16, steps=arguments.steps)
policies = ["in_order", "length", "sab+order", "sab+order+optimal", "sab+order+chunk+optimal"]
for row in sb.simulate("chatqa2-like", policies=policies, **case):
    print(f"{row.policy:26} {row.makespan_ms:8.1f} ms  {row.speedup:5.2f}x  bubbles {row.bubble_share:5.1%}"
          f"  coverage {row.mean_coverage:.3f}")  # fmt: skip

# %% Which layout of 16 GPUs?
for row in sb.sweep(16, "chatqa2-like", model="qwen2.5-3b", profile="h200", steps=arguments.steps // 4 or 1, max_cp=1):
    layout = row.layout
    print(f"dp {layout.dp:2} x pp {layout.pp:2}: {row.tokens_per_second:8.0f} tokens/s, {row.memory_bytes / 2**30:5.1f} GiB"
          f"{'' if row.fits else ', does not fit'}")  # fmt: skip

# %% One step, in order and balanced
lengths = random.Random(1).sample(sb.lengths("chatqa2-like"), 16)
in_order = sb.Planner("qwen2.5-3b", profile="h200", dp=2, pp=4, micro_batch_sequences=1, batching="in_order",
                      ordering=False).plan(1, lengths)  # fmt: skip
balanced = sb.Planner("qwen2.5-3b", profile="h200", dp=2, pp=4, micro_batch_sequences=1).plan(1, lengths)
arguments.out.write_text(sb.svg([("in order", in_order), ("balanced", balanced)]))
print(f"one step: {in_order.makespan_us / 1e3:.1f} ms in order, {balanced.makespan_us / 1e3:.1f} ms balanced, "
      f"drawn in {arguments.out}")  # fmt: skip
