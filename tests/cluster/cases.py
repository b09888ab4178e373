#!/usr/bin/env python3
"""What a cluster does to a training, one case at a time, on hosts made of network namespaces: under mpirun over ssh, and
under Debian's Slurm. For every case: seconds until the lost rank or host is named, until the launcher has ended, and from
the next start until it trains again; the steps to do again. At the end the model must be that of an undisturbed run.

  tests/cluster/cases.py --program build/cpu/src/cli/sparsebalance                    all; root only
  tests/cluster/cases.py --program … --launcher mpirun --case 'kill' --case 'halt'
"""
import argparse
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time

import hosts
import slurm
import training

SAVE_STEPS, FIRST = 20, 70  # FIRST: the step that something happens at


class Cluster:
    """Three hosts with a launcher."""

    def __init__(self, launcher, folder):
        self.launcher = launcher
        self.hosts = hosts.Hosts(3, folder)
        self.slurm = None
        if launcher == "srun":
            try:
                self.slurm = slurm.Slurm(self.hosts)
            except BaseException:
                self.hosts.close()
                raise

    def start(self, words, **options):
        if self.slurm:
            options["env"].update(self.slurm.settings, OMPI_MCA_btl_tcp_if_include=f"{hosts.SUBNET}.0/24")
            return self.hosts.start("h1", self.slurm.srun(3, "--kill-on-bad-exit=1", *words), **options)
        return self.hosts.start("h1", [*self.hosts.mpirun(3), *words], **options)

    def repair(self):
        """As it was; with Slurm the nodes have to come back first, which takes as long as it takes."""
        for name in self.hosts.names:
            self.hosts.join(name)
            words_there = [words[0] for process, _, words in hosts.processes()
                           if process in set(self.hosts.on_host(name))]
            if not any("sshd" in word for word in words_there):
                self.hosts.revive(name)
            if self.slurm and not any("slurmd" in word for word in words_there):
                self.slurm.start_daemon(name)
        if self.slurm:
            def idle():
                if self.slurm.nodes_in("idle") == len(self.hosts.names):
                    return True
                for name in self.hosts.names:
                    self.slurm.ask("scontrol", "update", f"nodename={name}", "state=resume")
                return False
            self.slurm.wait(idle, "nodes", 90)

    def close(self):
        if self.slurm:
            self.slurm.close()
        self.hosts.close()


# What happens, and the words that name it. Every function returns whether the run is to end by it.

def kill_rank(cluster, run):
    hosts.kill(run.rank_processes()[1], signal.SIGKILL)
    return True


def kill_daemon(cluster, run):
    """The launcher's daemon on another host: orted, or slurmd with the step's slurmstepd."""
    on_host = set(cluster.hosts.on_host("h2"))
    for process, _, words in list(hosts.processes()):
        if process in on_host and any(name in words[0] for name in ("orted", "slurmd", "slurmstepd")):
            hosts.kill(process, signal.SIGKILL)
    return True


def host_off(cluster, run):
    cluster.hosts.lose("h2")
    return True


def cut_off(cluster, run):
    cluster.hosts.cut("h2")
    return True


def link_down(cluster, run):
    cluster.hosts.link("h2", "down")
    time.sleep(LINK_DOWN)
    cluster.hosts.link("h2", "up")
    return False


def slow_link(cluster, run):
    cluster.hosts.slow("h2", "20mbit")
    return False


def packets_lost(cluster, run):
    cluster.hosts.lose_packets("h2", 0.02)
    return False


def halt(cluster, run):
    hosts.kill(run.rank_processes()[1], signal.SIGSTOP)
    return True


def halt_and_go_on(cluster, run):
    process = run.rank_processes()[1]
    hosts.kill(process, signal.SIGSTOP)
    time.sleep(5)
    hosts.kill(process, signal.SIGCONT)
    return False


def stop_all(cluster, run):
    for process in run.rank_processes().values():
        hosts.kill(process, signal.SIGTERM)
    return True


def stop_one(cluster, run):
    hosts.kill(run.rank_processes()[2], signal.SIGTERM)
    return True


LINK_DOWN = 10
NAMED = ("rank 1 on h2", "on node 10.77.0.2", "daemon on node h2", "h2: task 1", "Node failure on h2")
CASES = {  # name: (what happens, words that name it, exit codes that are right)
    "kill -9 of a rank": (kill_rank, NAMED, "lost"),
    "kill -9 of the launcher's daemon": (kill_daemon, NAMED, "lost"),
    "a host off": (host_off, NAMED, "lost"),
    "a host cut off": (cut_off, NAMED, "lost"),
    f"link down for {LINK_DOWN} s": (link_down, (), "goes on"),
    "link of 20 Mbit/s": (slow_link, (), "goes on"),
    "2 % of packets lost": (packets_lost, (), "goes on"),
    "SIGSTOP of a rank": (halt, NAMED, "lost"),
    "SIGSTOP for 5 s": (halt_and_go_on, (), "goes on"),
    "SIGTERM to all ranks": (stop_all, (), "saved"),
    "SIGTERM to one rank": (stop_one, (), "saved"),
}


