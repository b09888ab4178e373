"""Which cases of which test are run for a file's mutants."""

import fnmatch
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

# Programs and the cases of theirs that use the device: a filter of GoogleTest's, or the names that attention's two
# programs take one of as their second argument (what the name holds is run).
ON_CUDA = "*cuda*:*Cuda*"
PROGRAMS = {
    "ops_test": ("tests/ops/ops_test", ON_CUDA),
    "device_test": ("tests/device/device_test", ON_CUDA),
    "comm_device_test": ("tests/comm/comm_device_test", ON_CUDA),
    "eval_test": ("tests/eval/eval_test", ON_CUDA),
    "model_test": ("tests/model/model_test", ON_CUDA),
    "attention_cuda_test": ("tests/attention/attention_cuda_test", "*"),
    "cuda_ring_test": ("tests/parallel/ring/cuda_ring_test", "*"),
    "cuda_training_test": ("tests/train/cuda_training_test", "*"),
    "nccl_ranks_test": ("tests/train/nccl_ranks_test", "*"),
    "attention_hopper_test": ("tests/attention/gpu/hopper/attention_hopper_test", [
        name + d for d in (" d128", " d64") for name in (
            "dense 8:1 128", "dense 8:1 1000", "dense 16:2 1..777", "dense 7:1 18-token tiles", "dense 4:4", "dense 64:1",
            "sparse 16:2 qb16", "sparse 14:2 qb16", "staircase 16:2 qb16", "staircase 14:2 mixed dense",
            "staircase 16:2 qb64", "empty rows 16:2 qb128", "per query head 8:2 qb128", "per query head 8:2 qb32",
            "hub columns 8:1 qb16")] + [
        f"{name} d{d}" for name in ("dense 4:2", "staircase 14:2 mixed dense") for d in (16, 32, 96)] + [
        f"{name} of {group}" for name in ("blocks of 64, group", "empty rows and columns, group") for group in (1, 2, 7, 8)]),
    "attention_select_test": ("tests/attention/gpu/hopper/attention_select_test", re.compile(r'run\("([^"]+)", (?!.*full)')),
}
ENVIRONMENT = {"nccl_ranks_test": {"SOFTGPU_DEVICES": "2"}}
SELECT_SOURCE = "tests/attention/gpu/hopper/select_test.cu"

# The cases of a file's mutants: those named first are looked at for every mutant, the second ones where nobody found it.
HOPPER = (["attention_hopper_test dense 8:1 128*", "attention_hopper_test staircase 16:2 qb64*",
           "attention_hopper_test sparse 14:2*", "attention_hopper_test per query head 8:2 qb32*",
           "attention_hopper_test dense 64:1*", "attention_hopper_test dense 7:1*",
           "attention_cuda_test CudaAttentionTest.ManyMicroBatchesInTurn"],
          ["attention_hopper_test *", "attention_cuda_test CudaTable*"])
SELECT = (["attention_select_test 2:2 d64", "attention_select_test 16:1 d128", "attention_select_test 8:2 d64 window",
           "attention_select_test 8:2 d64 lookahead topp", "attention_select_test 8:2 d64 mass, high",
           "attention_select_test 16:1 d64 parts of 2", "attention_select_test 8:2 d64 topp, single keys",
           "attention_select_test planes 80:2 d64", "attention_select_test planes 8:1 d128 16 channels",
           "attention_select_test planes 8:2 d64 topp", "attention_select_test planes 8:2 d64 lookahead mass",
           "attention_cuda_test CudaAttentionTest.SelectsWhat*", "attention_cuda_test CudaAttentionTest.SelectsByPlanes*"],
          ["attention_select_test *"])
PORTABLE = (["attention_hopper_test dense 4:2 d16", "attention_hopper_test staircase 14:2 mixed dense d32",
             "attention_hopper_test dense 8:1 128*", "attention_hopper_test per query head 8:2 qb32*",
             "attention_hopper_test blocks of 64, group of 2", "attention_cuda_test CudaAttentionTest.ManyMicro*"],
            ["attention_hopper_test *", "attention_cuda_test CudaTable*"])
COVERAGE = (["attention_cuda_test *MeasuresCoverage*"], ["cuda_ring_test *AreThoseOfOneGpu/f32_topk"])
SLASHES = (["attention_cuda_test *VerticalSlash*"], [])
HOST = (["attention_cuda_test CudaAttentionTest.ManyMicro*", "attention_cuda_test CudaAttentionTest.EqualsTheCpu*",
         "attention_cuda_test *MeasuresCoverageLikeTheCpu", "attention_cuda_test CudaAttentionTest.Observes*"],
        ["attention_cuda_test *"])
RING = (["cuda_ring_test */f32", "cuda_ring_test *f32_topk", "cuda_ring_test *f32_planes",
         "cuda_ring_test *f32_topk_lookahead"], ["cuda_ring_test *"])
