#!/usr/bin/env python3
"""Disturbs one training on three hosts, made of network namespaces, about once a minute until it has done its steps: kills
a rank, switches a host off, cuts it from the network, takes its link down for a while, halts a rank for a while, asks all
to stop. Whenever the launcher ends, the same command is started again. Links are slow, so that the run lasts and the
machine stays free. The model must be that of an undisturbed run on the same layout, to the bit.

  tests/cluster/soak.py --program build/cpu/src/cli/sparsebalance          an hour or so; root only
  tests/cluster/soak.py --program … --steps 500 --every 20
"""
import argparse
import collections
import os
import pathlib
import random
import signal
import sys
import tempfile
import time

import hosts
import training

FAULTS = {"kill": 4, "host off": 2, "cut off": 1, "link down": 1, "halt": 1, "stop": 2}  # and how often in comparison


class Soak:
    def __init__(self, arguments, folder):
        self.arguments, self.folder = arguments, pathlib.Path(folder)
        self.random = random.Random(arguments.seed)
        self.counts, self.codes = collections.Counter(), collections.Counter()
        self.hosts = hosts.Hosts(3, folder)
        for name in self.hosts.names:
            self.hosts.slow(name, arguments.rate)
        self.settings = [f"train.max_steps={arguments.steps}", f"train.save_steps={arguments.save_steps}",
                         "parallel.timeout=40", "train.log_steps=1000"]
        self.training = training.Training(arguments.program, self.folder / "disturbed", self.settings)
        self.lost_steps, self.most_lost = 0, 0
        self.longest_end = collections.defaultdict(float)

    def log(self, text):
        print(f"{time.strftime('%T', time.gmtime())} {text}", flush=True)

    def strike(self, kind):
        """What happened, and whether the run is to end by it."""
        victim = self.random.choice(self.hosts.names)
        ranks = self.training.rank_processes()
        if kind == "kill" and ranks:
            hosts.kill(self.random.choice(list(ranks.values())), signal.SIGKILL)
        elif kind == "host off":
            victim = self.random.choice(self.hosts.names[1:])  # the first one is the launcher's
            self.hosts.lose(victim)
        elif kind == "cut off":
            victim = self.random.choice(self.hosts.names[1:])
            self.hosts.cut(victim)
        elif kind == "link down":
            self.hosts.cut(victim)
            time.sleep(3)
            self.hosts.join(victim)
            return False
        elif kind == "halt" and ranks:
            process = self.random.choice(list(ranks.values()))
            hosts.kill(process, signal.SIGSTOP)
            time.sleep(8)
            hosts.kill(process, signal.SIGCONT)
            return False
        elif kind == "stop":
            for process in ranks.values():
                hosts.kill(process, signal.SIGTERM)
        return bool(ranks)

    def repair(self):
        for name in self.hosts.names:
            self.hosts.join(name)
            if not any("sshd" in words[0] for process, _, words in hosts.processes()
                       if process in set(self.hosts.on_host(name))):
                self.hosts.revive(name)

    def run(self):
        begin = time.monotonic()
        final = self.folder / "disturbed/run/final"
        starts = 0
        while not final.exists():
            starts += 1
            before = self.training.checkpoint()
            self.training.start(lambda words, **options: self.hosts.start("h1", [*self.hosts.mpirun(3), *words], **options))
            next_fault = time.monotonic() + self.random.expovariate(1 / self.arguments.every)
            while self.training.process.poll() is None and time.monotonic() < next_fault:
                time.sleep(0.2)
            while self.training.process.poll() is None:
                if not self.training.rank_processes():  # it is still starting: nothing that one could learn from
                    time.sleep(0.5)
                    continue
                kind = self.random.choices(list(FAULTS), FAULTS.values())[0]
                done, now = self.training.steps(), time.monotonic()
                ends = self.strike(kind)
                self.counts[kind] += 1
                self.log(f"step {done}: {kind}")
                if ends:
                    code = self.training.end(90)
                    took = time.monotonic() - now
                    self.longest_end[kind] = max(self.longest_end[kind], took)
                    lost = max(0, done - max(self.training.checkpoint(), before))
                    self.lost_steps += lost
                    self.most_lost = max(self.most_lost, lost)
                    self.log(f"  ended with {code} after {took:.1f} s; {lost} steps to do again")
                    break
                next_fault = time.monotonic() + self.random.expovariate(1 / self.arguments.every)
                while self.training.process.poll() is None and time.monotonic() < next_fault:
                    time.sleep(0.2)
            self.codes[self.training.end(90)] += 1
            left = self.training.left(20)
            self.repair()
            if left:
                raise training.Failure(f"processes {left} are left\n{self.training.output.text()[-3000:]}")
            if time.monotonic() - begin > self.arguments.limit:
                raise training.Failure(f"it has not ended within {self.arguments.limit} s")
        took = time.monotonic() - begin
        self.log(f"undisturbed run, for comparison; {starts} starts and {sum(self.counts.values())} faults in "
                 f"{took / 60:.0f} minutes: {dict(self.counts)}; exit codes {dict(self.codes)}; {self.lost_steps} steps "
                 f"done again, at most {self.most_lost} at once; seconds until the end, at most: "
                 + ", ".join(f"{kind} {seconds:.1f}" for kind, seconds in self.longest_end.items()))
        self.hosts.close()
        undisturbed = training.Training(self.arguments.program, self.folder / "undisturbed", self.settings)
        undisturbed.settings.append("train.save_steps=0")
        undisturbed.start(lambda words, **options: training.subprocess.Popen([*words, "--ranks", "3"], **options))
        if undisturbed.end(3600) != 0:
            raise training.Failure(undisturbed.output.text()[-3000:])
        if undisturbed.model() != self.training.model():
            raise training.Failure("the models differ")
        if undisturbed.losses() != self.training.losses():
            raise training.Failure("the losses differ")
        self.log(f"the models of {self.arguments.steps} steps are equal to the bit, and so are all losses")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument("--save-steps", type=int, default=50)
    parser.add_argument("--every", type=float, default=60, help="seconds between faults, on average")
    parser.add_argument("--rate", default="25mbit", help="of every link")
    parser.add_argument("--limit", type=float, default=7200, help="seconds after which it has failed")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if reason := hosts.missing():
        print(f"skipped: {reason}")
        return 77
    with tempfile.TemporaryDirectory(prefix="sbsoak.") as folder:
        soak = Soak(arguments, folder)
        try:
            soak.run()
        except training.Failure as failure:
            print(f"failed: {failure}")
            return 1
        finally:
            soak.training.stop_all()
            soak.hosts.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
