"""What a structured answer must be like: a value, checked when it is made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cbengine.errors import InvalidRequestError
from cbengine.text.reasoning import REASONING

AUTO = "auto"
_KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")
_ALLOWED = (
    "give exactly one of json_schema (a dict, its JSON text or a pydantic model class), json_object=True, regex (a"
    " regular expression for the whole answer), choice (a list of strings) and grammar (a Lark grammar with a rule `start`)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredSpec:
    """What the text of an answer must be like. Exactly one of the first five fields is given.

    Equal specs are compiled once. Whichever it is, the answer ends where nothing can follow any more.

    Raises:
        InvalidRequestError: none or several are given, or one that is has the wrong type.
    """

    json_schema: Mapping[str, Any] | str | type | None = None
    """JSON that is valid under this schema, properties in the schema's order: a dict, its JSON text, or a pydantic model
    class. Kept as JSON text. Keywords that cannot be enforced are an error when it is compiled. Between its parts the
    answer may have one blank, or a line break and an indentation; `"x-guidance"` in the schema sets it otherwise."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression (Rust's syntax, no look-around) that the whole answer matches."""
    choice: Sequence[str] | None = None
    """The answer is one of these strings. Kept as a tuple."""
    grammar: str | None = None
    """A grammar in llguidance's dialect of Lark, with a rule `start`. `<|name|>` is a special token."""
    reasoning: str | None = AUTO
    """How reasoning is marked ("think", "mistral") that the model may write first: it is free, and what comes after it must
    be like this. None: everything must, whatever the model is. "auto": as `chat` is told, or finds out, by its own argument
    `reasoning`; elsewhere None."""
    reasoning_opened: bool = False
    """The prompt ends with the mark before the reasoning, so that the answer begins within it. `chat` fills it in."""

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise InvalidRequestError(f"json_object must be True or False, got {self.json_object!r}")
        if self.reasoning not in (None, AUTO, *REASONING):
            allowed = ", ".join(REASONING)
            raise InvalidRequestError(f"reasoning must be one of {allowed}, 'auto' or None, got {self.reasoning!r}")
        if not isinstance(self.reasoning_opened, bool) or (self.reasoning_opened and self.reasoning not in REASONING):
            raise InvalidRequestError(
                f"reasoning_opened must be True or False, and needs reasoning if True, got {self.reasoning_opened!r}"
            )
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidRequestError(f"structured output has {' and '.join(given) or 'nothing'}: {_ALLOWED}")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise InvalidRequestError(f"{name} must be a str that is not empty, got {value!r:.80}: {_ALLOWED}")

    @property
    def leaves_reasoning(self) -> bool:
        """Whether a format of reasoning is given."""
        return self.reasoning in REASONING

    @property
    def kind(self) -> str:
        """Name of the field that is given."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))


def _schema_text(schema: object) -> str:
    """The schema as JSON text, its properties in their order. Raises `InvalidRequestError`."""
    if isinstance(schema, type):
        make = getattr(schema, "model_json_schema", None)
        if make is None:
            raise InvalidRequestError(f"json_schema is the class {schema.__name__}, no pydantic model: {_ALLOWED}")
        try:
            schema = make()
        except Exception as error:  # a type that has no JSON schema, or whatever the model's author made of it
            raise InvalidRequestError(f"json_schema: {schema.__name__} has no JSON schema: {error}") from error
    elif isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise InvalidRequestError(f"json_schema is a str but no JSON ({error}): {_ALLOWED}") from error
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(f"json_schema must be a JSON object, not {type(schema).__name__}: {_ALLOWED}")
    try:
        return json.dumps(dict(schema), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"json_schema cannot be written as JSON: {error}") from error


def _choices(choice: object) -> tuple[str, ...]:
    if isinstance(choice, str) or not isinstance(choice, Sequence) or not choice:
        raise InvalidRequestError(f"choice must be a list of strings with at least one, got {choice!r:.80}")
    if not all(isinstance(item, str) and item for item in choice):
        raise InvalidRequestError(f"every one of choice must be a str that is not empty, got {list(choice)!r:.80}")
    return tuple(dict.fromkeys(choice))
