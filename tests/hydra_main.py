"""verl's entry modules in this process, as Hydra starts them from a command line, up to `clipx explain`'s answer."""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from hydra._internal.utils import _run_hydra, get_args_parser

from tests.composition import MICRO_BATCH
from verl_clipx.run.explain import EXPLAIN
from verl_clipx.run.explaining import answer_and_end, run_hydra

# Each with the name of its default configuration, in the folder "config" beside the module.
MAIN_PPO = "verl.trainer.main_ppo"
ENTRIES = {
    MAIN_PPO: "ppo_trainer",
    "verl.experimental.one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
    "verl.experimental.fully_async_policy.fully_async_main": "fully_async_ppo_trainer",
}
SFT = {"verl.trainer.sft_trainer": "sft_trainer_engine"}
# Overrides without which verl.trainer.main_ppo refuses a run.
NEEDED = ("algorithm.adv_estimator=grpo", *MICRO_BATCH)


def explained(folder: Path, *arguments: str, module: str = MAIN_PPO) -> dict[str, Any]:
    """What `clipx explain` says of an entry module's command line, by a file that comes and goes in the folder: the
    fields of an answer, and its lines as `text`.
    """
    target, parser = folder / "answer.json", get_args_parser()
    with mock.patch.dict(os.environ, {EXPLAIN: str(target), "HYDRA_FULL_ERROR": "1"}):
        try:
            arguments_of_main = dict(
                args=parser.parse_args(list(arguments)),
                args_parser=parser,
                task_function=answer_and_end,
                config_path=str(Path(find_spec(module).origin).parent / "config"),
                config_name={**ENTRIES, **SFT}[module],
            )
            run_hydra(_run_hydra, None, (), arguments_of_main)
        except SystemExit as error:
            answer = json.loads(target.read_text())
            target.unlink()
            assert error.code == 0
            return answer
    raise AssertionError("no answer")
