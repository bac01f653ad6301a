"""The documentation site: ``make docs`` builds it into out/docs, without a network."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jattn

project = "jattn"
author = "the authors of jattn"
release = version = jattn.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["README.md"]
suppress_warnings = ["myst.xref_missing"]  # links to files of the repository outside this folder

myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = "jattn"
html_static_path: list[str] = []
html_show_copyright = False
pygments_style = "friendly"
