"""`cbengine plan MODEL`: what an engine would allocate, from the model's config alone."""

from __future__ import annotations

import argparse

import anyio

from cbengine.cache.sizing import MemoryPlan
from cbengine.cli.failures import CommandError
from cbengine.cli.options import make_engine
from cbengine.errors import CBEngineError

_MIB = 2**20


def run(args: argparse.Namespace) -> None:
    """Print the plan as a table."""
    engine = make_engine(args)
    try:
        plan = anyio.run(engine.plan)
    except (CBEngineError, ValueError, OSError) as error:
        raise CommandError(str(error)) from error
    print("\n".join(table(plan)))


def table(plan: MemoryPlan) -> list[str]:
    """Lines of text: what each part takes, and the sizes that follow."""
    rows = [(name, f"{size / _MIB:,.1f} MiB") for name, size in plan.parts().items() if size]
    rows.append(("all", f"{sum(plan.parts().values()) / _MIB:,.1f} MiB"))
    rows += [
        ("if all ask for penalties and logprobs", f"+ {plan.on_request_bytes / _MIB:,.1f} MiB"),
        ("", ""),
        ("cache", f"{plan.num_blocks:,} blocks of {plan.page_size} tokens"),
        ("longest sequence", f"{min(plan.max_model_len, plan.capacity_tokens):,} tokens"),
        ("tokens in a step", f"{plan.max_batch_tokens:,}"),
        ("requests in a step", f"{plan.max_requests:,}"),
    ]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value:>20}".rstrip() for name, value in rows]