def seconds(value):
    return "–" if value is None else f"{value:.1f}"


def try_case(cluster, name, program, folder, settings):
    what, words, expected = CASES[name]
    run = training.Training(program, folder, settings)
    run.start(cluster.start)
    row = {"case": name, "named": None, "ended": None, "again": None, "lost": 0, "code": 0}
    try:
        run.wait_for_step(FIRST)
        done, since = run.steps(), time.monotonic()
        ends = what(cluster, run)
        if ends:
            row["code"] = run.end(120)
            row["ended"] = time.monotonic() - since
            row["named"] = run.output.first(words, since) if words else None
            row["lost"] = done - run.checkpoint() if expected == "lost" else 0
            left = run.left(15)
            cluster.repair()
            if left:
                for process in left:
                    hosts.kill(process, signal.SIGKILL)
                raise training.Failure(f"processes {left} are left 15 s later\n{run.output.text()[-2000:]}")
            if (row["code"] == 0) != (expected == "saved"):
                raise training.Failure(f"exit code {row['code']}\n{run.output.text()[-2000:]}")
            if words and row["named"] is None:
                raise training.Failure(f"nothing named it\n{run.output.text()[-2000:]}")
            if row["lost"] > SAVE_STEPS + 2:
                raise training.Failure(f"{row['lost']} steps are lost")
            said = [line for when, line in run.output.lines if when >= since]
            row["said"] = said
            again, resumed = time.monotonic(), run.checkpoint()
            run.start(cluster.start)
            run.wait_for_step(resumed + 1)
            while run.output.first([f"step {resumed + 1}/"], again) is None:
                time.sleep(0.01)
            row["again"] = run.output.first([f"step {resumed + 1}/"], again)
        code = run.end(300)
        if code != 0:
            raise training.Failure(f"ended with {code}\n{run.output.text()[-3000:]}")
    finally:
        run.stop_all()
    return row, run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--launcher", choices=["mpirun", "srun"], action="append")
    parser.add_argument("--case", action="append", help="those whose name contains this")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--verbose", action="store_true", help="what was said after the fault")
    arguments = parser.parse_args()
    launchers = arguments.launcher or ["mpirun", "srun"]
    if reason := hosts.missing() or ("srun" in launchers and slurm.missing()):
        print(f"skipped: {reason}")
        return 77
    os.nice(5)
    settings = [f"train.max_steps={arguments.steps}", f"train.save_steps={SAVE_STEPS}", "parallel.timeout=20"]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="sbcases.") as scratch:
        scratch = pathlib.Path(scratch)
        undisturbed = training.Training(arguments.program, scratch / "undisturbed", settings)
        undisturbed.start(lambda words, **options: training.subprocess.Popen([*words, "--ranks", "3"], **options))
        if undisturbed.end(300) != 0:
            raise training.Failure(undisturbed.output.text())
        names = [name for name in CASES if not arguments.case or any(part in name for part in arguments.case)]
        print("| launcher | case | named, s | ended, s | trains again, s | steps to do again | exit code |\n"
              "| --- | --- | --- | --- | --- | --- | --- |", flush=True)
        for launcher in launchers:
            for number, name in enumerate(names):
                folder = scratch / f"{launcher}-{number}"
                folder.mkdir()
                cluster = Cluster(launcher, folder)
                try:
                    row, run = try_case(cluster, name, arguments.program, folder / "run", settings)
                    if run.model() != undisturbed.model() or run.losses() != undisturbed.losses():
                        raise training.Failure("the model or the losses differ from those of the undisturbed run")
                    print(f"| {launcher} | {name} | {seconds(row['named'])} | {seconds(row['ended'])} | "
                          f"{seconds(row['again'])} | {row['lost']} | {row['code']} |", flush=True)
                    if arguments.verbose:
                        print("\n".join("    " + line for line in row.get("said", [])))
                except (training.Failure, TimeoutError) as failure:
                    failed += 1
                    print(f"| {launcher} | {name} | failed: {failure}", flush=True)
                finally:
                    cluster.close()
                shutil.rmtree(folder)
    print(f"{failed} of {len(names) * len(launchers)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
