"""The end of an asyncio loop."""

from __future__ import annotations

import asyncio


async def end_other_tasks() -> None:
    """Cancel all other tasks of this loop, and wait for their end: a loop that is closed before destroys them."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.sleep(0)  # for the transports that they have closed
