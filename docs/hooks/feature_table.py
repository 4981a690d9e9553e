"""Writes the table of features into the docs, so that it is always the one the code computes."""

from __future__ import annotations

from typing import Any

from specdepth.scheduler.features import FEATURES

MARK = "<!-- features -->"


def table() -> str:
    """Return the features as a Markdown table, one row each, in the order of their columns."""
    lines = ["| # | name | unit | range | meaning |", "|--:|---|---|---|---|"]
    for column, feature in enumerate(FEATURES):
        span = f"{feature.low:g} to {feature.high:g}"
        meaning = feature.meaning.replace("|", r"\|")
        lines.append(f"| {column} | `{feature.name}` | {feature.unit} | {span} | {meaning} |")
    return "\n".join(lines)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with the text of each page; replaces the mark where there is one."""
    return markdown.replace(MARK, table())
