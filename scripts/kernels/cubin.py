"""What a compiled CUDA source holds: every kernel of every architecture in an object file of nvcc, read from its bytes.
No tool of the toolkit is called: a machine that only compiles has none that reads machine code.

An object has a section .nv_fatbin: containers of entries, each PTX or a cubin. A cubin is an ELF file with a section
.text.<kernel> for every kernel; .nv.info holds registers and stack, .nv.shared.<kernel> the size of its static shared
memory, .nv.constant<n>.<kernel> its constants, .note.nv.tkinfo the assembler's version and architecture."""

import collections
import dataclasses
import hashlib
import re
import struct
import subprocess

# Instructions by the low nine bits of their 16 bytes, on compute capability 8.0 to 9.0, with the names nvdisasm gives
# them: all that this project's kernels have. Others are refused, so that none goes uncounted.
OPCODES = """
002 MOV  003 P2R  004 R2P  005 CS2R  006 VOTE  007 SEL  008 FSEL  009 FMNMX  00B FSETP
00C ISETP  00F VIMNMX3  010 IADD3  011 LEA  012 LOP3  013 IABS  016 PRMT  017 IMNMX  019 SHF
01B BMSK  01C PLOP3  020 FMUL  021 FADD  023 FFMA  024 IMAD  025 IMAD  026 IDP  027 IMAD
028 DMUL  029 DADD  02A DSETP  02B DFMA  02D PREEXIT  02E ACQBULK  02F ELECT  030 HADD2  032 HMUL2
033 HSET2  035 HFMA2  036 VIADD  03B LDSM  03C HMMA  03E F2FP  040 HMNMX2  044 STSM  045 I2FP
046 VIADDMNMX  047 VHMNMX  048 VIMNMX  082 UMOV  086 VOTEU  087 USEL  08C UISETP  090 UIADD3  091 ULEA
092 ULOP3  096 UPRMT  097 UIADD3  099 USHF  09C UPLOP3  0A4 UIMAD  0A5 UIMAD  0B9 ULDC  0BB ULDC
0BD UFLO  0BE UBREV  0CA R2UR  100 FLO  101 BREV  102 FCHK  104 F2F  105 F2I  106 I2F
108 MUFU  109 POPC  110 F2F  111 F2I  112 I2F  113 FRND  118 NOP  119 S2R  11A DEPBAR
11B ENDCOLLECTIVE  11C B2R  11D BAR  141 BSYNC  142 BREAK  144 CALL  145 BSSY  146 YIELD  147 BRA
148 WARPSYNC  14D EXIT  150 RET  180 LD  181 LDG  182 LDC  183 LDL  184 LDS  186 STG
187 STL  188 STS  189 SHFL  18A ATOM  18C ATOMS  18D ATOMS  18E REDG  18F CCTL  192 MEMBAR
1A1 MATCH  1A7 SYNCS  1A8 ATOMG  1AB ERRBAR  1AE LDGSTS  1AF LDGDEPBAR  1B2 SYNCS  1B4 UTMALDG  1B6 UTMAREDG
1B7 UTMACMDFLUSH  1B9 UTMACCTL  1BA UBLKCP  1BB UBLKRED  1C2 R2UR  1C3 S2UR  1C4 REDUX  1C5 WARPGROUP  1C6 FENCE
1C8 USETMAXREG  1F0 HGMMA
"""
OPCODES = {int(number, 16): name for number, name in re.findall(r"(\w+) (\w+)", OPCODES)}
KINDS = {
    "wgmma": ("HGMMA",),
    "mma": ("HMMA",),
    "bulk": ("UTMALDG", "UTMAREDG", "UBLKCP", "UBLKRED"),  # the copy engine's, by tensor maps and without
    "mbarrier": ("SYNCS",),
    "bar": ("BAR",),
    "mufu": ("MUFU",),
    "ldg": ("LDG", "LDGSTS"),
    "stg": ("STG",),
    "lds": ("LDS", "LDSM"),
    "sts": ("STS", "STSM"),
    "atomic": ("ATOM", "ATOMG", "ATOMS", "REDG"),
    "shfl": ("SHFL",),
}
ARCHITECTURES = ("80", "86", "87", "89", "90", "90a")  # whose instructions those are

