"""The demo model's corpus: the English that a CPython install carries, cut into chats.

Sources, all distributed with CPython under the PSF licence version 2 (some standard library
modules add notices of their own; texts that mention a licence or a copyright are left out): the
language topics of `pydoc_data.topics`, the docstrings of the standard library's Python files and of
the built-in types, and those files' longer block comments. Only the questions around the answers,
and a greeting, are written here.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import math
import random
import re
import sys
import sysconfig
import textwrap
import unicodedata
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

SKIPPED_FOLDERS = {
    "site-packages",
    "test",
    "tests",
    "idlelib",
    "idle_test",
    "lib2to3",
    "turtledemo",
    "encodings",
}
CHUNK_CHARS = 600  # an answer is cut after the paragraph that passes this length
COMMON_WORDS = re.compile(
    r"\b(the|a|an|is|are|of|to|in|and|or|for|if|this|that|with|be|as|by|not|it|return)\b", re.I
)
CODE_OR_TABLE = re.compile(
    r">>>|::=|\+--|====|----|\*\*\*\*|~~~~|[{};\\]|\$|copyright|licen[cs]e|\w\(\w* ?=", re.I
)

QUESTIONS = {
    "topic": (
        "Tell me about {}.",
        "What are the rules for {}?",
        "Explain {} in Python.",
        "How do {} work?",
    ),
    "module": (
        "What is the {} module?",
        "What is {} for?",
        "Tell me about the {} module.",
        "Explain {}.",
    ),
    "class": ("What is {}?", "What is {} for?", "Describe the class {}.", "Explain {}."),
    "function": ("What does {} do?", "Explain {}.", "How does {} work?", "Tell me about {}."),
}
GO_ON = ("Go on.", "Tell me more.", "Please continue.", "What else?", "And then?")
SYSTEMS = ("You are a helpful assistant.", "You are an expert on Python.", "Answer briefly.")
GREETINGS = (
    "Hello!",
    "Hi",
    "Hi there!",
    "Good morning.",
    "Who are you?",
    "What are you?",
    "What can you do?",
    "Help",
)
GREETING_ANSWER = (
    "Hello! I am a small demo model that has read the documentation of Python and nothing else. "
    "Ask me what a function does, or about a part of the language. My answers are often wrong."
)

END, PAD = 256, 257  # token ids: 0 to 255 are the bytes
ROLE_ID = {"user": 258, "assistant": 259, "system": 260}
# Window length -> share of the steps. Short ones train faster, the longest teach position.
WINDOWS = {256: 0.60, 512: 0.20, 1024: 0.15, 2048: 0.05}

Message = dict[str, str]


@dataclass(frozen=True)
class Document:
    """One text to train on: a chat if `messages` has any, else plain prose."""

    name: str
    messages: tuple[Message, ...]
    prose: str = ""

    @property
    def held_out(self) -> bool:
        """One source in 40 is kept for measuring; all parts of one source share a side."""
        return zlib.crc32(self.name.encode()) % 40 == 7


def to_ascii(text: str) -> str:
    plain = {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2013: "-", 0x2014: "-"}
    text = text.translate(plain)
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def is_prose(paragraph: str) -> bool:
    words = re.findall(r"[A-Za-z']+", paragraph)
    letters = sum(c.isalpha() or c in " ,.'" for c in paragraph)
    return (
        len(words) >= 4
        and letters >= 0.88 * len(paragraph)
        and len(COMMON_WORDS.findall(paragraph)) >= max(1, len(words) // 12)
        and not CODE_OR_TABLE.search(paragraph)
    )


def paragraphs(text: str) -> list[str]:
    """The prose paragraphs of a docstring, one line each, without markup."""
    found = []
    plain = textwrap.dedent(to_ascii(text).expandtabs())
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )", plain):
        line = re.sub(r"\s+", " ", re.sub(r"^\s*(?:[*-]|\d+\.) ", "", block)).strip()
        line = re.sub(r":\w+:`~?\.?([^`<]*)[^`]*`", r"\1", line)  # :func:`name` -> name
        line = re.sub(r"\*\*?(\w[^*]*)\*\*?|`+([^`]+?)`+'?", lambda m: m[1] or m[2], line)
        line = line.removesuffix("::") + ":" if line.endswith("::") else line
        if is_prose(line):
            found.append(line)
    return found


def chunks(lines: Iterable[str]) -> Iterator[str]:
    """Paragraphs joined into answers of some CHUNK_CHARS characters."""
    held: list[str] = []
    for line in lines:
        held.append(line)
        if sum(map(len, held)) >= CHUNK_CHARS:
            yield "\n".join(held)
            held = []
    if held:
        yield "\n".join(held)


def library_files() -> Iterator[tuple[str, str]]:
    """(module name, source) of the standard library's Python files, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED_FOLDERS.isdisjoint(parts[:-1]) and not parts[0].startswith("config-"):
            name = ".".join(p for p in parts if p != "__init__")
            yield name, path.read_text(encoding="utf-8", errors="replace")


