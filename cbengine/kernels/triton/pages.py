"""Writing the keys and values of a step's tokens into pages. (Where each token goes: `rope.kv_slots`, once for a step.)"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=("blocks", "offsets"))
def write_kernel(
    key, value, key_pages, value_pages, blocks, offsets, k_token, k_head, v_token, v_head, kv_block, kv_token,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH_PAD: tl.constexpr,
):  # fmt: skip
    """Grid: tokens. `key`, `value` [tokens, HEADS, D]; a token's heads lie side by side in a page."""
    token = tl.program_id(0).to(tl.int64)
    # 64 bits from the block number on: a pool has more than 2**31 elements.
    place = tl.load(blocks + token).to(tl.int64) * kv_block + tl.load(offsets + token) * kv_token
    e = tl.arange(0, WIDTH_PAD)
    mask = e < HEADS * D
    k = tl.load(key + token * k_token + e // D * k_head + e % D, mask=mask)
    v = tl.load(value + token * v_token + e // D * v_head + e % D, mask=mask)
    tl.store(key_pages + place + e, k, mask=mask)
    tl.store(value_pages + place + e, v, mask=mask)
