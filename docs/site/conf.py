"""Configures Sphinx, which makes the site of these pages: `make site`.

The pages are Markdown that reads as well where there is no site; their links lead to files of the repository.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

project = "memwall"
author = "The memwall authors"
copyright = author
release = re.findall(r'__version__ = "([^"]+)"', (ROOT / "memwall" / "__init__.py").read_text())[0]
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "docs/site/index"
include_patterns = [
    "docs/*.md",
    "docs/site/*.md",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "phantom/README.md",
    "triton_kernels/README.md",
    "recipes/**/README.md",
]
myst_heading_anchors = 4
highlight_language = "none"  # of blocks that name none: commands and what they print
html_theme = "furo"
html_title = "memwall"
html_show_copyright = False
