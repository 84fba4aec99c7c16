"""Sphinx: `scripts/docs.sh` builds these pages into build/docs, with warnings as errors."""

from typing import Any

from loco_fsdp import __version__

project = "loco-fsdp"
author = "the loco-fsdp authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = project

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

# Docstrings write code in single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
# What a docstring describes under "Attributes" is not described again.
napoleon_use_ivar = True


# Of an attribute's docstring "bits: 8 or 4" napoleon would make a type and a description.
_attributes: dict[str, list[str]] = {}


def keep(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    if what in ("attribute", "property"):
        _attributes[name] = list(lines)


def put_back(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = _attributes.pop(name, lines)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", keep, priority=400)  # napoleon's is 500
    app.connect("autodoc-process-docstring", put_back, priority=600)
