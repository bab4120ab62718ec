"""A grammar for the answers of models that reason first: the reasoning is free, and the answer proper is what was asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cbengine.text.reasoning import REASONING
from cbengine.text.structured_spec import StructuredSpec

_ANYTHING = r"/(.|\n)*/"
_BLANK = r"BLANK: /[ \t\r\n]{1,8}/"


def with_reasoning(answer: str, spec: StructuredSpec, special_tokens: Mapping[str, int]) -> str:
    """The grammar `answer`, with reasoning marked as `spec.reasoning` says before it; in llguidance's language, as it is.

    The answer may do without reasoning, unless the prompt has opened it. It is one grammar, rather than none until the
    reasoning has ended: so it does not matter how the marks are cut into tokens, nor that the token which ends the
    reasoning has the beginning of the answer in it. Marks that are special tokens are those tokens; their names written
    out are not.

    Raises:
        ValueError: `answer` is no grammar.
    """
    assert spec.reasoning is not None
    opening, closing = REASONING[spec.reasoning]
    grammars = _grammars(answer)
    name = grammars[0].get("name") or "answer"
    thought = f"thought[suffix={json.dumps(closing)}]: {_ANYTHING}"
    if closing in special_tokens:
        thought = f"thought: {_ANYTHING} <[{special_tokens[closing]}]>"
    if spec.reasoning_opened:
        start = f"start: thought BLANK? @{name}"
    else:
        mark = f"<[{special_tokens[opening]}]>" if opening in special_tokens else json.dumps(opening)
        start = f"start: (BLANK? {mark} thought BLANK?)? @{name}"
    outer = {"lark_grammar": f"{start}\n{thought}\n{_BLANK}\n"}
    return json.dumps({"grammars": [outer, {**grammars[0], "name": name}, *grammars[1:]]})


def _grammars(source: str) -> list[dict[str, Any]]:
    """The parts of a grammar: what is not a list of them is one, in Lark."""
    if not source.lstrip().startswith("{"):
        return [{"lark_grammar": source}]
    parsed = json.loads(source)
    grammars = parsed.get("grammars") if isinstance(parsed, dict) else None
    if not isinstance(grammars, list) or not grammars or not all(isinstance(part, dict) for part in grammars):
        raise ValueError("a grammar that is JSON needs a list `grammars`")
    return grammars
