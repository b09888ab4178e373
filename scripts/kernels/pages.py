"""What pages with figures of an H200 say of the kernels they rest on, in paragraphs of their own:

    Kernels at acf0668: `attention/gpu/portable`, `ops/cuda`; unchanged since.
    Kernels at acf0668: `ops/cuda`; new or changed since: `ops/cuda/add_cuda.cu`, `ops/cuda/rope_cuda.cu:rotate_kernel`
    (2 of 9).
    Kernels at acf0668: `ops/cuda`; not compared with today's.

Names are folders and files of src/, and kernels in them: of 9 instances of a template 2 changed. Nothing is compared
where the record does not know the commit, as after a change of the toolkit. A page that mentions an H200 and has no
figure of its own that rests on kernels says why: <!-- kernels: none: repeats what ... has -->"""

import re
import textwrap

from kernels import record

GPU = "H200"
NAMES = r"(?:`[^`]+`(?: \(\d+ of \d+\))?(?:, )?)+"
UNCHANGED, CHANGED, UNKNOWN = "unchanged since", "new or changed since: ", "not compared with today's"
STATEMENT = re.compile(rf"Kernels at ([0-9a-f]{{7,}}): ({NAMES}); (?:{UNCHANGED}|{CHANGED}{NAMES}|{UNKNOWN})\.")
NONE = re.compile(r"<!-- kernels: none: [^>]+ -->")
PARAGRAPH = re.compile(r"^Kernels at (?:.+\n)+", re.MULTILINE)


def path_of(row):
    return f"{row.source}:{row.base}"


def within(name, row):
    path = path_of(row)
    return path == name or path.startswith((name + "/", name + ":"))


def parts(name, rows):
    """The folders, files or kernels one level below a name."""
    below = (path_of(row)[len(name) :] for row in rows)
    return sorted({name + re.match(r"[/:][^/:]+", rest)[0] for rest in below if rest})


def names_of(name, rows, changed):
    """The fewest names that cover the changed rows of those within `name`, and no folder or file with another one."""
    inside = [row for row in rows if within(name, row)]
    count = sum(row.key in changed for row in inside)
    if count == 0:
        return []
    if count == len(inside):
        return [f"`{name}`"]
    below = parts(name, inside)
    if not below:
        return [f"`{name}` ({count} of {len(inside)})"]
    return [found for part in below for found in names_of(part, inside, changed)]


def should_say(known, commit, names):
    """The statement that is true by the record."""
    start = f"Kernels at {commit}: {', '.join(f'`{name}`' for name in names)}; "
    if commit not in known.measured:
        return f"{start}{UNKNOWN}."
    rows = [row for row in known.rows.values() if row.arch == record.MEASURED_ON]
    changed = {row.key for row in rows if not record.measured_at(known, row, commit)}
    found = sorted({part for name in names for part in names_of(name, rows, changed)})
    return f"{start}{CHANGED + ', '.join(found) if found else UNCHANGED}."


def said(paragraph):
    """(commit, names, the statement as it stands), or None where there is none."""
    match = STATEMENT.match(re.sub(r"\s+", " ", paragraph))
    return (match[1], re.findall(r"`([^`]+)`", match[2]), match[0]) if match else None


def misnamed(known, statement):
    """What is wrong with a statement before it is true or not."""
    if statement is None:
        return "not of the form that scripts/kernels/pages.py has"
    rows = [row for row in known.rows.values() if row.arch == record.MEASURED_ON]
    missing = [name for name in statement[1] if not any(within(name, row) for row in rows)]
    return f"no kernels on record are in {', '.join(missing)}" if missing else ""


def problems(known, text, has_to):
    """What a page says that is not true, and what it does not say although it has to."""
    found, paragraphs = [], PARAGRAPH.findall(text)
    if has_to and GPU in text and not paragraphs and not NONE.search(text):
        found.append(f"mentions an {GPU} and does not say on which kernels its figures rest: add a paragraph "
                     "\"Kernels at COMMIT: `FOLDER`; unchanged since.\", or <!-- kernels: none: WHY -->")  # fmt: skip
    for paragraph in paragraphs:
        statement = said(paragraph)
        if why := misnamed(known, statement):
            found.append(f"{why}: {paragraph.strip()}")
        elif (right := should_say(known, *statement[:2])) != statement[2]:
            found.append(f"kernels under its figures are not as it says, which --pages --fix mends: {right}")
    return found


def not_compared(known, text):
    """The commits of a page's statements that the record does not know."""
    return [commit for commit, _, _ in filter(None, map(said, PARAGRAPH.findall(text))) if commit not in known.measured]


def mended(known, text):
    """The page with statements that are true, as far as they are of the right form."""

    def true(match):
        statement = said(match[0])
        if misnamed(known, statement):
            return match[0]
        plain = re.sub(r"\s+", " ", match[0]).replace(statement[2], should_say(known, *statement[:2]))
        return textwrap.fill(plain.strip(), 120, break_long_words=False, break_on_hyphens=False) + "\n"

    return PARAGRAPH.sub(true, text)
