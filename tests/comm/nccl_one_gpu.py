#!/usr/bin/env python3
"""Two processes, one GPU, NCCL between them. NCCL refuses two ranks of one host on one GPU; each process may name its
host itself (NCCL_HOSTID), and then they talk over sockets. Prints what NCCL answers either way; exit code 0 when all
operations over sockets give the right numbers, 77 where there is no GPU, PyTorch or NCCL.
  tests/comm/nccl_one_gpu.py
tests/train/nccl_ranks_test.cpp trains that way.
"""
import ctypes
import glob
import multiprocessing
import os
import sys
import time

RANKS = 2
COUNT = 1_000_003
FLOAT32, SUM = 7, 0


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


def load_nccl():
    places = [f"{folder}/nvidia/nccl/lib/libnccl.so.2" for folder in sys.path]
    found = [path for place in places for path in glob.glob(place)]
    library = ctypes.CDLL(found[0] if found else "libnccl.so.2")
    library.ncclGetErrorString.restype = library.ncclGetLastError.restype = ctypes.c_char_p
    library.ncclGetLastError.argtypes = [ctypes.c_void_p]
    return library


def settings_of(rank, own_hosts):
    settings = {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
    return settings | ({"NCCL_HOSTID": f"host-{rank}"} if own_hosts else {})


def run_rank(rank, own_hosts, pipe):
    os.environ.update(settings_of(rank, own_hosts))
    import torch

    nccl = load_nccl()

    def check(result, what):
        if result != 0:
            last = nccl.ncclGetLastError(None) or b""
            raise RuntimeError(f"{what}: {nccl.ncclGetErrorString(result).decode()}: {last.decode().strip()}")

    try:
        torch.cuda.set_device(0)
        stream = torch.cuda.Stream()
        unique = UniqueId()
        if rank == 0:
            version = ctypes.c_int()
            check(nccl.ncclGetVersion(ctypes.byref(version)), "ncclGetVersion")
            print(f"NCCL {version.value}, hosts of their own: {own_hosts}", flush=True)
            check(nccl.ncclGetUniqueId(ctypes.byref(unique)), "ncclGetUniqueId")
            pipe.send(bytes(memoryview(unique)))
        else:
            ctypes.memmove(ctypes.byref(unique), pipe.recv(), 128)
        comm = ctypes.c_void_p()
        begun = time.time()
        check(nccl.ncclCommInitRank(ctypes.byref(comm), RANKS, unique, rank), "ncclCommInitRank")
        started = time.time() - begun
        begun = time.time()
        raw, pointer, count = ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p, ctypes.c_size_t
        values = torch.arange(COUNT, device="cuda", dtype=torch.float32) % 1000 + rank
        torch.cuda.synchronize()
        expected = 2 * (torch.arange(COUNT, dtype=torch.float32) % 1000) + 1
        check(nccl.ncclAllReduce(pointer(values.data_ptr()), pointer(values.data_ptr()), count(COUNT), FLOAT32, SUM,
                                 comm, raw), "ncclAllReduce")
        stream.synchronize()
        assert torch.equal(values.cpu(), expected), "ncclAllReduce: wrong sums"
        message = torch.full((COUNT,), 3.0 if rank == 0 else 0.0, device="cuda")
        torch.cuda.synchronize()
        call = nccl.ncclSend if rank == 0 else nccl.ncclRecv
        check(call(pointer(message.data_ptr()), count(COUNT), FLOAT32, 1 - rank, comm, raw), "ncclSend and ncclRecv")
        stream.synchronize()
        assert bool((message == 3.0).all()), "ncclSend and ncclRecv: wrong values"
        check(nccl.ncclCommDestroy(comm), "ncclCommDestroy")
        print(f"rank {rank}: all-reduce and message of {COUNT} right; start {started:.2f} s, both operations "
              f"{time.time() - begun:.2f} s", flush=True)
    except Exception as error:
        print(f"rank {rank}: {error}", flush=True)
        os._exit(1)
    os._exit(0)


def attempt(own_hosts):
    context = multiprocessing.get_context("spawn")
    ends = context.Pipe()
    ranks = [context.Process(target=run_rank, args=(rank, own_hosts, ends[rank])) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    deadline = time.time() + 60
    for rank in ranks:
        rank.join(max(0.0, deadline - time.time()))
    hung = [rank for rank in ranks if rank.is_alive()]
    for rank in hung:
        rank.kill()
    if hung:
        print(f"{len(hung)} of {RANKS} ranks were still waiting after 60 s")
    return not hung and all(rank.exitcode == 0 for rank in ranks)


def main():
    try:
        import torch

        load_nccl()
    except (ImportError, OSError) as error:
        print(f"skipped: {error}")
        return 77
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        return 77
    print("one host for both:", "works" if attempt(False) else "refused")
    works = attempt(True)
    print("a host for each, over sockets:", "works" if works else "DOES NOT WORK")
    return 0 if works else 1


if __name__ == "__main__":
    sys.exit(main())
