"""SVG as matplotlib writes it, made part of a page whose content policy is strict."""

from __future__ import annotations

import re
from collections.abc import Mapping
from xml.etree import ElementTree

from equipoise.report.markup import clean

__all__ = ["embed_svg"]

LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")
REFERENCE = re.compile(r"#([mp][0-9a-f]{10})\b")  # to a marker or a clip path


def embed_svg(source: str, prefix: str, words: str, paint: Mapping[str, str]) -> str:
    """Return an SVG with attributes in place of styles, the page's colours and no metadata.

    Args:
        source: The SVG.
        prefix: What its ids begin with, so that no two charts of a page share one.
        words: The chart in words, for those who do not see it.
        paint: The page's colour for each colour of the SVG.
    """
    root = ElementTree.fromstring(source)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):
                parent.remove(child)
    names: dict[str, str] = {}

    def rename(name: str) -> str:
        return names.setdefault(name, f"{prefix}-{len(names)}")

    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        attributes = _read_attributes(element)
        element.attrib.clear()
        for key, value in attributes.items():
            if key == "id":
                element.set(key, rename(value))
                continue
            value = paint.get(value, "currentColor" if value == "#000000" else value)
            value = REFERENCE.sub(lambda found: "#" + rename(found[1]), value)
            element.set(key, _shorten(value))
        if element.text and not element.text.strip():
            element.text = None
        element.tail = None
    root.attrib = {
        "class": "chart",
        "viewBox": root.attrib["viewBox"],
        "role": "img",
        "aria-label": clean(words),
    }
    return ElementTree.tostring(root, encoding="unicode")


def _read_attributes(element: ElementTree.Element) -> dict[str, str]:
    """Return the attributes of an element and the entries of its style."""
    attributes = {
        "href" if key.endswith("}href") else key: value for key, value in element.attrib.items()
    }
    entries = attributes.pop("style", "").split("; ")
    style = dict(entry.split(": ", 1) for entry in entries if entry)
    if element.tag == "g":
        attributes.pop("id", None)
    if element.tag == "text":  # its font is the page's
        style = {key: value for key, value in style.items() if not key.startswith("font")}
        attributes.pop("transform", None)
    return {**attributes, **style}


def _shorten(value: str) -> str:
    """Return a value with numbers of at most two decimals, and single spaces."""
    return LONG_NUMBER.sub(
        lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), " ".join(value.split())
    )
