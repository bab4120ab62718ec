"""Tool calls and reasoning told apart from the text of a chat's answer, on a real model that a grammar makes say them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cbengine import (
    AsyncEngine,
    InvalidRequestError,
    ReasoningPart,
    StreamError,
    StructuredSpec,
    TextPart,
    ToolCallPart,
)

MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
]
CALL = r'Let me see\. <tool_call>\n\{"name": "weather", "arguments": \{"city": "[A-Z][a-z]{2,8}"\}\}\n</tool_call>'


@pytest.mark.timeout(200)
def test_parts(smollm2: Path) -> None:
    async def main() -> None:
        async with AsyncEngine(str(smollm2), page_size=16, num_blocks=128) as engine:
            call = StructuredSpec(regex=CALL)
            stream = engine.chat(
                MESSAGES, tools=TOOLS, tool_format="hermes", structured=call, temperature=0, max_new_tokens=80
            )
            parts = [part async for part in stream.parts()]
            assert "".join(p.text for p in parts if isinstance(p, TextPart)).strip() == "Let me see."
            calls = [p for p in parts if isinstance(p, ToolCallPart)]
            assert calls[0].name == "weather" and calls[0].id and calls[0].arguments_delta == ""
            arguments = json.loads("".join(p.arguments_delta for p in calls[1:]))
            assert list(arguments) == ["city"]

            answer = await stream.result()
            (tool_call,) = answer.tool_calls
            assert tool_call.name == "weather" and json.loads(tool_call.arguments) == arguments
            assert answer.content.strip() == "Let me see." and "<tool_call>" in answer.text
            assert engine.chat(MESSAGES, max_new_tokens=1).token_ids == ()

            thought = StructuredSpec(regex="<think>[a-z]{3,9}</think>Yes\\.", reasoning=None)
            stream = engine.chat(MESSAGES, reasoning="think", structured=thought, temperature=0, max_new_tokens=40)
            parts = [part async for part in stream.parts()]
            assert {type(part) for part in parts} == {ReasoningPart, TextPart}
            answer = await stream.result()
            assert answer.content == "Yes." and 3 <= len(answer.reasoning) <= 9

            # Nothing of the kind: all is text, piece by piece.
            plain = engine.stream("The sea", temperature=0, max_new_tokens=8)
            parts = [part async for part in plain.parts()]
            assert "".join(p.text for p in parts if isinstance(p, TextPart)) == plain.text_so_far
            assert (await plain.result()).content == plain.text_so_far

            with pytest.raises(InvalidRequestError, match="hermes"):
                engine.chat(MESSAGES, tools=TOOLS, tool_format="mine")
            with pytest.raises(StreamError, match="mixed"):
                engine.chat(MESSAGES, n=2, max_new_tokens=1).parts()

    asyncio.run(main())
