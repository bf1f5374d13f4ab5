"""A report as one HTML file that opens anywhere: drawings and the data itself are inside it.

1. a template has a form for each kind of piece; the document says which come, in which order
2. drawings are SVG, made here; a short script shows what is under the pointer and saves the plan
3. a content security policy forbids every load from elsewhere, so that the page cannot depend on a network

Rejected: figures that a library draws in the browser. It would be nine tenths of the file.
"""

import json
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from antiphon import __version__
from antiphon.report.document import ReportDocument


def html(document: ReportDocument) -> str:
    """The whole file's text."""
    return render("page.html.jinja", document=document, data=inside_script(document.data))


def render(template: str, **contents: Any) -> str:
    """A template of this package."""
    folder = files("antiphon.report")
    loader = FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8"))
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["kind"] = lambda piece: type(piece).__name__
    return environment.get_template(template).render(**contents, version=__version__)


def inside_script(value: object) -> str:
    """JSON that no HTML parser can take for the end of its element."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("</", "<\\/").replace("<!--", "<\\!--")
