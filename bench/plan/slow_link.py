"""A link between two network namespaces that delays what it carries: two TUN devices and a thread that moves packets from
one to the other, where the kernel itself has nothing to delay them with (netem)."""

import collections
import ctypes
import fcntl
import os
import select
import struct
import threading
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
MTU = 65000


def open_tun(namespace, device):
    """Of a namespace that is not this thread's: another thread goes there."""
    descriptors = []

    def open_there():
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{namespace}", "rb") as there:
            if libc.setns(there.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
        descriptors.append(tun)

    thread = threading.Thread(target=open_there)
    thread.start()
    thread.join()
    if not descriptors:
        raise OSError(f"no TUN device in {namespace}")
    return descriptors[0]


class Relay:
    """Both directions: packets leave at the rate and arrive after the delay, in their order."""

    def __init__(self, namespaces, device):
        self.tuns = [open_tun(namespace, device) for namespace in namespaces]
        self.seconds_per_byte, self.delay, self.stopped = 0.0, 0.0, False
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def limit(self, megabytes, delay_ms):
        self.seconds_per_byte = 1e-6 / megabytes if megabytes else 0.0
        self.delay = 1e-3 * delay_ms

    def stop(self):
        self.stopped = True
        self.thread.join()
        for tun in self.tuns:
            os.close(tun)

    def run(self):
        queues, free = [collections.deque(), collections.deque()], [0.0, 0.0]
        while not self.stopped:
            waiting = [queue[0][0] for queue in queues if queue]
            timeout = max(0.0, min(waiting) - time.monotonic()) if waiting else 0.05
            for tun in select.select(self.tuns, [], [], min(timeout, 0.05))[0]:
                way = self.tuns.index(tun)
                try:
                    packet = os.read(tun, MTU + 100)
                except BlockingIOError:
                    continue
                free[way] = max(free[way], time.monotonic()) + len(packet) * self.seconds_per_byte
                queues[way].append((free[way] + self.delay, packet))
            now = time.monotonic()
            for way, queue in enumerate(queues):
                while queue and queue[0][0] <= now:
                    try:
                        os.write(self.tuns[1 - way], queue[0][1])
                    except BlockingIOError:
                        break
                    except OSError:  # a device that is down loses it
                        pass
                    queue.popleft()
