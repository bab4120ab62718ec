"""Whether a JSON schema can be fulfilled by a text that ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cbengine.errors import InvalidRequestError


def check_finite(schema: Mapping[str, Any]) -> None:
    """Refuse a schema whose every instance would have to contain another one of its kind, and so would never end.

    llguidance finds all other schemas that nothing fulfils; here it would go on until the answer's last token. What is
    not understood here (`$anchor`, other keywords) counts as finite.

    Raises:
        InvalidRequestError
    """
    finite: dict[str, bool] = {}  # by reference; the least solution: all false, then true wherever that follows
    while True:
        seen = dict.fromkeys(finite, False)
        root = _is_finite(schema, schema, finite, seen)
        for reference in list(seen):
            target = _resolve(schema, reference)
            seen[reference] = target is None or _is_finite(target, schema, finite, seen)
        if root:
            return
        if seen == finite:
            raise InvalidRequestError(
                "the json_schema of structured output cannot be used: a required part of it contains itself, so no JSON"
                " that fulfils it ever ends. Make that part optional, or allow null or an empty array in its place"
            )
        finite = seen


def _is_finite(schema: object, root: Mapping[str, Any], finite: dict[str, bool], seen: dict[str, bool]) -> bool:
    """Whether some finite instance is known for `schema`, references being what `finite` says; notes them in `seen`."""
    if not isinstance(schema, Mapping) or "const" in schema or "enum" in schema:
        return True

    def known(part: object) -> bool:
        return _is_finite(part, root, finite, seen)

    reference = schema.get("$ref")
    if isinstance(reference, str):
        seen.setdefault(reference, False)
        if not finite.get(reference, False):
            return False
    for name in ("anyOf", "oneOf"):
        parts = schema.get(name)
        if isinstance(parts, list) and parts and not any(known(part) for part in parts):
            return False
    parts = schema.get("allOf")
    if isinstance(parts, list) and not all(known(part) for part in parts):
        return False
    if schema.get("type") == "object":
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, Mapping) and isinstance(required, list):
            return all(known(properties[name]) for name in required if name in properties)
    if schema.get("type") == "array" and isinstance(least := schema.get("minItems", 0), int) and least > 0:
        first = schema.get("prefixItems")
        items = list(first) if isinstance(first, list) else []
        items = items[:least] + [schema.get("items", True)] * (least > len(items))
        return all(known(item) for item in items)
    return True


def _resolve(root: Mapping[str, Any], reference: str) -> object | None:
    """The part of `root` that a JSON pointer such as `#/$defs/node` names; None if it is no such pointer or nothing."""
    if not reference.startswith("#"):
        return None
    part: object = root
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, Mapping):
            part = part.get(name)
        elif isinstance(part, list) and name.isdigit() and int(name) < len(part):
            part = part[int(name)]
        else:
            return None
    return part if reference in ("#", "#/") or reference[1:].startswith("/") else None
