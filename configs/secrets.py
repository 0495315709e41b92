"""Values of a config that are not written down: texts from the environment, and passwords."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, get_origin

from rlpipe.configs.options import FromEnvironment, options

VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_]\w*)")
SECRET_NAME = re.compile(r"(?:^|_)(?:key|token|secret|password|passwd|pass|pwd|pat|credentials?|auth)$", re.IGNORECASE)
"""Names of options and environment variables whose values are taken for secrets, such as ``OPENAI_API_KEY``."""


def keep_references(value: Any, written: Any) -> Any:
    """Return a resolved config, or tree of one, whose texts from the environment are ``FromEnvironment``.

    ``written`` is the same tree before its interpolations were resolved. The texts are those in dictionaries and lists
    without a schema, such as ``scoring.rewards.<name>.kwargs``; of other options, because a stored config should tell
    them, only those from variables with the name of a secret. Dataclasses are changed in place.
    """
    names = sorted(set(VARIABLE.findall(json.dumps(written, default=str))))
    values = {name: os.environ[name] for name in names if os.environ.get(name)}
    return _marked(value, written, "", values) if values else value


def _marked(value: Any, written: Any, name: str, values: Mapping[str, str]) -> Any:
    def child(key: Any, part: Any) -> Any:
        inside = written[key] if isinstance(written, dict | list) else written  # a text refers to the whole section
        return _marked(part, inside, f"{name}.{key}" if name else f"{key}", values)

    if is_dataclass(value):
        for entry in fields(value):
            setattr(value, entry.name, child(entry.name, getattr(value, entry.name)))
    elif isinstance(value, dict):
        return {key: child(key, part) for key, part in value.items()}
    elif isinstance(value, list):
        return [child(index, part) for index, part in enumerate(value)]
    elif isinstance(value, str) and isinstance(written, str) and "${" in written:
        return _with_references(value, name, values)
    return value


def _with_references(value: str, name: str, values: Mapping[str, str]) -> str:
    is_free = any(fnmatchcase(name, pattern) for pattern in _free_form())
    reference: str = value
    for variable in sorted(values, key=lambda variable: -len(values[variable])):
        if is_free or SECRET_NAME.search(variable):
            reference = reference.replace(values[variable], f"${{oc.env:{variable}}}")
    return value if reference == value else FromEnvironment(value, reference)


@cache
def _free_form() -> tuple[str, ...]:
    """Return the patterns of the names inside options that are dictionaries or lists."""
    return tuple(f"{option.pattern}.*" for option in options() if get_origin(option.hint) in (dict, list))
