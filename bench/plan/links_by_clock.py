#!/usr/bin/env python3
"""Predicted against measured steps of two ranks whose link is slow: each rank has a network namespace of its own, and the
link between them a rate that `tc` limits, or a delay (slow_link.py). For every layout and rate the link is measured by `profile --links`, then a
training with balance.links runs, in turn with one over the link without a limit.

    bench/plan/links_by_clock.py [PROGRAM] [--rates 20,100,0] [--delays 0,5] [--layouts dp,pp,cp] [--steps 16]

Rates in MB/s, 0: no limit. Delays in ms, one way. Prints a row for each case and ends with
1 unless the median error of the predicted step is at most 10 % and exposed communication is within 15 % of the step.
Needs root; ends with 77 and says why where it cannot run. Nothing leaves the two namespaces. Timings: nothing else may run
on the machine."""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

from slow_link import MTU, Relay

NAMES = ("sb-links-a", "sb-links-b")
VETH, TUN = "sbl0", "sbt0"  # devices, in both namespaces
ADDRESSES = {VETH: ("10.91.7.1", "10.91.7.2"), TUN: ("10.91.8.1", "10.91.8.2")}
ROOT = pathlib.Path(__file__).resolve().parents[2]

RUN = """
model:
  init: {{model_type: qwen2, vocab_size: 512, hidden_size: 256, intermediate_size: 1024, num_hidden_layers: 6,
         num_attention_heads: 4, num_key_value_heads: 2}}
data: {{synthetic: {{task: chunk_recall, vocab_size: 512, min_length: 256, length: 1024}}}}
batch: {{global_batch_size: 8, micro_batch_sequences: 1}}
attention: {{pattern: {pattern}, block: 64, budget: 512, local_blocks: 1}}
balance: {{batching: sab, ordering: auto, profile: {folder}/profile.json{links}}}
parallel: {{{layout}: 2, timeout: 120}}
train: {{max_steps: {steps}, save_steps: 0, threads: 1, log_steps: 1, output_dir: {out}}}
"""


def skip(why):
    print(f"skipped: {why}")
    sys.exit(77)


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def inside(name, *command):
    return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name, *command]


class Link:
    """The two namespaces and two links between them: a veth pair, and one that can delay."""

    def __enter__(self):
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            ip("netns", "add", name)
        ip("link", "add", VETH, "netns", NAMES[0], "type", "veth", "peer", "name", VETH, "netns", NAMES[1])
        self.relay = Relay(NAMES, TUN)
        for i, name in enumerate(NAMES):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", TUN, "mtu", str(MTU))
            for device, addresses in ADDRESSES.items():
                ip("-n", name, "addr", "add", f"{addresses[i]}/24", "dev", device)
                ip("-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, *_):
        self.relay.stop()
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def limit(self, megabytes, delay):
        """Gives the device to use."""
        if delay > 0:
            self.relay.limit(megabytes, delay)
            return TUN
        for name in NAMES:
            subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", VETH, "root"], capture_output=True)
            if megabytes:
                subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", VETH, "root", "tbf", "rate", f"{8 * megabytes}mbit",
                                "burst", "128kb", "latency", "400ms"], check=True, capture_output=True)
        return VETH


