"""The page's ES modules joined into one script.

Each module becomes a function that returns its exports, in an order in which those that it imports
come before it. Only the forms that the page's own modules use are understood; others are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

_IMPORT = re.compile(r'^import \{([^{}]*)\} from "\./([\w.]+)";\n', re.M)
_EXPORT = re.compile(r"^export (?=(?:async function|function|class|const) (\w+))", re.M)
#: Other ways to import or export, and what would end the script in HTML.
_OTHER = re.compile(r"^\s*(?:import|export)\b.*|\bimport(?:\.|\s*\().*|.*</script.*|.*<!--.*", re.M)
_NAMES = re.compile(r"^\w+(?: as \w+)?$")


def joined(entry: str, folders: tuple[Path, ...], read: Callable[[Path], str]) -> str:
    """Return a module and all that it imports as one script.

    Args:
        entry: name of the module.
        folders: where modules are looked for, in this order.
        read: returns the text of a file.

    Raises:
        ValueError: if a module is missing, imports in a circle, or holds a form that is not known.
    """
    parts: dict[str, str] = {}
    _add(entry, parts, folders, read, ())
    return '"use strict";\n' + "".join(parts.values())


def _add(
    name: str,
    parts: dict[str, str],
    folders: tuple[Path, ...],
    read: Callable[[Path], str],
    within: tuple[str, ...],
) -> None:
    if name in parts:
        return
    if name in within:
        raise ValueError(f"modules import in a circle: {' -> '.join((*within, name))}")
    path = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if path is None:
        raise ValueError(f"{name}, which {within[-1] if within else 'nothing'} imports, is missing")
    text = read(path)
    imports = {module: names for names, module in _IMPORT.findall(text)}
    for module in imports:
        _add(module, parts, folders, read, (*within, name))
    parts[name] = _part(name, text, imports, parts)


def _part(name: str, text: str, imports: Mapping[str, str], known: Mapping[str, str]) -> str:
    """Return a module as a function; `known` has those before it."""
    body = _EXPORT.sub("", _IMPORT.sub("", text))
    if other := _OTHER.search(body):
        raise ValueError(f"{name}: not understood: {other[0].strip()}")
    order = [*known]
    taken = "".join(
        f"const {{ {_renamed(name, names)} }} = $m{order.index(module)};\n"
        for module, names in imports.items()
    )
    exports = ", ".join(_EXPORT.findall(text))
    return f"const $m{len(known)} = (() => {{\n{taken}{body}\nreturn {{ {exports} }};\n}})();\n"


def _renamed(name: str, names: str) -> str:
    """Return the names of an import as those of a pattern."""
    some = [one.strip() for one in names.split(",") if one.strip()]
    if wrong := [one for one in some if not _NAMES.match(one)]:
        raise ValueError(f"{name}: not understood: import of {wrong[0]}")
    return ", ".join(one.replace(" as ", ": ") for one in some)
