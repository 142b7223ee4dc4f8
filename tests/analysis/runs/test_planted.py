"""Credentials in every kind of place of a configuration are in no record, page, line, explanation or answer.

They are planted in what a run is started with; what it writes, and what commands print of it, is searched for them.
Not covered: credentials in paths themselves, in names of keys, and in the values of short options of commands.
"""

import json

import pytest
from omegaconf import OmegaConf

from tests.analysis.runs.commands import clipx, page_of
from tests.analysis.runs.example_runs import log_line
from tests.composition import composition
from tests.messages import assert_names
from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.common.secrets import redact
from verl_clipx.run import keys
from verl_clipx.run.explaining import answer
from verl_clipx.run.record import SCHEMA
from verl_clipx.run.run_files import record_path
from verl_clipx.run.start import resolve_into_config
from verl_clipx.training.trainer.log import write_record

# Credentials of three kinds: a word, a number, and a token that is known by its form.
SECRET_WORD = "hunterwolf"
SECRET_NUMBER = 80138013
TOKEN = "hf_aB3dE5gH7jK9mN1pQ3sT5vW7"
SECRETS = (SECRET_WORD, str(SECRET_NUMBER), TOKEN)
# From the kind of a place to an override that puts a credential there. {} stands for the number of the run.
OVERRIDE_OF_PLACE = {
    "declared text": f"trainer.project_name={SECRET_WORD}{{}}",
    "declared text that is a number": f"trainer.experiment_name={SECRET_NUMBER}",
    "declared text that is null": f"actor_rollout_ref.model.custom_chat_template={SECRET_WORD}{{}}",
    "a choice that is none": f"actor_rollout_ref.rollout.load_format={SECRET_WORD}{{}}",
    "undeclared key": f"+reward.custom_reward_function.reward_kwargs.note={SECRET_WORD}{{}}",
    "undeclared number": f"+mine.pin={SECRET_NUMBER}",
    "undeclared node": f"+mine.deep.inner.api_key={SECRET_WORD}{{}}",
    "token under a plain name": f"+mine.note={TOKEN}",
    "user in a path": f"data.train_files='s3://me:{SECRET_WORD}@host/train.parquet?sig={SECRET_WORD}'",
    "users in a list of paths": f"data.val_files=[a.parquet,https://{TOKEN}@host/test.parquet]",
    "user of the model": f"actor_rollout_ref.model.path=https://{SECRET_WORD}@host/models/base",
    "runtime environment": f"+ray_kwargs.ray_init.runtime_env.env_vars.HF_TOKEN={TOKEN}",
    "plain variable": f"+ray_kwargs.ray_init.runtime_env.env_vars.PLAIN={SECRET_WORD}",
    "items of a list": (
        f"+actor_rollout_ref.rollout.engine_kwargs.vllm.arguments=[--api-key,{SECRET_WORD},{SECRET_NUMBER}]"
    ),
    "node in a list": f"+actor_rollout_ref.rollout.engine_kwargs.vllm.servers=[{{{{key: {SECRET_WORD}}}}}]",
    "logger's settings": f"+trainer.wandb.key={SECRET_WORD}",
    "logger's proxy": f"+trainer.wandb_proxy=http://me:{SECRET_WORD}@proxy:80",
    "names of loggers": f"trainer.logger=[console,{SECRET_WORD}]",
    "clipx node": f"clipx.trace.folder={TOKEN}",
}
PLACES = tuple(OVERRIDE_OF_PLACE)
# Those whose values a line or an explanation might show.
PLACES_THAT_OUTPUT_NAMES = (
    "clipx node",
    "undeclared node",
    "token under a plain name",
    "user in a path",
    "users in a list of paths",
    "user of the model",
    "runtime environment",
    "logger's settings",
    "logger's proxy",
)


def configure_with_secrets(number, places=PLACES):
    """Return the configuration of a run that has credentials in these places."""
    overrides = [OVERRIDE_OF_PLACE[place].format(number) for place in places]
    return composition("+clipx=acpo", "+clipx/trace=prompts", f"data.seed={number}", *overrides)


