"""The page's programs and styles: as they are written, or joined, so that a browser asks for few files."""

from __future__ import annotations

import re
from pathlib import Path

KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css", "LICENSE": "text/plain"}
MODULE_IMPORT = re.compile(r'^import (\{[^;]*?\}) from "\./(\w+\.js)";\n', re.MULTILINE)
MODULE_EXPORT = re.compile(r"^export (?:async function|function|class|const) (\w+)", re.MULTILINE)


def static_files() -> dict[str, bytes]:
    """Return the content of the page's files by their paths; nothing else of the machine is ever sent as a file."""
    root = Path(__file__).with_name("static")
    files = (path for path in root.rglob("*") if path.is_file() and path.name.rpartition(".")[2] in KINDS)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def served_files() -> dict[str, bytes]:
    """Return the files that a browser gets; all modules are one, because a request for each would take long."""
    files = static_files()
    modules = {path: content.decode() for path, content in files.items() if path.endswith(".js") and "/" not in path}
    others = {path: content for path, content in files.items() if path not in modules}
    return others | {"app.js": join_modules(modules, "app.js").encode()}


def join_modules(files: dict[str, str], first: str) -> str:
    """Return a module and all that it imports as one: each a function that returns its exports, after what it needs."""
    joined: dict[str, str] = {}

    def add(name: str) -> None:
        for _, needed in MODULE_IMPORT.findall(files[name]):
            if needed not in joined:
                add(needed)
        body = MODULE_IMPORT.sub(lambda match: f"const {match[1]} = {_module(match[2])};\n", files[name])
        names = ", ".join(MODULE_EXPORT.findall(body))
        body = re.sub(r"^export ", "", body, flags=re.MULTILINE)
        is_first = name == first
        joined[name] = body if is_first else f"const {_module(name)} = (() => {{\n{body}\nreturn {{ {names} }};\n}})();"

    add(first)
    return "\n".join(joined.values())


def _module(name: str) -> str:
    return f"module_{name.removesuffix('.js')}"
