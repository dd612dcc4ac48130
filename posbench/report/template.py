"""From a template of this package to HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import jinja2
from jinja2.runtime import Context
from markupsafe import Markup

from posbench import paths

INTERVAL = re.compile(r"\[-?[\d.]+(e[+-]\d+)?, -?[\d.]+(e[+-]\d+)?\]")
LONG_WORD = re.compile(r"\S{20,}")
"""A word that may be broken after its signs."""
FOLDER = paths.PACKAGE / "report"


def render_html(
    template: str, links: Mapping[str, str] | None = None, **values: Any
) -> str:
    """Return the HTML of a template of this package, in which texts are escaped.

    Args:
        template: File name of the template.
        links: Address by name; where a text has such a name, the filters ``breakable`` and ``linked`` make it a link.
        values: Its variables.
    """
    return _environment().get_template(template).render(links=links, **values)


@cache
def _environment() -> jinja2.Environment:
    """The templates; compiling one takes longer than drawing a page with it."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    @jinja2.pass_context
    def breakable_here(context: Context, text: str) -> str:
        return breakable(text, context["links"])

    @jinja2.pass_context
    def linked_here(context: Context, text: str) -> Markup:
        return linked(text, context["links"])

    environment.filters["breakable"] = breakable_here
    environment.filters["linked"] = linked_here
    environment.globals["asset"] = read_asset
    return environment


def read_asset(name: str) -> Markup:
    """The text of a script or a style of this package, to stand in a page as it is."""
    return Markup((FOLDER / name).read_text(encoding="utf-8"))


def breakable(text: str, links: Mapping[str, str] | None = None) -> str:
    """HTML of a text with line breaks allowed in long names, but not in intervals.

    Args:
        text: The text.
        links: Address by name; names in the text become links.
    """
    return "".join(
        part if is_tag else _breakable(part) for is_tag, part in _split(text, links)
    )


def linked(text: str, links: Mapping[str, str] | None = None) -> Markup:
    """HTML of a text that is shown verbatim, in which names are links.

    Args:
        text: The text.
        links: Address by name.
    """
    return Markup(
        "".join(
            part if is_tag else html.escape(part)
            for is_tag, part in _split(text, links)
        )
    )


def _split(text: str, links: Mapping[str, str] | None) -> list[tuple[bool, str]]:
    """Split a text at the names that are links; each part with whether it is a tag around a name."""
    if not links:
        return [(False, text)]
    # A name may begin another one: the longest comes first.
    names = "|".join(re.escape(name) for name in sorted(links, key=len, reverse=True))
    parts: list[tuple[bool, str]] = []
    for part in re.split(rf"(?<!\w)({names})(?!\w)", text):
        if part in links:
            address = html.escape(links[part])
            parts += [(True, f'<a href="{address}">'), (False, part), (True, "</a>")]
        else:
            parts.append((False, part))
    return parts


def _breakable(text: str) -> str:
    escaped = html.escape(text)
    unbroken = INTERVAL.sub(r'<span class="whole">\g<0></span>', escaped)
    return LONG_WORD.sub(_break_after_signs, unbroken)


def _break_after_signs(word: re.Match[str]) -> str:
    return re.sub(r"([/=,]|__)(?=\w)", r"\1<wbr>", word[0])
