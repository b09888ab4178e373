#!/usr/bin/env python3
"""Fetches the headers of CUDA that the software device is built with (docs/testing.md), where there is no toolkit.

scripts/fetch-cuda-headers.py FOLDER puts them into FOLDER/include, from the packages of the Python package index that
have them, at fixed versions and with their hashes checked. What is there already is left alone. cmake --preset softgpu
calls it. cuBLAS' package is 400 MB, of which two headers are needed: only their parts of it are fetched.
"""
import argparse
import hashlib
import io
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile

# Fetched whole: the package's hash.
PACKAGES = {
    "nvidia-cuda-runtime==13.0.96": "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
    "nvidia-cuda-crt==13.0.88": "2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4",
    "nvidia-cuda-cccl==13.0.85": "e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649",
}
# Fetched in part: the files' own hashes.
FILES = {
    "nvidia-cublas==13.0.2.14": {
        "cublasLt.h": "a47b6a56a30e756043d1dd999fd5ef305ce25a4c9f398a61622af40403e43be8",
        "cublas_api.h": "ff39aab679599c2076caf97e2751bff2187554824fdba387c2aebe104cd29d25",
    },
}
INSIDE = "nvidia/cu13/include/"  # of a package
PLATFORM = ["--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check"]
CURE = """
Cure: a connection to a Python package index (pip's own settings name another one), or the CUDA toolkit in
/usr/local/cuda, or its headers elsewhere and cmake -DSB_CUDA_HEADERS=<folder>."""


def pip(*arguments):
    run = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        reason = run.stderr.strip().splitlines() or ["it says nothing"]
        raise SystemExit(f"fetch-cuda-headers.py: pip {arguments[0]} fails: {reason[-1]}{CURE}")


class RemoteFile(io.RawIOBase):
    """A file of a server's, of which only what is read is fetched."""

    def __init__(self, url):
        super().__init__()
        self.url, self.at = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, headers={"Range": "bytes=-1"})) as answer:
            if answer.status != 206:
                raise OSError("the server does not give parts of files")
            self.size = int(answer.headers["Content-Range"].rsplit("/", 1)[1])

    def seekable(self):
        return True

    def readable(self):
        return True

    def seek(self, offset, whence=io.SEEK_SET):
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def tell(self):
        return self.at

    def readinto(self, buffer):
        end = min(self.at + len(buffer), self.size)
        if end <= self.at:
            return 0
        header = {"Range": f"bytes={self.at}-{end - 1}"}
        with urllib.request.urlopen(urllib.request.Request(self.url, headers=header)) as answer:
            part = answer.read()
        buffer[: len(part)] = part
        self.at += len(part)
        return len(part)


def unpack(package, names, into):
    """The headers of an opened package, by name below INSIDE; None: all of them."""
    for entry in package.infolist():
        if not entry.filename.startswith(INSIDE) or entry.is_dir():
            continue
        name = entry.filename[len(INSIDE):]
        if names is not None and name not in names:
            continue
        data = package.read(entry)
        if names is not None and hashlib.sha256(data).hexdigest() != names[name]:
            raise SystemExit(f"fetch-cuda-headers.py: {name} is not what it was: {hashlib.sha256(data).hexdigest()}")
        target = (into / name).resolve()
        if not target.is_relative_to(into.resolve()):
            raise SystemExit(f"fetch-cuda-headers.py: a package with the file {name}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def fetch_whole(requirement, digest, into):
    with tempfile.TemporaryDirectory() as folder:
        wanted = pathlib.Path(folder) / "requirement.txt"
        wanted.write_text(f"{requirement} --hash=sha256:{digest}\n")
        pip("download", *PLATFORM, "--require-hashes", "--dest", folder, "--requirement", str(wanted))
        (file,) = pathlib.Path(folder).glob("*.whl")
        with zipfile.ZipFile(file) as package:
            unpack(package, None, into)


def fetch_parts(requirement, names, into):
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        pip("install", *PLATFORM, "--dry-run", "--ignore-installed", "--report", str(report), requirement)
        url = json.loads(report.read_text())["install"][0]["download_info"]["url"]
    try:
        with zipfile.ZipFile(io.BufferedReader(RemoteFile(url), 1 << 16)) as package:
            unpack(package, names, into)
    except OSError as error:
        raise SystemExit(f"fetch-cuda-headers.py: {requirement}: {error}{CURE}") from error
    missing = [name for name in names if not (into / name).exists()]
    if missing:
        raise SystemExit(f"fetch-cuda-headers.py: {requirement} has no {', '.join(missing)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    stamp = folder / "fetched.json"
    wanted = json.dumps([PACKAGES, FILES], indent=1)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    include = folder / "include"
    shutil.rmtree(include, ignore_errors=True)
    include.mkdir(parents=True)
    for requirement, digest in PACKAGES.items():
        print(f"fetching {requirement}", flush=True)
        fetch_whole(requirement, digest, include)
    for requirement, names in FILES.items():
        print(f"fetching {', '.join(names)} of {requirement}", flush=True)
        fetch_parts(requirement, names, include)
    stamp.write_text(wanted)


if __name__ == "__main__":
    main()
