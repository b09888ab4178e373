"""A copy of the sources with a switch at every site, built as the presets of the software device build."""

import filecmp
import shutil
import subprocess
from pathlib import Path

from . import sites


def copy_of(root: Path, to: Path, but: set[str] = frozenset()) -> Path:
    """The files that git knows or would know, each written only where it changed, so that little is compiled again; not
    those that are written another way."""
    names = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root,
                           capture_output=True, check=True, text=True).stdout.split("\0")
    kept = set()
    for name in filter(None, names):
        source, target = root / name, to / name
        if not source.is_file():
            continue
        kept.add(target)
        if name not in but and (not target.exists() or not filecmp.cmp(source, target, shallow=False)):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            shutil.copymode(source, target)
    for path in list(to.glob("src/**/*")) + list(to.glob("tests/**/*")):
        if path.is_file() and path not in kept:
            path.unlink()
    return to


def write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def mutated_tree(root: Path, tree: Path, those: list[sites.Site]) -> Path:
    """The sources with a switch at each of these sites."""
    copy_of(root, tree, {site.file for site in those})
    of_file: dict[str, list] = {}
    for site in those:
        of_file.setdefault(site.file, []).append(site)
    for file, its in of_file.items():
        # By a way that is the same in every copy, so that the compiler cache knows it.
        header = f'#include "{"../" * file.count("/")}tests/softgpu/mutate/mutant.h"\n#line 1\n'
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        its.sort(key=lambda site: site.begin)
        write_if_changed(tree / file, header + sites.with_switches((root / file).read_text(), its))
    return tree


def compile_preset(tree: Path, preset: str, targets: list[str]) -> Path:
    subprocess.run(["cmake", "--preset", preset], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", "--preset", preset, "-j2", "--target", *targets], cwd=tree, check=True)
    return tree / "build" / preset
