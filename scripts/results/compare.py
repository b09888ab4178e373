"""Two records beside each other."""

import fnmatch

from results.case import RecordError

MISSING = "(not there)"


def check(first, second):
    """Refuses records whose bits differ for other reasons than the program."""
    one, other = first["header"]["must agree"], second["header"]["must agree"]
    for key in sorted(one.keys() | other.keys()):
        if one.get(key) != other.get(key):
            values = [of.get(key, "not set") for of in (one, other)]
            raise RecordError(f"the records cannot be compared: {key} is {values[0]} in the first and {values[1]} in "
                              "the second; make both on one machine, with one compiler and one environment")
    if first["header"]["cases by"] != second["header"]["cases by"]:
        raise RecordError("the records cannot be compared: they were made by different versions of scripts/results, so "
                          "that equal names may mean different settings; make both with one version")


def distance(one, other):
    """How far apart two numbers are, relative to the larger."""
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (one, other))
    if not numbers or one == other:
        return ""
    return f" (relative {abs(one - other) / max(abs(one), abs(other)):.1e})"


def differences(first, second, only=""):
    """{"case: key": text}, and how many values were compared."""
    found, count = {}, 0
    cases = {name for name in first["cases"].keys() | second["cases"].keys() if name.startswith(only)}
    for name in sorted(cases):
        one, other = first["cases"].get(name), second["cases"].get(name)
        if one is None or other is None:
            found[f"{name}: all of it"] = f"only in the {'second' if one is None else 'first'} record"
            continue
        for key in sorted(one.keys() | other.keys()):
            a, b = one.get(key, MISSING), other.get(key, MISSING)
            count += 1
            if type(a) is not type(b) or a != b:
                found[f"{name}: {key}"] = f"{a!r} -> {b!r}{distance(a, b)}"
    return found, len(cases), count


def intended(text):
    """Lines `PATTERN -- reason`, the pattern as in a shell; # begins a comment."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if line:
            pattern, separator, reason = line.partition(" -- ")
            if not separator or not reason.strip():
                raise RecordError(f"line {number} of the intended differences: expected 'PATTERN -- reason', found "
                                  f"'{line}'")
            found.append((pattern.strip(), reason.strip()))
    return found


def report(first, second, only="", patterns=()):
    """Lines to print, and whether all is well: no difference without a reason, no reason without a difference."""
    check(first, second)
    found, cases, count = differences(first, second, only)
    if cases == 0:
        raise RecordError(f"neither record has a case that begins with '{only}'")
    lines, unused = [], []
    for pattern, reason in patterns:
        these = [key for key in found if fnmatch.fnmatchcase(key, pattern)]
        if not these:
            unused.append(f"intended, but there is no such difference: {pattern} -- {reason}")
        else:
            lines.append(f"intended ({reason}): {len(these)} values, such as {these[0]}: {found[these[0]]}")
        for key in these:
            del found[key]
    lines += unused + [f"{key}: {text}" for key, text in found.items()]
    differing = len({key.partition(": ")[0] for key in found})
    lines.append(f"{cases} cases, {count} values compared: {len(found)} differences in {differing} cases")
    return lines, not found and not unused
