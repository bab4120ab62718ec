"""What the user asked of attention, and what follows for the cache's pages and the tables of decoding steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cbengine.attention.base import AttentionBackend
    from cbengine.config import EngineConfig

DEFAULT_BLOCKS_PER_REQUEST = 32
ALIASES: Mapping[str, str] = {"flash_attention_3": "flash3", "flash_attention_2": "flash2"}
"""The names that transformers has for backends of ours; "paged|" in front of them is understood too."""


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """The part of `EngineConfig` that the choice of an attention backend depends on; see there."""

    name: str | None = None
    page_size: int | None = None
    auto_switch_to_flash: bool = True
    max_blocks_per_request: int | None = None
    max_prompt_length: int | None = None
    max_generated_length: int | None = None

    @classmethod
    def of(cls, config: EngineConfig) -> AttentionSettings:
        """From an `EngineConfig`."""
        return cls(
            config.attention_backend,
            config.page_size,
            config.auto_switch_to_flash,
            config.max_blocks_per_request,
            config.max_prompt_length,
            config.max_generated_length,
        )

    @property
    def backend(self) -> str | None:
        """`name` as one of ours."""
        if self.name is None:
            return None
        bare = self.name.removeprefix("paged|")
        return ALIASES.get(bare, bare)


def page_size_shortcoming(page_size: int | None, backend: type[AttentionBackend]) -> str | None:
    """Why pages of a chosen size do not suit `backend`, in words, or None. The default adapts, so it always does."""
    if page_size is None or page_size % backend.page_size_multiple == 0:
        return None
    return f"needs pages of a multiple of {backend.page_size_multiple} tokens, not of {page_size}"


class DecodeWidth:
    """How many blocks of one attention type a request may have for a decoding step to take the fast path.

    `max_blocks_per_request` says it; else the longest request that was hinted at, with a block to spare and rounded up to
    an even number, as in transformers; else it is 32 and doubles when a request needs more. 0 turns the fast path off.
    """

    def __init__(self, blocks: int | None) -> None:
        self.blocks = DEFAULT_BLOCKS_PER_REQUEST if blocks is None else blocks
        """The width of the block tables that decoding steps are prepared (captured) for."""
        self.grows = blocks is None

    @classmethod
    def of(cls, settings: AttentionSettings, page_size: int) -> DecodeWidth:
        """For pages of `page_size` tokens."""
        blocks = settings.max_blocks_per_request
        prompt, generated = settings.max_prompt_length, settings.max_generated_length
        if blocks is None and prompt is not None and generated is not None:
            blocks = -(-(prompt + generated) // page_size) + 1
            blocks += blocks % 2
        return cls(blocks)

    def admits(self, width: int) -> bool:
        """Whether a decoding step whose tables are `width` blocks wide takes the fast path."""
        while self.grows and width > self.blocks:
            self.blocks *= 2
        return 0 < width <= self.blocks
