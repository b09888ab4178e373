"""Debian's Slurm on the hosts of a test: munge, slurmctld on the first, a slurmd on each."""

import os
import pathlib
import shutil
import subprocess
import time

from hosts import run

CONF = """
ClusterName=test
SlurmctldHost={first}({address})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
ReturnToService=2
SlurmUser=root
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
StateSaveLocation={folder}/state
SlurmdTimeout=15
InactiveLimit=0
KillWait=30
SlurmdParameters=config_overrides
MinJobAge=300
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,batch_sched_delay=0
JobRequeue=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES:8
"""


def missing():
    """Why Slurm cannot be started; empty: it can."""
    for tool in ("slurmctld", "slurmd", "srun", "munged"):
        if shutil.which(tool) is None:
            return f"{tool} is not here; scripts/setup.sh cluster installs it"
    return ""


class Slurm:
    def __init__(self, hosts):
        self.hosts, self.folder = hosts, hosts.folder / "slurm"
        (self.folder / "state").mkdir(parents=True)
        for path in [hosts.folder, self.folder]:
            path.chmod(0o755)  # munge refuses a socket in a folder that others may write to
        first = hosts.names[0]
        nodes = "\n".join(f"NodeName={name} NodeAddr={hosts.address(name)} CPUs=8 Boards=1 SocketsPerBoard=1 "
                          "CoresPerSocket=8 ThreadsPerCore=1 RealMemory=1000 State=UNKNOWN" for name in hosts.names)
        (self.folder / "slurm.conf").write_text(
            CONF.format(first=first, address=hosts.address(first), folder=self.folder, nodes=nodes))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        self.settings = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self.environment = {**os.environ, **self.settings}
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.daemons = [subprocess.Popen(
            ["munged", "--foreground", "--force", "--socket", self.folder / "munge.socket", "--key-file", key,
             "--log-file", self.folder / "munge.log", "--pid-file", self.folder / "munge.pid",
             "--seed-file", self.folder / "munge.seed"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)]
        try:
            self.wait(lambda: (self.folder / "munge.socket").exists(), "munged")
            self.start(first, ["slurmctld", "-D"])
            for name in hosts.names:
                self.start_daemon(name)
            self.wait(lambda: self.nodes_in("idle") == len(hosts.names), "slurmd")
        except BaseException:
            self.close()
            raise

    def start(self, name, command):
        self.daemons.append(self.hosts.start(name, command, env=self.environment, stdout=subprocess.DEVNULL,
                                             stderr=subprocess.DEVNULL))
        return self.daemons[-1]

    def start_daemon(self, name):
        for kind in ("spool", "tmp"):
            (self.folder / f"{kind}-{name}").mkdir(exist_ok=True)
        # It will not start without control groups, of which `ip netns exec` hides the machine's.
        return self.start(name, ["sh", "-c", "mount -t tmpfs none /sys/fs/cgroup && mkdir /sys/fs/cgroup/freezer && "
                                 "mount -t cgroup -o freezer none /sys/fs/cgroup/freezer && exec slurmd -D -N " + name])

    def ask(self, *words):
        """What a command says on the first host."""
        done = subprocess.run(self.hosts.inside(self.hosts.names[0], words), env=self.environment, capture_output=True,
                              text=True, check=False)
        return done.stdout + done.stderr

    def nodes_in(self, state):
        return sum(line.startswith(state) for line in self.ask("sinfo", "-h", "-N", "-o", "%T").splitlines())

    def wait(self, condition, what, limit=40):
        deadline = time.monotonic() + limit
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(f"{log.name}: {log.read_text(errors='replace')[-800:]}" for log in self.folder.glob("*.log"))
                raise TimeoutError(f"{what} does not come up:\n{logs}")
            time.sleep(0.2)

    def srun(self, ranks, *words):
        return ["srun", "--mpi=pmix", "-N", str(min(ranks, len(self.hosts.names))), "-n", str(ranks), "--overcommit", *words]

    def close(self):
        self.ask("scancel", "--full", "--signal=KILL", "--state=RUNNING")
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
