"""Where the GPU code could be wrong without a compiler noticing: every wait, arrive, barrier, fence, order between streams
and bound of an index, each with what it becomes in a mutant.

All mutants are compiled at once: the source gets a switch at every site, and a number in the environment says at run time
which one is wrong (mutant.h). So the table costs one build, not hundreds.
"""

import hashlib
import random
import re
from dataclasses import dataclass
from pathlib import Path

# In kernels: what is called as a statement of its own and may be left out.
DEVICE_CALLS = {
    "barrier": ("__syncthreads", "__syncwarp", "named_sync", "named_arrive"),
    "wait": ("barrier_wait", "wait_for_dependencies", "wgmma_wait", "wait_keys", "wait_values", "wait_gathered",
             "copies_done", "bulk_wait", "bulk_wait_read"),
    "arrive": ("barrier_arrive", "barrier_expect", "wgmma_commit", "bulk_commit"),
    # The software device runs every operation in some order of whole operations, so that it cannot see a missing fence.
    "fence": ("wgmma_fence", "async_fence", "barrier_init_fence", "__threadfence"),
}
# On the host: the order between streams, and between them and the host.
HOST_CALLS = {
    "event": ("cuda::record", "cuda::wait_on_stream", "cuda::wait", "cudaEventRecord", "cudaStreamWaitEvent",
              "cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"),
}
HOST_METHODS = {"event": ("record", "hold", "wait")}
STREAMS = r"(?:stream_of\([\w.>-]+\)|\bstream\b|exec\.stream)"

HOST_FOLDERS = ("src/attention/gpu", "src/parallel/ring/gpu", "src/comm/device", "src/ops/cuda", "src/ops/fp8")
HOST_FILES = ("src/device/cuda.cpp", "src/device/event.cpp", "src/model/waiting/layer_inputs.cpp",
              "src/model/stage/slot.cpp", "src/model/stage/ends.cpp")
# What says how an operation is done is not a use of it.
DEFINITIONS = ("src/attention/gpu/hopper/ptx.cuh", "src/attention/gpu/hopper/wgmma.cuh",
               "src/attention/gpu/launch/early_ptx.cuh", "src/attention/gpu/portable/ptx.cuh", "src/device/kernel.cuh")


@dataclass(frozen=True)
class Site:
    key: str  # the same as long as the line and its place among equal lines of the file are
    number: int  # of the switch, from the key, so that a change of one file leaves the others as they are
    file: str
    line: int
    kind: str
    begin: int  # in the text of the file
    end: int
    text: str
    mutant: str  # what replaces the text, with {id} for the number of the mutant
    says: str  # what the mutant is, for the table