FATBIN, EXECUTABLE, CUBIN = 0xBA55ED50, b"\x7fELF", 2
NO_BITS = 8  # type of a section without bytes in the file
REGISTERS, FRAME = 0x2F, 0x11  # of .nv.info: EIATTR_REGCOUNT, EIATTR_FRAME_SIZE
WITH_VALUE = 4  # the form of an attribute whose value follows it
RESERVED_SHARED = 1024  # of a block's, from 9.0 on for the system, and in the size of every section of shared memory


class Unreadable(Exception):
    """Not what nvcc writes, as far as this module knows."""


@dataclasses.dataclass
class Kernel:
    architecture: str
    name: str  # without parameters
    code: str  # hash of instructions and constants
    registers: int
    stack: int  # bytes per thread
    spill_stores: int  # bytes that its instructions write to local memory, each counted once, as ptxas counts spills
    spill_loads: int
    shared: int  # static, bytes
    instructions: int
    counts: dict  # by kind


@dataclasses.dataclass
class Section:
    name: str
    data: bytes
    size: int


def elf_sections(data):
    if data[:5] != EXECUTABLE + b"\x02":
        raise Unreadable("no 64-bit ELF file")
    (start,) = struct.unpack_from("<Q", data, 0x28)
    entry, count, names = struct.unpack_from("<HHH", data, 0x3A)
    if count == 0:  # more than a halfword counts
        (count,) = struct.unpack_from("<Q", data, start + 0x20)
    if names == 0xFFFF:
        (names,) = struct.unpack_from("<I", data, start + 0x28)
    headers = [struct.unpack_from("<IIQQQQ", data, start + i * entry) for i in range(count)]
    strings = headers[names][4]
    sections = []
    for name, kind, _, _, offset, size in headers:
        name = data[strings + name : data.index(b"\0", strings + name)].decode()
        sections.append(Section(name, b"" if kind == NO_BITS else data[offset : offset + size], size))
    return sections


def cubins(data):
    """The machine code within an object file, an ELF file for each architecture."""
    found = []
    for section in elf_sections(data):
        if section.name not in (".nv_fatbin", "__nv_relfatbin"):
            continue
        at = 0
        while at + 16 <= len(section.data):
            magic, _, header, size = struct.unpack_from("<IHHQ", section.data, at)
            if magic != FATBIN:
                raise Unreadable(f"no container of machine code at byte {at} of {section.name}")
            entry, end = at + header, at + header + size
            while entry < end:
                kind, _, head, length = struct.unpack_from("<HHIQ", section.data, entry)
                content = section.data[entry + head : entry + head + length]
                if kind == CUBIN:
                    if content[:4] != EXECUTABLE:
                        raise Unreadable("its machine code is compressed: compile without -compress-mode=size")
                    found.append(content)
                entry += head + length
            at = end + -end % 8
    return found


def without_file(symbol):
    """nvcc calls an unnamed namespace after the file and a hash of its path; here it is unnamed again."""
    while match := re.search(r"_GLOBAL__N__[0-9a-f]{8}_(\d+)_", symbol):
        end = match.end() + int(match[1]) + len("_01234567")
        length = str(end - match.start())
        if not symbol[: match.start()].endswith(length):
            raise Unreadable(f"an unnamed namespace like no other: {symbol}")
        symbol = symbol[: match.start() - len(length)] + "12_GLOBAL__N_1" + symbol[end:]
    return symbol


def shortened(name):
    """void sb::gpu::(anonymous namespace)::f_kernel<64, (bool)1>(float const*) -> f_kernel<64, true>"""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    name = re.sub(r"(CUB|THRUST)_\w*SM_\w+::", "", name)  # these have the architectures of the build in their name
    name = name.replace("(bool)1", "true").replace("(bool)0", "false").replace("__nv_bfloat16", "bf16")
    name = re.sub(r"\([\w: ]+\)(?=-?\d)", "", name)  # of what type a number is
    depth = 0
    for at in range(len(name) - 1 if name.endswith(")") else -1, -1, -1):
        depth += {")": 1, "(": -1}.get(name[at], 0)
        if depth == 0:
            name = name[:at]
            break
    return re.sub(r"\bsb::(gpu|cuda)::", "", name)


def readable(symbols):
    """{symbol: name}"""
    plain = "\n".join(without_file(symbol) for symbol in symbols)
    run = subprocess.run(["c++filt"], input=plain, capture_output=True, text=True, check=True)
    return {symbol: shortened(name) for symbol, name in zip(symbols, run.stdout.splitlines(), strict=True)}


