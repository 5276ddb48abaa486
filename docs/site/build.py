"""Builds the documentation as a site: `make site`. With --llms, only prints docs/llms.txt (llmstxt.org).

The sources stay as GitHub shows them: docs/*.md, and a few pages beside README.md, with links relative to the file. Here
they are copied into one folder, as Zensical needs them, and a link to a file of the code leads to a page with its text.
Zensical then fails on every link and anchor that leads nowhere.

Why Zensical (MIT) and not mkdocs-material (MIT): both are by the same authors, who end the latter in May 2027, and MkDocs,
which it needs, has a successor without its plugins. Zensical is young, so its version is pinned. It reads plain Markdown
and the settings of mkdocs-material, so it is easy to go back."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Beside docs/*.md, these pages of the repository's root. README.md is for GitHub; the site begins with docs/README.md.
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
_NAMED = re.compile(r"\[([^]]*)\]\([^)]*\)")  # a link
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".json": "json", ".sql": "sql"}


def pages() -> dict[Path, str]:
    """The files that are pages of the site, with their names there."""
    found = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in OUTSIDE)]
    return {path: path.name for path in found}


def listed(nav: list[Any] | None = None) -> list[str]:
    """The names of all pages in the navigation, in its order."""
    if nav is None:
        nav = tomllib.loads((HERE / "zensical.toml").read_text())["project"]["nav"]
    found: list[str] = []
    for entry in nav:
        for page in entry.values():  # one title each
            found += [page] if isinstance(page, str) else listed(page)
    return found


def write_llms() -> str:
    """A list of all pages for programs that read: the title of each from the navigation, and its first sentence."""
    project = tomllib.loads((HERE / "zensical.toml").read_text())["project"]
    places = {name: path for path, name in pages().items()}
    lines = [f"# {project['site_name']}", "", f"> {project['site_description']}"]
    for part in project["nav"]:
        for title, listing in part.items():
            lines += ["", f"## {title}", ""]
            names = [listing] if isinstance(listing, str) else listed(listing)
            for name in names:
                text = places[name].read_text()
                heading = text.partition("\n")[0].removeprefix("# ")
                link = os.path.relpath(places[name], ROOT / "docs")
                lines.append(f"- [{heading}]({link}): {_first_sentence(text)}")
    return "\n".join(lines) + "\n"


def _first_sentence(text: str) -> str:
    """Of the first paragraph that begins as a sentence does."""
    prose = next(each for each in text.split("\n\n") if re.match("[A-Zv`]", each))
    sentence = re.split(r"(?<=[.])\s", _NAMED.sub(r"\1", " ".join(prose.split())))[0]
    return sentence.rstrip(".:") + "."


def lay_out(target: Path) -> None:
    """Write all pages, and what they show or link, into the folder."""
    known = pages()
    for path, name in known.items():
        parts = _LINK.split(path.read_text())  # text, link, text, link, …
        parts[1::2] = [f"]({_lead(path, link, known, target)})" for link in parts[1::2]]
        (target / name).write_text("".join(parts))
    for asset in ("site.css", "iframe-worker.js", "iframe-worker.LICENSE"):
        shutil.copy(HERE / asset, target)


def _lead(page: Path, link: str, known: dict[Path, str], target: Path) -> str:
    """Where a link of this page leads on the site. Copies or makes what it leads to."""
    name, _, anchor = link.partition("#")
    if "://" in link or not name:
        return link
    path = Path(os.path.normpath(page.parent / name))
    if not path.exists() or not path.is_relative_to(ROOT):
        return link  # Zensical names it
    if path == ROOT / "README.md":
        path = ROOT / "docs" / "README.md"
    if path in known:
        return known[path] + (f"#{anchor}" if anchor else "")
    if path.is_file() and path.parent == ROOT / "docs":
        shutil.copy(path, target)
        return path.name
    return _show_source(path, target)


def _show_source(path: Path, target: Path) -> str:
    """A page with the text of a file of the code, or with the names in a folder. It is not searched."""
    name = path.relative_to(ROOT).as_posix()
    page = target / "source" / f"{name}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        text = "\n".join(
            sorted(entry.name for entry in path.iterdir() if not entry.name.startswith(("_", ".")))
        )
    else:
        text = path.read_text()
    fence = f"```` {_LANGUAGES.get(path.suffix, 'text')}"
    page.write_text(f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n{fence}\n{text}\n````\n")
    return page.relative_to(target).as_posix()


def build(folder: Path) -> Path:
    """The site's folder, made anew in this one. Raises CalledProcessError after Zensical has printed what is wrong."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "source").mkdir(parents=True)
    lay_out(folder / "source")
    run_zensical(folder)
    return folder / "html"


def run_zensical(folder: Path) -> None:
    """Build what lies in folder/source. A warning is an error."""
    shutil.copy(HERE / "zensical.toml", folder)
    zensical = Path(sys.executable).with_name("zensical")
    subprocess.run([zensical, "build", "--strict"], cwd=folder, check=True)


if __name__ == "__main__":
    if sys.argv[1] == "--llms":
        print(write_llms(), end="")
    else:
        print(build(Path(sys.argv[1]).resolve()) / "index.html")
