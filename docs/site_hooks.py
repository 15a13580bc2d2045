"""What mkdocs does for this site besides: links to files outside docs/ lead to copies of them under repository/."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to."""
    pages = (ROOT / "docs").glob("*.md")
    for target in sorted({target for page in pages for target in OUTSIDE.findall(page.read_text("utf-8"))}):
        files.append(File.generated(config, f"repository/{target}", abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead the links there; a copy's own links stay as they are."""
    return markdown if page.file.src_uri.startswith("repository/") else OUTSIDE.sub(r"](repository/\1", markdown)