def configuration_in_driver(number, places=PLACES):
    """Return the configuration as verl's driver hands it to the log."""
    config = configure_with_secrets(number, places)
    resolve_into_config(config)
    return OmegaConf.to_container(config, resolve=True)


def print_log(number):
    """Return a log of three steps, with other rewards for each number."""
    lines = []
    for step in (1, 2, 3):
        reward = 0.1 * step + number / 100
        lines.append(log_line(step, **{"critic/score/mean": reward, "actor/entropy": 0.5}))
    return "".join(lines)


def find_secrets(text):
    return [secret for secret in SECRETS if secret in str(text)]


@pytest.fixture
def runs(tmp_path):
    """The folders of two runs, with other credentials in each."""
    folders = []
    for number in (1, 2):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        log = folder / "metrics.jsonl"
        log.write_text(print_log(number))
        write_record(log, configuration_in_driver(number))
        folders.append(folder)
    return folders


@pytest.mark.parametrize("place", PLACES)
def test_no_record_has_a_credential(tmp_path, place):
    log = tmp_path / "metrics.jsonl"
    write_record(log, configuration_in_driver(1, (place,)))
    text = record_path(log).read_text()
    assert find_secrets(text) == []
    assert json.loads(text)["schema"] == SCHEMA


def test_no_report_has_a_credential(runs, tmp_path):
    output = clipx("report", *runs, "--out", tmp_path / "report", code=None)
    page = page_of(tmp_path / "report")
    assert find_secrets(output) == []
    assert find_secrets(page) == []
    assert find_secrets((tmp_path / "report/metrics.csv").read_text()) == []
    # Nor has it the hash of one.
    assert "hash:" not in page


def test_no_diagnosis_has_a_credential(runs):
    assert find_secrets(clipx("diagnose", *runs, code=None)) == []


def test_an_answer_names_the_key_of_a_credential_and_neither_its_value_nor_a_hash(runs):
    output = clipx("certify", runs[0], "vs", runs[1], code=None)
    assert_names(output, "reward.custom_reward_function.reward_kwargs.note differs")
    assert find_secrets(output) == []
    assert "hash:" not in output


def write_hydras_configuration(folder, log):
    (folder / ".hydra").mkdir()
    OmegaConf.save(configure_with_secrets(1), folder / ".hydra/config.yaml")


def write_record_of_form_1(folder, log):
    configuration = keys.flat(configuration_in_driver(1))
    record_path(log).write_text(json.dumps({"schema": 1, "versions": {}, "configuration": configuration}))


def write_record_without_form(folder, log):
    record_path(log).write_text(json.dumps({"versions": {}, "configuration": configuration_in_driver(1)}))


@pytest.mark.parametrize(
    "write_configuration", [write_hydras_configuration, write_record_of_form_1, write_record_without_form]
)
def test_a_configuration_that_was_written_with_credentials_is_read_without_them(tmp_path, write_configuration):
    log = tmp_path / "metrics.jsonl"
    log.write_text(print_log(1))
    write_configuration(tmp_path, log)
    record = read_run(tmp_path).record
    assert find_secrets(record) == []
    assert record.loss.method == "acpo"
    assert record.seeds.data == 1
    assert record.data.paths == ("s3://host/train.parquet",)


@pytest.mark.parametrize("place", PLACES_THAT_OUTPUT_NAMES)
def test_neither_a_line_nor_an_explanation_has_a_credential(place):
    config = configure_with_secrets(1, (place,))
    assert find_secrets(redact(answer(config).text)) == []
    line = resolve_into_config(config).record.line
    assert line.startswith("clipx: ")
    assert find_secrets(line) == []


@pytest.mark.parametrize("place", PLACES_THAT_OUTPUT_NAMES)
def test_no_command_line_has_a_credential(place):
    override = OVERRIDE_OF_PLACE[place].format(1)
    assert find_secrets(redact(f"python -m verl.trainer.main_ppo {override} trainer.nnodes=1")) == []