class Ranks:
    """mpirun with a rank in each namespace."""

    def __init__(self, program, folder):
        self.program, self.agent, self.device = program, folder / "agent.sh", VETH
        # What mpirun takes for ssh: the host's address, then what to run there.
        self.agent.write_text(f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
shift
exec {' '.join(inside(NAMES[1], 'sh', '-c')[:6])} 'hostname "$0" && exec sh -c "$*"' {NAMES[1]} "$@"
""")
        self.agent.chmod(0o755)

    def run(self, *arguments):
        command = inside(
            NAMES[0], "mpirun", "--quiet", "--allow-run-as-root", "-n", "2", "-H", ",".join(ADDRESSES[self.device]), "--map-by", "node",
            "--bind-to", "none", "--mca", "plm_rsh_agent", str(self.agent), "--mca", "btl", "tcp,self", "--mca", "pml", "ob1",
            "--mca", "btl_tcp_if_include", self.device, "--mca", "oob_tcp_if_include", VETH, "-x", "OMP_NUM_THREADS=1",
            str(self.program), *arguments)
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            sys.exit(f"{' '.join(arguments)} ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return done.stdout


def config(folder, layout, steps, out, links):
    path = folder / f"{out}.yaml"
    # Ranks that share a sequence select with the staircase; the others by mass, as usual.
    path.write_text(RUN.format(folder=folder, layout=layout, steps=steps, out=folder / out, pattern="topk",
                               links=f", links: {links}" if links else ""))
    return path


def train(ranks, folder, layout, steps, name, links):
    shutil.rmtree(folder / name, ignore_errors=True)
    ranks.run("train", str(config(folder, layout, steps, name, links)))
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    # A plan knows what was measured three steps before it.
    return [line for line in lines if "step_ms" in line and line["step"] > 5]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?", default=ROOT / "build/cpu/src/cli/sparsebalance", type=pathlib.Path)
    parser.add_argument("--rates", default="20,100,0")
    parser.add_argument("--delays", default="0,5")
    parser.add_argument("--layouts", default="dp,pp,cp")
    parser.add_argument("--steps", default=16, type=int)
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        skip("network namespaces need root")
    for tool in ("ip", "tc", "mpirun", "unshare"):
        if shutil.which(tool) is None:
            skip(f"{tool} is not installed (Debian: iproute2, openmpi-bin, util-linux)")
    if not os.path.exists("/dev/net/tun"):
        skip("there is no /dev/net/tun, by which packets are delayed")
    program = arguments.program.resolve()
    good, errors = True, []
    with tempfile.TemporaryDirectory() as temporary, Link() as link:
        folder = pathlib.Path(temporary)
        ranks = Ranks(program, folder)
        subprocess.run([program, "profile", "--run", config(folder, "dp", 1, "profile-run", ""), "--out",
                        folder / "profile.json", "--threads", "1", "--held-out", "8"], check=True, capture_output=True)
        print("| layout | rate, MB/s | delay, ms | link as measured | step, ms | predicted | median error | exposed, ms | predicted "
              "| difference, of the step |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        for layout in arguments.layouts.split(","):
            for rate, delay in [(int(r), float(d)) for r in arguments.rates.split(",") for d in arguments.delays.split(",")]:
                ranks.device = link.limit(0, 0)
                free_links = folder / "free.json"
                ranks.run("profile", "--links", str(free_links))
                free = train(ranks, folder, layout, arguments.steps, "free", free_links)
                ranks.device = link.limit(rate, delay)
                links = folder / "links.json"
                ranks.run("profile", "--links", str(links))
                measured = json.loads(links.read_text())["host"]["reduce_between"]
                steps = train(ranks, folder, layout, arguments.steps, "limited", links)
                median = lambda lines, key: statistics.median(line[key] for line in lines)
                error = statistics.median(abs(line["predicted_step_ms"] / line["step_ms"] - 1) for line in steps)
                exposed = median(steps, "step_ms") - median(free, "step_ms")
                predicted = median(steps, "predicted_makespan_ms") - median(free, "predicted_makespan_ms")
                difference = abs(predicted - exposed) / median(steps, "step_ms")
                errors.append(error)
                good = good and difference <= 0.15
                print(f"| {layout} 2 | {rate or 'no limit'} | {delay:g} | {1e3 * measured['gigabytes_per_second']:.0f} MB/s + "
                      f"{measured['latency_us']:.0f} µs | {median(steps, 'step_ms'):.0f} "
                      f"| {median(steps, 'predicted_step_ms'):.0f} | {100 * error:.1f} % | {exposed:.0f} | {predicted:.0f} "
                      f"| {100 * difference:.1f} % |", flush=True)
    print(f"median error of all cases {100 * statistics.median(errors):.1f} %")
    sys.exit(0 if good and statistics.median(errors) <= 0.10 else 1)


if __name__ == "__main__":
    main()
