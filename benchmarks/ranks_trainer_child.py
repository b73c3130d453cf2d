"""One rank of `ranks_trainer.py`: a script of the Trainer's, with memwall's callback in every Trainer that it makes.

    torchrun --nproc-per-node 2 ranks_trainer_child.py SESSIONS SCRIPT [ARGUMENT ...]

Each training that memwall recorded adds a line to the file SESSIONS.
"""

import runpy
import sys
from typing import Any

from transformers import trainer

from memwall.integrations import MemwallCallback

BUDGET = "8GiB"
SESSIONS = sys.argv[1]


class InEveryTrainer(MemwallCallback):
    """Is made by the Trainer itself, as its own default callbacks are."""

    def __init__(self) -> None:
        super().__init__(budget=BUDGET)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_end(args, state, control, **kwargs)
        if self.session is not None:
            with open(SESSIONS, "a") as sessions:
                sessions.write(f"{args.process_index}\n")


def main() -> None:
    trainer.DEFAULT_CALLBACKS.append(InEveryTrainer)
    del sys.argv[:2]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
