"""`python -m tests.end_to_end.in_one_process OVERRIDE …`: what verl's main trains through Ray, in this process."""

import os
import sys
from pathlib import Path
from typing import Any

# Last: a script's neighbours there must not hide the standard library's.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from one_process.only_rank import become_only_rank

become_only_rank()

from hydra import compose, initialize_config_module  # noqa: E402  (after the environment is set)
from one_process import trainer  # noqa: E402


class Workers(trainer.LocalWorkers):
    """With verl's checkpoints, which benchmarks make none of."""

    def save_checkpoint(self, *of_step: Any, **named: Any) -> None:
        """Saves by verl's worker."""
        self.worker.save_checkpoint(*of_step, **named)

    def load_checkpoint(self, *of_step: Any, **named: Any) -> None:
        """Loads by verl's worker."""
        self.worker.load_checkpoint(*of_step, **named)


if __name__ == "__main__":
    trainer.LocalWorkers = Workers
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", sys.argv[1:])
    trainer.train(config, Path(os.environ["VERL_FILE_LOGGER_PATH"]))
