"""The engine's process with a model that kills it: runs `plait.engine.child` as its arguments say.

`POISON` is a token id: an iteration that computes a sequence with it in its prompt ends the process. With `POISON_HOLD`
the file of that name is made then, and no other process starts while it is there.
"""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path
from typing import Any

POISON = int(os.environ["POISON"])
HOLD = Path(os.environ["POISON_HOLD"]) if "POISON_HOLD" in os.environ else None


def main() -> int:
    link = select.poll()
    link.register(int(sys.argv[-1]), select.POLLRDHUP)
    while HOLD is not None and HOLD.exists():
        if link.poll(50):
            return 1  # the parent is dead
    from plait.engine import child
    from plait.engine.runner import Runner

    run = Runner.run

    def poisoned(self: Runner, chunks: list[Any]) -> Any:
        if any(POISON in chunk.seq.tokens[: chunk.seq.prompt_len] for chunk in chunks):
            if HOLD is not None:
                HOLD.touch()
            os._exit(9)
        return run(self, chunks)

    Runner.run = poisoned
    sys.argv = sys.argv[sys.argv.index("plait.engine.child") :]
    return child.main()


sys.exit(main())
