"""A hook of mkdocs that makes files of the repository outside ``docs/`` pages of the site.

Links are written as a code host follows them, ``../examples/words/README.md``. The site has the README, the examples'
READMEs and every file with code that a page links to, so that it needs no repository beside it, and mkdocs checks
these links as it checks others.
"""

import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = "docs/"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(?=[)#])")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".jsonl": "json"}
README, OVERVIEW = "README.md", "overview.md"
originals: dict[str, str] = {}  # address in the site: path in the repository, of pages that come from outside docs/


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README, and whatever pages link to outside ``docs/``, including links from the pages so added."""
    originals.clear()
    waiting = [DOCS + file.src_uri for file in files.documentation_pages()] + [README]
    while waiting:
        path = waiting.pop()
        address = site_address(path)
        if not path.startswith(DOCS) and address not in originals:
            originals[address] = path
            file = File.generated(config, address, content=content(path), inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(file)
        if path.endswith(".md"):
            linked = {target(path, link) for link in LINK.findall((ROOT / path).read_text())}
            waiting += [
                link
                for link in linked
                if not link.startswith(DOCS) and (ROOT / link).is_file() and site_address(link) not in originals
            ]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links within the repository into links within the site."""
    here = page.file.src_uri
    path = originals.get(here, DOCS + here)

    def rewritten(link: re.Match[str]) -> str:
        address = site_address(target(path, link[1]))
        return (
            posixpath.relpath(address, posixpath.dirname(here) or ".") if files.get_file_from_path(address) else link[1]
        )

    return LINK.sub(rewritten, markdown)


def target(path: str, link: str) -> str:
    """Return the path in the repository of what the file at ``path`` links to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def site_address(path: str) -> str:
    """Return where the site has a file of the repository, as mkdocs names sources."""
    if path == README:
        return OVERVIEW
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    return path if path.endswith(".md") else f"{path}.md"


def content(path: str) -> str:
    """Return a page with a file's text: a notebook as its cells, code in a fence."""
    text, suffix = (ROOT / path).read_text(), Path(path).suffix
    if suffix == ".ipynb":
        cells = ((cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"])
        return "\n\n".join(source if kind == "markdown" else f"```python\n{source}\n```" for kind, source in cells)
    return text if suffix == ".md" else f"# {path}\n\n~~~~{LANGUAGES.get(suffix, '')}\n{text}\n~~~~\n"
