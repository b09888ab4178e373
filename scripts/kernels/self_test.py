"""Shows that the record can be wrong: objects made here by hand, with instructions as nvdisasm prints them."""

import pathlib
import struct
import tempfile

from kernels import cubin, pages, record, table

# Instruction, low and high word, and the kind it counts as.
WORDS = {
    "HGMMA.64x64x16.F32.BF16": (0x00E00000107879F0, 0x000FE2000C7018FF),
    "UTMALDG.3D": (0x00000008140095B4, 0x0003E40008010000),
    "SYNCS.EXCH.64": (0x0388C004083F75B2, 0x0024620008000100),
    "BAR.SYNC": (0x0000000000007B1D, 0x01AFEC0000010000),
    "MUFU.EX2": (0x0000007800787308, 0x000FE20000000800),
    "LDG.E": (0x0000001A02037981, 0x002EAC000C1E1900),
    "STL.64": (0x0000280A01007387, 0x000FE80000100A00),
    "STL": (0x0000340001007387, 0x0005E80000100800),
    "LDL.64": (0x0000280001067983, 0x000EA20000100A00),
    "ATOMG.E.ADD": (0x00000007040509A8, 0x002EA200081EE1DA),
    "UIADD3": (0x000000700A0C7890, 0x000FE4000FF1E03F),
    "NOP": (0x0000000000007918, 0x004FE20000000000),
}
CODE = tuple(WORDS.values())
SYMBOL = "_ZN2sb3gpu43_GLOBAL__N__42ec434b_10_forward_cu_03e98dd914forward_kernelILi64ELb1EEEvPKf"
MOVED = SYMBOL.replace("42ec434b", "0123abcd").replace("03e98dd9", "deadbeef")
OTHER = "_ZN2sb3gpu43_GLOBAL__N__42ec434b_10_forward_cu_03e98dd912clear_kernelEv"


def elf(sections):
    """[(name, bytes or size)] as a file."""
    names, at, body, headers = b"\0", 64, b"", [bytes(64)]
    for name, content in [*sections, (".shstrtab", None)]:
        position = len(names)
        names += name.encode() + b"\0"
        if content is None:
            content = names
        kind, size = (8, content) if isinstance(content, int) else (1, len(content))
        headers.append(struct.pack("<IIQQQQ", position, kind, 0, 0, at + len(body), size) + bytes(24))
        body += b"" if kind == 8 else content
    head = b"\x7fELF\x02\x01\x01".ljust(0x28, b"\0") + struct.pack("<Q", at + len(body))
    head = head.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, len(headers), len(headers) - 1)
    return head + body + b"".join(headers)


def cubin_of(kernels, toolkit="13.0.88", arch="90a", more=()):
    """[(symbol, words, registers, shared, relocation's target or "")]"""
    note = f"Cuda compilation tools, release 13.0, V{toolkit}\0-lineinfo -arch sm_{arch} -m 64\0".encode()
    sections, info, strings, symbols = [(".note.nv.tkinfo", note), *more], b"", b"\0", [bytes(24)]
    for symbol, words, registers, shared, target in kernels:
        for name in filter(None, (target, symbol)):
            place = len(sections) + 1 if name == symbol else 0
            symbols.append(struct.pack("<IBBHQQ", len(strings), 0x12, 0, place, 0, 0))
            strings += name.encode() + b"\0"
        index = len(symbols) - 1
        info += struct.pack("<BBHII", 4, 0x2F, 8, index, registers) + struct.pack("<BBH", 2, 0x50, 1)
        info += struct.pack("<BBHII", 4, 0x11, 8, index, 16)
        sections += [(".text." + symbol, b"".join(struct.pack("<QQ", *pair) for pair in words)),
                     (".nv.shared." + symbol, 1024 + shared)]  # fmt: skip
        if target:
            sections.append((".rela.text." + symbol, struct.pack("<QQq", 16, (index - 1) << 32 | 2, 0)))
    return elf([*sections, (".nv.info", info), (".strtab", strings), (".symtab", b"".join(symbols))])


def container_of(*contents, kind=2):
    entries = b"".join(struct.pack("<HHIQ", kind, 0x101, 16, len(content)) + content for content in contents)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def object_of(*contents, kind=2):
    return elf([(".text", b""), (".nv_fatbin", container_of(*contents, kind=kind))])


def only(*kernels, **options):
    found = cubin.Cubin(cubin.cubins(object_of(cubin_of(kernels, **options)))[0]).kernels()
    return found[0] if len(kernels) == 1 else found


def refused(part, function, *arguments, **options):
    try:
        function(*arguments, **options)
    except (cubin.Unreadable, record.Mismatch) as error:
        assert part in str(error), (part, error)
    else:
        raise AssertionError(f"not refused: {part}")


