"""Hosts for tests, on this machine: network namespaces with names and addresses of their own, connected by a switch in a
namespace of its own, each with an sshd. Nothing they send leaves them. They share the file system and the processes."""

import atexit
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

SUBNET = "10.77.0"
# What a host's shell would have; the launcher carries it to the others by ssh.
SSH = ("-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR -o ServerAliveInterval=5 "
       "-o ServerAliveCountMax=3 -o ConnectTimeout=5")


def missing():
    """Why no hosts can be made here; empty: they can."""
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    for tool, package in (("ip", "iproute2"), ("sshd", "openssh-server"), ("ssh", "openssh-client"),
                          ("mpirun", "openmpi-bin"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            return f"{tool} is not here; scripts/setup.sh cluster installs {package}"
    probe = f"sbprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return "" if made.returncode == 0 else f"no network namespace can be made: {made.stderr.strip()}"


def run(*words, **options):
    return subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True, **options).stdout


def processes():
    """(process id, environment, words) of all that can be read."""
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = dict(pair.split("=", 1) for pair in (entry / "environ").read_text(errors="replace").split("\0")
                               if "=" in pair)
            words = (entry / "cmdline").read_text(errors="replace").split("\0")[:-1]
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue  # it has just ended
        if words and state != "Z":
            yield int(entry.name), environment, words


class Hosts:
    """`count` of them: h1, h2, …; folder: a directory of the caller's that all see."""

    def __init__(self, count, folder):
        self.folder, self.tag = pathlib.Path(folder), f"sb{os.getpid()}"
        self.names = [f"h{number + 1}" for number in range(count)]
        self.daemons = []
        self.keys = pathlib.Path(tempfile.mkdtemp(prefix="sbhosts."))
        atexit.register(self.close)
        signal.signal(signal.SIGTERM, lambda *_: exit(1))
        run("ip", "netns", "add", self.space("switch"))
        run("ip", "-n", self.space("switch"), "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self.space("switch"), "link", "set", "bridge", "up")
        for key in ("host", "user"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.keys / key)
        (self.keys / "sshd_config").write_text(
            f"HostKey {self.keys}/host\nAuthorizedKeysFile {self.keys}/user.pub\nStrictModes no\nUsePAM no\n"
            "PermitRootLogin yes\nPasswordAuthentication no\nPidFile none\nMaxStartups 100\n")
        pathlib.Path("/run/sshd").mkdir(exist_ok=True)
        for number, name in enumerate(self.names):
            self.add(name, number + 1)
        for name in self.names:
            self.wait_for_port(name, 22)

    def space(self, name):
        return f"{self.tag}{name}"

    def address(self, name):
        return f"{SUBNET}.{self.names.index(name) + 1}"

    def add(self, name, number):
        space, switch = self.space(name), self.space("switch")
        run("ip", "netns", "add", space)
        run("ip", "link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", name, "netns", switch)
        run("ip", "-n", space, "address", "add", f"{SUBNET}.{number}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            run("ip", "-n", space, "link", "set", link, "up")
        run("ip", "-n", switch, "link", "set", name, "master", "bridge", "up")
        # Found by `ip netns exec` alone: the names are those of the hosts there.
        etc = pathlib.Path("/etc/netns") / space
        etc.mkdir(parents=True)
        (etc / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{self.address(one)} {one}\n" for one in self.names))
        self.daemons.append(self.start(name, ["/usr/sbin/sshd", "-D", "-e", "-f", self.keys / "sshd_config"],
                                       stderr=subprocess.DEVNULL))

    def inside(self, name, command):
        """The command line that runs a command on a host."""
        return ["ip", "netns", "exec", self.space(name), "unshare", "--uts", "sh", "-c",
                'hostname "$0" && exec "$@"', name, *[str(word) for word in command]]

    def start(self, name, command, **options):
        return subprocess.Popen(self.inside(name, command), stdin=subprocess.DEVNULL, **options)

    def wait_for_port(self, name, port):
        deadline = time.monotonic() + 20
        probe = f"import socket; socket.create_connection(('{self.address(name)}', {port}), 1)"
        while subprocess.run(self.inside(self.names[0], ["python3", "-c", probe]), capture_output=True,
                             check=False).returncode:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing listens at {name}:{port}")
            time.sleep(0.1)

    def mpirun(self, ranks, keepalive=True):
        """mpirun's words on the first host for so many ranks, spread over all hosts in turn."""
        slots = (ranks + len(self.names) - 1) // len(self.names)
        hosts = ",".join(f"{self.address(name)}:{slots}" for name in self.names)
        words = ["mpirun", "--allow-run-as-root", "-n", str(ranks), "--host", hosts, "--map-by", "node", "--bind-to", "none",
                 "--mca", "plm_rsh_args", f"-i {self.keys}/user {SSH}", "--mca", "oob_tcp_if_include", f"{SUBNET}.0/24",
                 "--mca", "btl_tcp_if_include", f"{SUBNET}.0/24", "--mca", "btl", "self,vader,tcp",
                 "--mca", "btl_vader_single_copy_mechanism", "none", "-x", "PATH", "-x", "OPENBLAS_NUM_THREADS"]
        if keepalive:
            words += KEEPALIVE
        return words

    # What can happen to a host and its network.

    def cut(self, name):
        """What it sends gets nowhere, and nothing tells it so."""
        run("ip", "-n", self.space("switch"), "link", "set", name, "nomaster")

    def join(self, name):
        run("ip", "-n", self.space("switch"), "link", "set", name, "master", "bridge")

    def link(self, name, state):
        run("ip", "-n", self.space(name), "link", "set", "eth0", state)

    def slow(self, name, rate):
        run("ip", "netns", "exec", self.space("switch"), "tc", "qdisc", "replace", "dev", name, "root", "tbf",
            "rate", rate, "burst", "32kbit", "latency", "400ms")

    def lose_packets(self, name, share):
        run("ip", "netns", "exec", self.space(name), "iptables", "-A", "INPUT", "-i", "eth0", "-m", "statistic",
            "--mode", "random", "--probability", share, "-j", "DROP")

    def on_host(self, name):
        return [int(word) for word in run("ip", "netns", "pids", self.space(name)).split()]

    def lose(self, name):
        """Power off: cut first, so that nobody hears of the end of its processes."""
        self.cut(name)
        for process in self.on_host(name):
            kill(process, signal.SIGKILL)

    def revive(self, name):
        self.join(name)
        self.daemons.append(self.start(name, ["/usr/sbin/sshd", "-D", "-e", "-f", self.keys / "sshd_config"],
                                       stderr=subprocess.DEVNULL))
        self.wait_for_port(name, 22)

    def close(self):
        atexit.unregister(self.close)
        for name in self.names:
            try:
                for process in self.on_host(name):
                    kill(process, signal.SIGKILL)
            except subprocess.CalledProcessError:
                pass  # it was never made
        for daemon in self.daemons:
            daemon.wait()
        for name in [*self.names, "switch"]:
            subprocess.run(["ip", "netns", "del", self.space(name)], capture_output=True, check=False)
            shutil.rmtree(pathlib.Path("/etc/netns") / self.space(name), ignore_errors=True)
        shutil.rmtree(self.keys, ignore_errors=True)


# The words that make mpirun notice that a host is gone (docs/parallel.md).
KEEPALIVE = ["--mca", "oob_tcp_keepalive_time", "5", "--mca", "oob_tcp_keepalive_intvl", "3",
             "--mca", "oob_tcp_keepalive_probes", "5"]


def kill(process, what):
    try:
        os.kill(process, what)
    except ProcessLookupError:
        pass