class Cubin:
    def __init__(self, data):
        self.sections = elf_sections(data)
        self.by_name = {section.name: section for section in self.sections}
        notes = self.data(".note.nv.tkinfo").decode("latin-1")
        version, architecture = re.search(r"V(\d+\.\d+\.\d+)\0", notes), re.search(r"-arch[ =]sm_(\w+)", notes)
        if version is None or architecture is None:
            raise Unreadable("its machine code does not say what wrote it, as that of CUDA 13 does")
        self.toolkit, self.architecture = version[1], architecture[1]
        if self.architecture not in ARCHITECTURES:
            raise Unreadable(f"scripts/kernels/cubin.py does not know the instructions of sm_{self.architecture}")
        self.symbols, strings = [], self.data(".strtab")
        for name, _, _, section, _, _ in struct.iter_unpack("<IBBHQQ", self.data(".symtab")):
            self.symbols.append((strings[name : strings.index(b"\0", name)].decode(), section))
        self.registers, self.frames = self.attribute(REGISTERS), self.attribute(FRAME)

    def data(self, name):
        return self.by_name[name].data if name in self.by_name else b""

    def attribute(self, wanted):
        """{index of a function's symbol: value}"""
        info, at, values = self.data(".nv.info"), 0, {}
        while at + 4 <= len(info):
            form, attribute, size = struct.unpack_from("<BBH", info, at)
            at += 4
            if form != WITH_VALUE:  # the value is where others have its size
                continue
            if attribute == wanted:
                symbol, values_of = struct.unpack_from("<II", info, at)
                values[symbol] = values_of
            at += size
        return values

    def code(self, symbol):
        """Of instructions and constants; of what the linker fills in, what that is, not where it lies."""
        text, hashed = bytearray(self.data(".text." + symbol)), hashlib.sha256()
        for form, prefix in (("<QQq", ".rela.text."), ("<QQ", ".rel.text.")):
            for offset, info, *addend in struct.iter_unpack(form, self.data(prefix + symbol)):
                text[offset : offset + 8] = bytes(8)
                target = without_file(self.symbols[info >> 32][0])
                hashed.update(repr((offset, info & 0xFFFFFFFF, target, addend)).encode())
        hashed.update(text)
        for name in (".nv.constant3", ".nv.global.init"):  # of all kernels together
            hashed.update(self.data(name))
        for bank in range(1, 18):
            if data := self.data(f".nv.constant{bank}.{symbol}"):
                hashed.update(b"constants %d" % bank + data)
        return hashed.hexdigest()[:16]

    def kernel(self, symbol, name):
        words = list(struct.iter_unpack("<QQ", self.data(".text." + symbol)))
        found, spilled = collections.Counter(), collections.Counter()
        for low, high in words:
            opcode = OPCODES.get(low & 0x1FF)
            if opcode is None:
                raise Unreadable(f"{name} has instruction {low & 0x1FF:03X}, which scripts/kernels/cubin.py does not "
                                 "know: look up its name with nvdisasm -hex")  # fmt: skip
            found[opcode] += 1
            if opcode in ("LDL", "STL"):
                spilled[opcode] += (1, 1, 2, 2, 4, 8, 16, 16)[high >> 9 & 7]
        shared = self.by_name.get(".nv.shared." + symbol)
        reserved = RESERVED_SHARED if int(self.architecture.rstrip("a")) >= 90 else 0
        here = self.sections.index(self.by_name[".text." + symbol])
        index = next(i for i, (other, section) in enumerate(self.symbols) if (other, section) == (symbol, here))
        return Kernel(
            self.architecture,
            name,
            self.code(symbol),
            self.registers[index],
            max(size for i, size in self.frames.items() if self.symbols[i][1] == here),
            spilled["STL"],
            spilled["LDL"],
            0 if shared is None else shared.size - reserved,
            len(words) - found["NOP"],
            {kind: sum(found[opcode] for opcode in opcodes) for kind, opcodes in KINDS.items()},
        )

    def kernels(self):
        symbols = [s.name.removeprefix(".text.") for s in self.sections if s.name.startswith(".text.")]
        return [self.kernel(symbol, name) for symbol, name in readable(symbols).items()]