def blank_comments(text: str) -> str:
    """The text with comments and strings blanked, every character at its place."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group(0)), text)


def closing(text: str, opening: int) -> int:
    """The place after the parenthesis that closes the one at `opening`."""
    depth = 0
    for at in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at + 1
    return -1


def calls(code: str, names: tuple[str, ...], method: bool = False):
    """(begin, end) of every call of these that is a statement of its own."""
    alternatives = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    # A statement begins after ; { } ) or else; a method's object is a path of names.
    prefix = r"[A-Za-z_][\w.]*(?:\[[^\[\]]*\])?(?:->|\.)(?:\w+(?:->|\.))*" if method else ""
    for m in re.finditer(rf"(?:(?<=[;{{}})])|(?<=else)|(?<=:))(\s*)({prefix}(?:{alternatives})(?:<[^;<>]*>)?)\(", code):
        end = closing(code, m.end() - 1)
        if end > 0 and re.match(r"\s*;", code[end:]):
            yield m.start(2), end


# A comparison of plain operands: names, members, elements, sums and products of those.
OPERAND = r"(?:[A-Za-z_][\w.]*(?:\[[^\[\]]*\])?(?: [-+*] [\w.]+)*)"
COMPARISON = re.compile(rf"(?<![\w.*+\]-] )(?<![.>])\b({OPERAND}) (<|>=) ((?!k[A-Z])(?!\d)(?!D\b){OPERAND})(?= ?(?:\)|&&|\|\||;|\?))")
LOOSER = {"<": "<=", ">=": ">"}


def bounds(code: str):
    """(begin, end, left, operator, right) of comparisons that may keep an index within bounds."""
    for m in COMPARISON.finditer(code):
        begin_of_line = code.rfind("\n", 0, m.start()) + 1
        before = code[begin_of_line:m.start()]
        statement = code[max(code.rfind(";", 0, m.start()), code.rfind("{", 0, m.start()), code.rfind("}", 0, m.start())) + 1:m.start()]
        if re.search(r"constexpr|static_assert|template|requires|#\s*(?:if|define)|<[^<>()]*$", before + " " + statement):
            continue
        # `a < b > (c)`: arguments of a template, not a comparison.
        if m.group(2) == "<" and re.match(r"\s*>", code[m.end():]):
            continue
        yield m.start(), m.end(), m.group(1), m.group(2), m.group(3)


def sites_of(file: str, text: str) -> list[Site]:
    code = blank_comments(text)
    found: list[tuple[int, int, str, str, str]] = []
    device = file.endswith((".cu", ".cuh"))

    def remove(kind: str, spans):
        for begin, end in spans:
            call = text[begin:end]
            found.append((begin, end, kind, f"(mutant::is({{id}}) ? (void)0 : (void)({call}))", f"without {call}"))

    if file not in DEFINITIONS:
        for kind, names in (DEVICE_CALLS if device else {}).items():
            remove(kind, calls(code, names))
        for kind, names in HOST_CALLS.items():
            remove(kind, calls(code, names))
        if not device:
            for kind, names in HOST_METHODS.items():
                remove(kind, calls(code, names, method=True))
        if device:
            for begin, end, left, operator, right in bounds(code):
                looser = LOOSER[operator]
                found.append((begin, end, "bound",
                              f"(mutant::is({{id}}) ? {left} {looser} {right} : {left} {operator} {right})",
                              f"{looser} instead of {left} {operator} {right}"))
        # Streams, where they are arguments of a launch or of a copy; names of parameters are not.
        for m in re.finditer(rf"(?<=[,(] )({STREAMS})(?=\)|,|>>>|\}})", code):
            # (Not cut at a brace: launch_kernel(kernel, {grid, block, 0, stream}, ...).)
            statement = code[max(code.rfind(";", 0, m.start()), code.rfind("}", 0, m.start())) + 1:m.start()]
            if re.search(r"launch|cuda\w+\(|cuda::|<<<|check\(", statement) and "mutant" not in statement:
                found.append((m.start(1), m.end(1), "stream",
                              f"mutant::stream({{id}}, {m.group(1)})", f"another stream than {m.group(1)}"))

    found.sort()
    sites, seen, last = [], {}, -1
    for begin, end, kind, mutant, says in found:
        if begin < last:  # within another one: a comparison in the argument of a wait
            continue
        last = end
        line = text.count("\n", 0, begin) + 1
        whole = text[text.rfind("\n", 0, begin) + 1:text.find("\n", end)].strip()
        nth = seen[(whole, says)] = seen.get((whole, says), 0) + 1
        key = hashlib.sha256(f"{file}|{whole}|{says}|{nth}".encode()).hexdigest()[:10]
        sites.append(Site(key, int(key, 16) % 2**31, file, line, kind, begin, end, text[begin:end], mutant, says))
    return sites


def gpu_sources(root: Path) -> list[str]:
    files = [str(p.relative_to(root)) for pattern in ("*.cu", "*.cuh") for p in root.glob(f"src/**/{pattern}")]
    for folder in HOST_FOLDERS:
        files += [str(p.relative_to(root)) for pattern in ("*.cpp", "*.h") for p in (root / folder).glob(f"**/{pattern}")]
    files += [name for name in HOST_FILES if (root / name).exists()]
    return sorted(set(files))


def all_sites(root: Path) -> list[Site]:
    found = [site for file in gpu_sources(root) for site in sites_of(file, (root / file).read_text())]
    assert len({site.number for site in found}) == len(found), "two sites have one number"
    return found


def with_switches(text: str, sites: list[Site]) -> str:
    """The text of a file in which every site of it can be switched to its mutant by number."""
    parts, at = [], 0
    for site in sites:
        parts += [text[at:site.begin], site.mutant.replace("{id}", str(site.number))]
        at = site.end
    return "".join(parts) + text[at:]


def sample(those: list[Site], count: int, seed: str, explained: set[str]) -> list[Site]:
    """`count` sites that a test should find, by chance: a few of each file, so that few files are compiled again."""
    files: dict[str, list[Site]] = {}
    for site in those:
        if site.kind != "fence" and site.key not in explained:
            files.setdefault(site.file, []).append(site)
    chance = random.Random(seed)
    names = sorted(files)
    chance.shuffle(names)
    return [site for name in names for site in chance.sample(files[name], min(5, len(files[name])))][:count]