def machine_code():
    kernel = only((SYMBOL, CODE, 168, 64, ""))
    assert (kernel.name, kernel.architecture) == ("forward_kernel<64, true>", "90a"), kernel
    assert (kernel.registers, kernel.stack, kernel.shared, kernel.instructions) == (168, 16, 64, 11), kernel
    assert (kernel.spill_stores, kernel.spill_loads) == (12, 8), kernel
    assert {kind: n for kind, n in kernel.counts.items() if n} == {
        "wgmma": 1, "bulk": 1, "mbarrier": 1, "bar": 1, "mufu": 1, "ldg": 1, "atomic": 1}, kernel  # fmt: skip
    assert only((SYMBOL, CODE, 40, 64, ""), arch="80").shared == 1024 + 64
    # Where a kernel stands, what its file is called and which line it came from is no part of it.
    moved = only((OTHER, CODE[:3], 8, 0, ""), (MOVED, CODE, 168, 64, ""), more=[(".nv_debug_line_sass", b"lines")])
    assert (moved[1].code, moved[1].name) == (kernel.code, kernel.name) and moved[0].code != kernel.code, moved
    # The least change of an instruction or of a constant is.
    for words in [CODE[1:], CODE[::-1], ((CODE[0][0] ^ 1 << 40, CODE[0][1]), *CODE[1:])]:
        assert only((SYMBOL, words, 168, 64, "")).code != kernel.code, words
    assert only((SYMBOL, CODE, 168, 64, ""), more=[(".nv.constant2." + SYMBOL, b"\1")]).code != kernel.code
    # Of what the linker fills in: the name, and neither its number nor what is there until then.
    call = only((SYMBOL, CODE, 168, 64, "table"))
    filled = (CODE[0], (0x12345678, CODE[1][1]), *CODE[2:])
    assert only((OTHER, CODE[:1], 8, 0, ""), (SYMBOL, CODE, 168, 64, "table"))[1].code == call.code != kernel.code
    assert cubin.Cubin(cubin_of([(SYMBOL, filled, 168, 64, "table")])).code(SYMBOL) == call.code
    assert only((SYMBOL, CODE, 168, 64, "other")).code != call.code
    refused("compressed", cubin.cubins, object_of(b"\x28\xb5\x2f\xfd" + bytes(60)))
    assert cubin.cubins(object_of(b"\x28\xb5\x2f\xfd" + bytes(60), kind=1)) == []  # PTX
    two = container_of(b"ptx", kind=1) + bytes(5) + container_of(b"\x7fELF one", b"\x7fELF two")
    assert cubin.cubins(elf([(".nv_fatbin", two)])) == [b"\x7fELF one", b"\x7fELF two"]
    refused("does not know", only, (SYMBOL, (*CODE, (0x1FF, 0)), 168, 64, ""))
    refused("sm_120", only, (SYMBOL, CODE, 168, 64, ""), arch="120")
    refused("no 64-bit ELF", cubin.cubins, b"no object")


def builds():
    """What the check says of a build."""
    with tempfile.TemporaryDirectory() as folder:
        build = pathlib.Path(folder)
        path = build / "src/ops/CMakeFiles/sb_ops.dir/cuda/forward.cu.o"
        path.parent.mkdir(parents=True)

        def made(*kernels, **options):
            path.write_bytes(object_of(cubin_of(kernels, **options)))
            return record.built(build, {"ops/cuda/forward.cu"})

        first = made((SYMBOL, CODE, 168, 64, ""), (OTHER, CODE[:3], 8, 0, ""))
        assert record.parsed(first.text()) == first
        assert record.compared(first, first) == ([], [])
        changed = made((SYMBOL, CODE[1:], 176, 64, ""), (OTHER, CODE[:3], 8, 0, ""))
        differing, grown = record.compared(first, changed)
        assert len(differing) == 1 and not grown, (differing, grown)
        assert "ops/cuda/forward.cu: forward_kernel<64, true> (sm_90a): its machine code changed" in differing[0]
        assert "registers 168 -> 176" in differing[0] and "wgmma 1 -> 0" in differing[0], differing
        larger = made((SYMBOL, (*CODE, WORDS["STL.64"], WORDS["STL.64"], WORDS["STL"]), 177, 64, ""))
        differing, grown = record.compared(first, larger)
        assert len(differing) == 2 and "clear_kernel (sm_90a): on record, but gone" in differing[0], differing
        assert len(grown) == 1 and "168 -> 177 registers, 12 + 8 -> 32 + 8 bytes of spills" in grown[0], grown
        differing, _ = record.compared(larger, first)
        assert any("not on record" in line for line in differing), differing
        same = made((SYMBOL, CODE, 168, 128, ""), (OTHER, CODE[:3], 8, 0, ""))
        assert "the same machine code, but (shared 64 -> 128)" in record.compared(first, same)[0][0]
        assert record.compared(first, made((SYMBOL, CODE[1:], 9, 0, ""), arch="80")) == ([], [])
        refused("no object of ops/other.cu", record.built, build, {"ops/cuda/forward.cu", "ops/other.cu"})
        refused("two kernels", made, (SYMBOL, CODE, 168, 64, ""), (MOVED, CODE, 168, 64, ""))

        twice = made((SYMBOL, (CODE[0], CODE[1]), 168, 64, ""), (OTHER, CODE[:3], 8, 0, ""))
        swapped = made((SYMBOL, (CODE[1], CODE[0]), 168, 64, ""), (OTHER, CODE[:3], 8, 0, ""))
        assert len(record.compared(twice, swapped)[0]) == 1  # nothing but the order of instructions

        # What was measured with which code, by dates and in any order of adding.
        old = made((SYMBOL, CODE[1:], 168, 64, ""), (OTHER, CODE[:3], 8, 0, ""))
        for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0, 1]):
            known = first
            for i in order:
                commit, build_then = (("c00000a", old), ("b00000a", first), ("a00000a", old))[i]
                known = record.with_measured(known, commit, f"2026-11-1{i}", build_then)
            assert list(known.measured) == ["c00000a", "b00000a", "a00000a"], order
            assert digits(known) == {"forward_kernel<64, true>": "010", "clear_kernel": "111"}, (order, known.rows)
        known = record.with_measured(known, "a00000a", "2026-11-12", first)
        assert digits(known) == {"forward_kernel<64, true>": "011", "clear_kernel": "111"}, known.rows
        assert record.parsed(known.text()) == known
        # Figures are of an H200: they say nothing of kernels for another GPU, though that build has these, too.
        elsewhere = made((SYMBOL, CODE, 168, 64, ""), arch="80")
        assert digits(record.with_measured(elsewhere, "c00000a", "2026-11-10", elsewhere)) == {
            "forward_kernel<64, true>": "0"
        }
        after = record.renewed(known, changed)
        assert digits(after) == {"forward_kernel<64, true>": "000", "clear_kernel": "111"}, after.rows
        other = made((SYMBOL, CODE, 168, 64, ""), toolkit="13.1.1")
        again = record.renewed(known, other)
        assert not again.measured and digits(again) == {"forward_kernel<64, true>": ""}, again
        refused("by CUDA 13.1.1", record.with_measured, known, "c", "d", other)
        return known, after


