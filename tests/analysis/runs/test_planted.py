"""Credentials in every kind of place of a configuration are in no record, page, line, explanation or answer.

They are planted in what a run is started with, and what it writes and what commands print of it is searched for them.
Not covered: credentials in paths themselves, in names of keys, and in the values of short options of commands.
"""

import json

import pytest
from omegaconf import OmegaConf

from tests.analysis.runs.commands import clipx, page_of
from tests.analysis.runs.example_runs import log_line
from tests.composition import composition
from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.common.secrets import redact
from verl_clipx.run import keys
from verl_clipx.run.explaining import answer
from verl_clipx.run.record import SCHEMA
from verl_clipx.run.run_files import record_path
from verl_clipx.run.start import resolve_into_config
from verl_clipx.training.trainer.log import write_record

WORD, PIN, TOKEN = "hunterwolf", 80138013, "hf_aB3dE5gH7jK9mN1pQ3sT5vW7"
SECRETS = (WORD, str(PIN), TOKEN)
# By the kind of place. {} stands for a number that differs between the two runs.
PLANTED = {
    "declared text": f"trainer.project_name={WORD}{{}}",
    "declared text that is a number": f"trainer.experiment_name={PIN}",
    "declared text that is null": f"actor_rollout_ref.model.custom_chat_template={WORD}{{}}",
    "a choice that is none": f"actor_rollout_ref.rollout.load_format={WORD}{{}}",
    "undeclared key": f"+reward.custom_reward_function.reward_kwargs.note={WORD}{{}}",
    "undeclared number": f"+mine.pin={PIN}",
    "undeclared node": f"+mine.deep.inner.api_key={WORD}{{}}",
    "token under a plain name": f"+mine.note={TOKEN}",
    "user in a path": f"data.train_files='s3://me:{WORD}@host/train.parquet?sig={WORD}'",
    "users in a list of paths": f"data.val_files=[a.parquet,https://{TOKEN}@host/test.parquet]",
    "user of the model": f"actor_rollout_ref.model.path=https://{WORD}@host/models/base",
    "runtime environment": f"+ray_kwargs.ray_init.runtime_env.env_vars.HF_TOKEN={TOKEN}",
    "plain variable": f"+ray_kwargs.ray_init.runtime_env.env_vars.PLAIN={WORD}",
    "items of a list": f"+actor_rollout_ref.rollout.engine_kwargs.vllm.arguments=[--api-key,{WORD},{PIN}]",
    "node in a list": f"+actor_rollout_ref.rollout.engine_kwargs.vllm.servers=[{{{{key: {WORD}}}}}]",
    "logger's settings": f"+trainer.wandb.key={WORD}",
    "logger's proxy": f"+trainer.wandb_proxy=http://me:{WORD}@proxy:80",
    "names of loggers": f"trainer.logger=[console,{WORD}]",
    "clipx node": f"+clipx.trace.folder={TOKEN}",
}
GROUPS = ("+clipx=acpo", "+clipx/trace=prompts")


def configured(number, places=tuple(PLANTED)):
    overrides = [PLANTED[place].format(number).replace("+clipx.trace", "clipx.trace") for place in places]
    return composition(*GROUPS, f"data.seed={number}", *overrides)


def started(number, places=tuple(PLANTED)):
    """The configuration as verl's driver hands it to the log."""
    config = configured(number, places)
    resolve_into_config(config)
    return OmegaConf.to_container(config, resolve=True)


def written_log(number):
    rewards = (0.1, 0.2, 0.3)
    return "".join(
        log_line(step, **{"critic/score/mean": reward + number / 100, "actor/entropy": 0.5})
        for step, reward in enumerate(rewards, 1)
    )


def found_in(text):
    return [secret for secret in SECRETS if secret in str(text)]


@pytest.fixture
def arms(tmp_path):
    """Two runs, as they are written, with other credentials in each."""
    folders = []
    for number in (1, 2):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        log = folder / "metrics.jsonl"
        log.write_text(written_log(number))
        write_record(log, started(number))
        folders.append(folder)
    return folders


@pytest.mark.parametrize("place", PLANTED)
def test_no_record_has_a_credential(tmp_path, place):
    log = tmp_path / "metrics.jsonl"
    write_record(log, started(1, (place,)))
    text = record_path(log).read_text()
    assert not found_in(text) and json.loads(text)["schema"] == SCHEMA


def test_neither_a_page_nor_an_answer_has_a_credential(arms, tmp_path):
    out = tmp_path / "report"
    said = clipx("report", *arms, "--out", out, code=None)
    certified = clipx("certify", arms[0], "vs", arms[1], code=None)
    said += certified + clipx("diagnose", *arms, code=None)
    assert not found_in(said) and not found_in(page_of(out)) and not found_in((out / "metrics.csv").read_text())
    assert "reward.custom_reward_function.reward_kwargs.note differs" in certified
    assert "hash:" not in certified and "hash:" not in page_of(out)


@pytest.mark.parametrize("kind", ["hydra's own", "form 1", "older"])
def test_what_was_written_before_is_read_without_them(tmp_path, kind):
    config = configured(1)
    log = tmp_path / "metrics.jsonl"
    log.write_text(written_log(1))
    whole = started(1)
    if kind == "hydra's own":
        (tmp_path / ".hydra").mkdir()
        OmegaConf.save(config, tmp_path / ".hydra/config.yaml")
    elif kind == "form 1":
        record_path(log).write_text(json.dumps({"schema": 1, "versions": {}, "configuration": keys.flat(whole)}))
    else:
        record_path(log).write_text(json.dumps({"versions": {}, "configuration": whole}))
    record = read_run(tmp_path).record
    assert not found_in(record)
    assert (record.loss.method, record.seeds.data, record.data.paths) == ("acpo", 1, ("s3://host/train.parquet",))


NAMED = (
    "clipx node",
    *("undeclared node", "token under a plain name", "user in a path", "users in a list of paths"),
    *("user of the model", "runtime environment", "logger's settings", "logger's proxy"),
)


@pytest.mark.parametrize("place", NAMED)
def test_neither_a_line_nor_an_explanation_has_a_credential(place):
    config = configured(1, (place,))
    assert not found_in(redact(answer(config).text))
    line = resolve_into_config(config).record.line
    assert line.startswith("clipx: ") and not found_in(line)
    assert not found_in(redact(f"python -m verl.trainer.main_ppo {PLANTED[place].format(1)} trainer.nnodes=1"))