def docstrings(module: str, source: str) -> Iterator[tuple[str, str, str]]:
    """(kind, dotted name, docstring) of a module and of every class and function in it."""

    def visit(node: ast.AST, name: str) -> Iterator[tuple[str, str, str]]:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            kind = {"Module": "module", "ClassDef": "class"}.get(type(node).__name__, "function")
            if text := ast.get_docstring(node):
                yield kind, name, text
            for child in ast.iter_child_nodes(node):
                yield from visit(child, f"{name}.{getattr(child, 'name', '')}")

    yield from visit(ast.parse(source), module)


def builtin_docstrings() -> Iterator[tuple[str, str, str]]:
    for module in (builtins, math, itertools, sys):
        prefix = "" if module is builtins else module.__name__ + "."
        for name, value in sorted(vars(module).items()):
            if callable(value) and isinstance(value.__doc__, str):
                kind = "class" if isinstance(value, type) else "function"
                yield kind, prefix + name, value.__doc__
            if isinstance(value, type) and not issubclass(value, BaseException):
                for method, function in sorted(vars(value).items()):
                    text = getattr(function, "__doc__", None)
                    if isinstance(text, str) and method != "__doc__":
                        yield "function", f"{prefix}{name}.{method}", text


def comments(source: str) -> Iterator[str]:
    """Block comments of three lines or more, without their marks."""
    for block in re.findall(r"(?:^[ \t]*#[^\n]*\n){3,}", source, re.M):
        yield re.sub(r"^[ \t]*#+ ?", "", block, flags=re.M)


def chat(kind: str, name: str, answers: Iterable[str], rng: random.Random) -> Iterator[Document]:
    """Question and answers, two to a chat; a later chat goes on where the one before stopped."""
    pieces = list(answers)
    for at in range(0, len(pieces), 2):
        question = rng.choice(QUESTIONS[kind]).format(name)
        asked = f"Tell me more about {name}." if at else question
        messages = [{"role": "user", "content": asked}]
        if rng.random() < 0.15:
            messages.insert(0, {"role": "system", "content": rng.choice(SYSTEMS)})
        for turn, piece in enumerate(pieces[at : at + 2]):
            if turn:
                messages.append({"role": "user", "content": rng.choice(GO_ON)})
            messages.append({"role": "assistant", "content": piece})
        yield Document(name, tuple(messages))


def gather(seed: int = 0) -> list[Document]:
    """Every document of the corpus; depends on the Python release and the seed only."""
    rng = random.Random(seed)
    seen: set[str] = set()

    def fresh(text: str) -> list[str]:
        new = [line for line in paragraphs(text) if line.lower() not in seen]
        seen.update(line.lower() for line in new)
        return new

    documents: list[Document] = []
    for label, text in sorted(topics.items()):
        title = text.split("\n", 1)[0].replace('"', "").strip()
        name = title.lower() if re.fullmatch(r"[A-Za-z ]{4,50}", title) else label.replace("-", " ")
        documents += chat("topic", name, chunks(fresh(text)), rng)
    sources = list(library_files())
    found = itertools.chain(builtin_docstrings(), *itertools.starmap(docstrings, sources))
    for kind, name, text in found:
        documents += chat(kind, name.removesuffix(".__init__"), chunks(fresh(text)), rng)
    for module, source in sources:
        for prose in chunks(line for block in comments(source) for line in fresh(block)):
            documents.append(Document(module, (), prose))
    answer = {"role": "assistant", "content": GREETING_ANSWER}
    for greeting in GREETINGS * 12:
        documents.append(Document("greeting", ({"role": "user", "content": greeting}, answer)))
    rng.shuffle(documents)
    return documents


def encode(document: Document) -> list[int]:
    """The token ids of a document: of a chat, what the tokenizer's chat template gives."""
    ids = list(document.prose.encode("ascii"))
    for message in document.messages:
        ids += [ROLE_ID[message["role"]], *b"\n", *message["content"].encode("ascii")]
        ids += [END] if message["role"] == "assistant" else [*b"\n"]
    return ids if document.messages else [*ids, END]


def windows(
    documents: Sequence[list[int]], batch_tokens: int, seed: int
) -> Iterator[list[list[int]]]:
    """Batches of packed windows of one length, for ever: each epoch has its own order and cuts."""
    if sum(map(len, documents)) < max(batch_tokens, *WINDOWS):
        raise ValueError("the corpus is smaller than one batch")
    rng = random.Random(seed)
    while True:
        order = rng.sample(documents, len(documents))
        starts = [0, *itertools.accumulate(map(len, order))]
        flat = list(itertools.chain.from_iterable(order))
        at = 0
        while True:
            length = rng.choices(list(WINDOWS), list(WINDOWS.values()))[0]
            rows = []
            for _ in range(max(1, batch_tokens // length)):
                if rng.random() < 0.5:  # half of the windows begin where a document begins
                    at = starts[bisect_right(starts, at) - 1]
                rows.append(flat[at : at + length])
                at += length
            if at > len(flat):
                break
            yield rows