def digits(known):
    return {row.kernel: row.measured for row in known.rows.values()}


def statements(known, changed):
    """What a page has to say of `known`, and after a change."""
    assert "| `forward_kernel` | 168 | 20 | 64 | 11 |" in table.text(known, 8, 16), table.text(known, 8, 16)
    assert pages.should_say(known, "c00000a", ["ops/cuda/forward.cu:forward_kernel"]).endswith(
        "; new or changed since: `ops/cuda/forward.cu:forward_kernel`.")
    true = "On an H200.\n\nKernels at a00000a:\n`ops/cuda`; unchanged since. All of them.\n\nAnd more.\n"
    assert pages.problems(known, true, True) == [] and pages.mended(known, true) != true  # it wraps
    assert pages.mended(known, pages.mended(known, true)) == pages.mended(known, true)
    says = "Kernels at a00000a: `ops/cuda`; new or changed since: `ops/cuda/forward.cu:forward_kernel`."
    found = pages.problems(changed, true, True)
    assert len(found) == 1 and says in found[0], found
    renewed = pages.mended(changed, true)
    assert f"On an H200.\n\n{says} All of them.\n\nAnd more.\n" == renewed, renewed
    assert pages.problems(changed, renewed, True) == []
    assert len(pages.problems(known, renewed, True)) == 1  # no longer true
    changed.rows["90a", "ops/cuda/forward.cu", "clear_kernel"].measured = "000"
    assert "since: `ops/cuda`." in pages.mended(changed, true)
    two = record.Row("90a", "ops/cuda/forward.cu", "forward_kernel<128, true>", "", {}, "111")
    changed.rows[two.key] = two
    some = pages.mended(changed, true)
    some = some.replace("\n", " ")
    assert "since: `ops/cuda/forward.cu:clear_kernel`, `ops/cuda/forward.cu:forward_kernel` (1 of 2). All" in some, some
    assert "does not say on which kernels" in pages.problems(known, "fast on an H200", True)[0]
    assert pages.problems(known, "fast on an H200", False) == []
    assert pages.problems(known, "an H200 <!-- kernels: none: computed -->", True) == []
    unknown = true.replace("a00000a", "f00000a")
    assert "; not compared with today's." in pages.problems(known, unknown, True)[0]
    says = pages.mended(known, unknown)
    assert pages.problems(known, says, True) == [] and pages.not_compared(known, says) == ["f00000a"], says
    assert len(pages.problems(known, says.replace("f00000a", "a00000a"), True)) == 1  # that one is known
    assert pages.not_compared(known, true) == []
    for old, new, why in [("ops/cuda", "ops/cud", "no kernels on record are in ops/cud"),
                          ("unchanged", "the same", "not of the form")]:  # fmt: skip
        assert why in pages.problems(known, true.replace(old, new), True)[0], why
        assert pages.mended(known, true.replace(old, new)) == true.replace(old, new)


def run():
    machine_code()
    statements(*builds())
    print("kernel-record: finds what it should")
    return 0
