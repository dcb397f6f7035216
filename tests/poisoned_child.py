"""The engine's process with a model that kills it: runs `plait.engine.child` as its arguments say.

`POISON` is a token id: an iteration that computes a sequence with it in its prompt ends the process.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from plait.engine import child
from plait.engine.runner import Runner

POISON = int(os.environ["POISON"])
run = Runner.run


def poisoned(self: Runner, chunks: list[Any]) -> Any:
    if any(POISON in chunk.seq.tokens[: chunk.seq.prompt_len] for chunk in chunks):
        os._exit(9)
    return run(self, chunks)


Runner.run = poisoned
sys.argv = sys.argv[sys.argv.index("plait.engine.child") :]
sys.exit(child.main())