FILES = (
    ("src/ops/cuda/adamw", (["ops_test *AdamW*", "ops_test *Moments*"], [])),
    ("src/ops/cuda/cross_entropy", (["ops_test *CrossEntropy*"], [])),
    ("src/ops/cuda/dropout", (["ops_test *Dropout*"], [])),
    ("src/ops/cuda/embedding", (["ops_test *Embedding*"], [])),
    ("src/ops/cuda/rmsnorm", (["ops_test *RmsNorm*"], [])),
    ("src/ops/cuda/rope", (["ops_test *Rope*"], [])),
    ("src/ops/cuda/swiglu", (["ops_test *SwiGlu*", "ops_test *Fp8*Swiglu*"], [])),
    ("src/ops/fp8/", (["ops_test *Fp8*"], ["model_test CudaFp8Stage*"])),
    ("src/ops/", (["ops_test *"], [])),
    ("src/eval/gpu/", (["eval_test *CudaDecode*"], ["eval_test *"])),
    ("src/comm/device/", (["comm_device_test *"], ["nccl_ranks_test *"])),
    ("src/device/", (["device_test *", "comm_device_test *"], [])),
    ("src/model/waiting/", (["model_test *LayerInputsInHostMemory*"], [])),
    ("src/model/stage/", (["model_test *AttentionOfTheDevice*", "model_test *GradientsOfSeveral*none_cuda_f32"],
                          ["model_test *PiecesGiveTheGradients*", "model_test *TwoStagesEqualOne*"])),
    ("src/parallel/ring/", RING),
    ("src/attention/gpu/coverage/", COVERAGE),
    (r"src/attention/gpu/select/(vertical_slash|slash_masses)", SLASHES),
    ("src/attention/gpu/select/", SELECT),
    (r"src/attention/gpu/hopper/(masses|part_masses|plane_masses|gather_planes|select)", SELECT),
    ("src/attention/gpu/hopper/", HOPPER),
    ("src/attention/gpu/portable/", PORTABLE),
    (r"src/attention/gpu/plan/work\.cu", HOPPER),
    ("src/attention/gpu/", HOST),
)
# These two take "--short NAME", the others a filter.
OWN_FILTERS = {"attention_hopper_test", "attention_select_test"}


@dataclass(frozen=True)
class Case:
    program: str
    name: str

    def __str__(self):
        return f"{self.program} {self.name}"

    def command(self, folder: Path) -> list[str]:
        path = str(folder / PROGRAMS[self.program][0])
        if self.program in OWN_FILTERS:
            return [path, "--short", self.name]
        return [path, f"--gtest_filter={self.name}", "--gtest_fail_fast"]


def of_program(program: str, tree: Path, folder: Path) -> list[Case]:
    path, those = PROGRAMS[program]
    if isinstance(those, list):
        return [Case(program, name) for name in those]
    if isinstance(those, re.Pattern):
        source = (tree / SELECT_SOURCE).read_text().split("if (full) {")[0]
        return [Case(program, name) for name in those.findall(source)]
    listed = subprocess.run([str(folder / path), f"--gtest_filter={those}", "--gtest_list_tests"], capture_output=True,
                            text=True, check=True, timeout=120, cwd=tree, env={**os.environ, **ENVIRONMENT.get(program, {})})
    cases, suite = [], ""
    for line in listed.stdout.splitlines():
        line = line.split("#")[0].rstrip()
        if re.fullmatch(r"[\w/]+\.", line):
            suite = line
        elif suite and re.fullmatch(r"  \S+", line):
            cases.append(Case(program, suite + line.strip()))
    return cases


class Choice:
    """The cases of every file, of those that the programs in `folder` have."""

    def __init__(self, tree: Path, folder: Path):
        self.tree, self.folder, self.programs = tree, folder, {}

    def _matching(self, pattern: str) -> list[Case]:
        program = pattern.split(" ")[0]
        if program not in self.programs:
            self.programs[program] = of_program(program, self.tree, self.folder)
        found = [case for case in self.programs[program] if fnmatch.fnmatchcase(str(case), pattern)]
        if not found:
            raise SystemExit(f"tests/softgpu/mutate/cases.py: no case matches '{pattern}'")
        return found

    def of_file(self, file: str, longer: bool) -> list[Case]:
        """Its first cases, and with `longer` the second ones after them."""
        patterns = [p for part in lists_of(file)[:1 + longer] for p in part]
        return list(dict.fromkeys(case for p in patterns for case in self._matching(p)))


def lists_of(file: str) -> tuple[list[str], list[str]]:
    for pattern, lists in FILES:
        if re.match(pattern, file):
            return lists
    raise SystemExit(f"tests/softgpu/mutate/cases.py: no cases for {file}")


def programs_of(files, longer: bool) -> list[str]:
    """What must be built for the mutants of these files."""
    return sorted({p.split(" ")[0] for file in files for part in lists_of(file)[:1 + longer] for p in part})
