"""Debian packages by the machine's own apt, without root, and the files in them, which are read without unpacking anything."""

import dataclasses
import hashlib
import io
import re
import shutil
import subprocess
import tarfile
import zipfile


class PackageError(Exception):
    """Something the caller can put right; the text says how."""


@dataclasses.dataclass(frozen=True)
class PackageFiles:
    """Some files of a package."""
    name: str  # of the source of text that they are
    package: str  # the newest package whose whole name matches
    inside: str  # files of the package: what matches is cut off a path; `archive:path` opens an archive
    keep: str  # paths to keep, after the cut
    drop: str = r"^$"


class Apt:
    """The machine's apt. Where its package lists are missing or older than the archive, it gets lists of its own in `folder`,
    from the same sources; that needs no root."""

    def __init__(self, folder):
        self.folder, self.options = folder, []
        for tool in ("apt-get", "apt-cache", "dpkg-deb"):
            if shutil.which(tool) is None:
                raise PackageError(f"{tool} is not here: the texts come from Debian packages; run this on Debian or Ubuntu")

    def call(self, tool, *words, cwd=None):
        done = subprocess.run([tool, *self.options, *words], cwd=cwd, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    def refresh(self):
        for part in ("state/lists/partial", "cache/archives/partial"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        here = self.folder.resolve()
        self.options = ["-o", f"Dir::State={here}/state", "-o", f"Dir::Cache={here}/cache",
                        "-o", "Dir::State::status=/var/lib/dpkg/status", "-o", "APT::Update::Error-Mode=any"]
        code, _, errors = self.call("apt-get", "update")
        if code != 0:
            raise PackageError(f"apt-get update failed, so the machine's package sources cannot be read; is the network "
                               f"there?\n{errors.strip()}")

    def describe(self, pattern, version):
        """(package, version, architecture, sha256) of the newest package that matches, or of that version."""
        code, names, _ = self.call("apt-cache", "pkgnames")
        found = [name for name in names.split() if re.fullmatch(pattern, name)] if code == 0 else []
        package = max(found, key=lambda name: [int(number) for number in re.findall(r"\d+", name)], default=None)
        if package:
            code, text, _ = self.call("apt-cache", "show", f"{package}={version}" if version else "--no-all-versions",
                                      *([] if version else [package]))
            fields = dict(line.split(": ", 1) for line in text.splitlines()
                          if re.match(r"(Version|Architecture|SHA256): ", line))
            if code == 0 and len(fields) == 3:
                return package, fields["Version"], fields["Architecture"], fields["SHA256"]
        raise PackageError(f"no package {pattern}" + (f" of version {version}" if version else "")
                           + "; is the Debian archive (main) among the machine's apt sources?")

    def fetch_once(self, source, wanted, folder):
        pattern, version = (re.escape(wanted["package"]), wanted["version"]) if wanted else (source.package, None)
        package, found, architecture, checksum = self.describe(pattern, version)
        path = folder / f"{package}_{found.replace(':', '%3a')}_{architecture}.deb"
        if not path.exists() or sha256(path) != checksum:
            path.unlink(missing_ok=True)
            code, _, errors = self.call("apt-get", "download", f"{package}={found}", cwd=folder)
            if code != 0:
                raise PackageError(f"apt-get download {package} failed; is the network there, and space on the disk?\n"
                                   f"{errors.strip()}")
        if not path.exists() or sha256(path) != checksum:
            raise PackageError(f"{path}: not the file that the package lists describe; delete it and start again")
        if wanted and wanted["sha256"] != checksum:
            raise PackageError(f"{package} {found}: the archive's checksum is not the one of --versions")
        return {"source": source.name, "package": package, "version": found, "sha256": checksum,
                "bytes": path.stat().st_size, "file": path.name}

    def fetch(self, source, wanted, folder):
        """A package in `folder`, its checksum the one that the signed package lists name: its entry of the manifest."""
        problems = []
        for prepare in (lambda: None, self.refresh):
            try:
                prepare()
                return self.fetch_once(source, wanted, folder)
            except PackageError as error:
                problems.append(str(error))
        raise PackageError(f"{source.name}: " + "\n".join(dict.fromkeys(problems)))


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def share(text):
    """A number from 0 to 1 that depends on nothing but the text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def members(stream, kind, opened="", prefix=""):
    """(path, read) of all regular files of an archive that is read once from front to back; archives in it whose path matches
    `opened` are read too, as `archive:path`. What the caller does not read costs nothing."""
    if kind == "zip":
        with zipfile.ZipFile(io.BytesIO(stream.read())) as archive:
            for info in archive.infolist():
                if not info.is_dir():
                    yield prefix + info.filename, lambda info=info: archive.read(info)
        return
    with tarfile.open(fileobj=stream, mode="r|" + kind) as archive:
        for member in archive:
            if not member.isreg():
                continue
            path = prefix + member.name.removeprefix("./")
            if opened and re.fullmatch(opened, path):
                yield from members(archive.extractfile(member), path.rpartition(".")[2], prefix=path + ":")
            else:
                yield path, lambda member=member: archive.extractfile(member).read()


def package_files(source, deb):
    """(path, bytes) of what the source keeps of a package. Nothing is unpacked onto the disk."""
    inside, keep, drop = re.compile(source.inside), re.compile(source.keep), re.compile(source.drop)
    archive = source.inside.rpartition(":")[0]
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE) as unpack:
        for path, read in members(unpack.stdout, "", archive):
            start = inside.match(path)
            own = path[start.end():] if start else ""
            if own and keep.search(own) and not drop.search(own):
                yield own, read()
        unpack.stdout.read()  # the padding at the end, so that dpkg-deb is not cut off
    if unpack.returncode != 0:
        raise PackageError(f"{deb}: dpkg-deb cannot read it; delete it and start again")
