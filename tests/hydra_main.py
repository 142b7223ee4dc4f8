"""verl's entry modules in this process, as Hydra starts them from a command line, up to their configuration."""

import json
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from verl_clipx.run.answer import NOTHING_WRITTEN, answer_and_end, run_hydra
from verl_clipx.run.explain import EXPLAIN
from verl_clipx.run.user_keys import keys_set_by_user

# Each with the name of its default configuration, in the folder "config" beside the module.
MAIN_PPO = "verl.trainer.main_ppo"
ENTRIES = {
    MAIN_PPO: "ppo_trainer",
    "verl.experimental.one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
    "verl.experimental.fully_async_policy.fully_async_main": "fully_async_ppo_trainer",
}
SFT = {"verl.trainer.sft_trainer": "sft_trainer_engine"}


def start(module: str, arguments: Sequence[str], task: Callable[[DictConfig], Any], run=_run_hydra) -> None:
    """Calls a task with what an entry module would compose.

    Args:
        arguments: of the module.
        run: what stands in for Hydra's own function.
    """
    parser = get_args_parser()
    folder = Path(find_spec(module).origin).parent / "config"
    with mock.patch.dict(os.environ, {"HYDRA_FULL_ERROR": "1"}):
        run(
            args=parser.parse_args(list(arguments)),
            args_parser=parser,
            task_function=task,
            config_path=str(folder),
            config_name={**ENTRIES, **SFT}[module],
        )


def composed(module: str, arguments: Sequence[str]) -> tuple[DictConfig, list[str], DictConfig, set[str]]:
    """An entry module's configuration, its overrides, Hydra's choices of groups, and the keys that the user set."""
    result = []

    def keep(config: DictConfig) -> None:
        hydra = HydraConfig.get()
        overrides = list(hydra.overrides.task)
        result.append((config, overrides, hydra.runtime.choices, keys_set_by_user()))

    start(module, [*arguments, *NOTHING_WRITTEN], keep)
    return result[0]


def explained(folder: Path, *arguments: str, module: str = MAIN_PPO) -> dict[str, Any]:
    """What `clipx explain` says of an entry module's command line: the fields of an answer, and its lines as `text`.

    Args:
        folder: for the answer's file.
    """
    target = folder / "answer.json"
    with mock.patch.dict(os.environ, {EXPLAIN: str(target)}):
        try:
            start(module, arguments, answer_and_end, lambda args, **named: run_hydra(_run_hydra, args, **named))
        except SystemExit as ended:
            answer = json.loads(target.read_text())
            target.unlink()
            assert ended.code == bool(answer["stops"])
            return answer
    raise AssertionError("no answer")
