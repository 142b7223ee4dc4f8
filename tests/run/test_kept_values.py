"""What a record keeps of a configuration, and the table of declared keys behind it.

Not covered: that credentials are in no file or output (tests/analysis/runs/test_planted.py).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf, open_dict

from tests.composition import composition
from verl_clipx.run import keys
from verl_clipx.run.kept_values import TABLE, hash_of, is_hash, kept_configuration, kept_value, strip_credentials

ACTOR = keys.ACTOR
ROLLOUT = keys.ROLLOUT


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.train_batch_size", 8),
        (f"{ACTOR}.optim.lr", 1e-6),
        (f"{ACTOR}.use_kl_loss", True),
        ("trainer.total_training_steps", None),
        ("trainer.project_name", ""),
        (f"{ACTOR}.loss_agg_mode", "seq-mean-token-mean"),
        (f"{ACTOR}.strategy", "fsdp2"),
        (f"{ACTOR}.fsdp_config.mixed_precision.param_dtype", "fp32"),
        (f"{ROLLOUT}.name", "vllm"),
        (f"{ROLLOUT}.agent.default_agent_loop", "clipx_seeded_single_turn"),
        # Of verl after 0.9.1.
        (f"{ACTOR}.router_replay.mode", "R3"),
        (f"{ACTOR}.megatron.grad_offload", True),
        (f"{ACTOR}.veomni.activation_gpu_limit", 0.5),
        ("algorithm.rollout_correction.rollout_rs", "token_k1, seq_max_k2"),
        ("algorithm.rollout_correction.rollout_rs_threshold", "0.5_2.0,0.9"),
        ("algorithm.adv_estimator", "my_estimator"),
        (f"{ACTOR}.policy_loss.loss_mode", "my_loss"),
        ("clipx.function", "mine.losses:Sharp"),
        ("clipx.scope", "lagged"),
        ("clipx.sharpness", 0.5),
        ("clipx.mask.rule", "icepop"),
        ("trainer.logger", ["console", "wandb"]),
        (f"{ROLLOUT}.cudagraph_capture_sizes", [1, 2]),
        ("data.train_files", ["a/train.parquet", "b/train.parquet"]),
        (keys.MODEL_PATH, "Qwen/Qwen2.5-7B"),
        (f"{ROLLOUT}.name", "???"),
    ],
)
def test_numbers_choices_names_and_paths_stay(key, value):
    assert kept_value(key, value) == value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.project_name", "hunter"),
        ("trainer.project_name", 80138013),
        ("mine.word", "vllm"),
        ("mine.pin", 8013),
        ("mine.on", True),
        (f"{ROLLOUT}.name", "hunter"),
        (f"{ACTOR}.loss_agg_mode", "token-mean,hunter"),
        ("algorithm.adv_estimator", "hunter 2"),
        ("algorithm.adv_estimator", "hf_aB3dE5gH7jK9mN1pQ3sT5vW7"),
        ("clipx.trace.folder", "s3://me:hunter@host/traces"),
        ("clipx.word", "hunter"),
        (keys.MODEL_PATH, "${oc.env:MODEL,hunter}"),
        ("reward.reward_manager", {"hunter": 1}),
    ],
)
def test_other_texts_and_undeclared_keys_are_kept_as_a_hash(key, value):
    kept = kept_value(key, value)
    assert is_hash(kept) and kept_value(key, kept) == kept
    assert kept != hash_of(key, "another")


def test_items_of_a_list_are_kept_by_themselves():
    kept = kept_value("trainer.logger", ["console", "hunter", {"token": "hunter"}])
    assert kept[0] == "console" and is_hash(kept[1]) and is_hash(kept[2]) and is_hash(kept)


def test_a_hash_has_16_bits_and_differs_by_key_and_value():
    hashes = {hash_of(key, value) for key in ("a", "b") for value in range(40)}
    assert len(hashes) > 70 and all(len(text) == len("hash:") + 4 for text in hashes)


def test_rays_environment_and_the_plugins_nodes_are_left_out():
    configuration = {
        "ray_kwargs.ray_init.runtime_env.env_vars.HF_TOKEN": "hunter",
        f"{keys.FACTS}.line": "clipx: …",
        f"{keys.POLICY_LOSS}.clipx.method": "acpo",
        "data.seed": 1,
    }
    assert kept_configuration(configuration) == {"data.seed": 1}


def test_what_the_record_keeps_already_stays_as_it_is():
    kept = kept_configuration(keys.flat(OmegaConf.to_container(composition("+clipx=acpo", "data.prompt_key=mine"))))
    assert kept_configuration(kept) == kept


# Below it are copies of other nodes for a custom sampler, which no configuration of verl's has.
SAMPLER_ARGUMENTS = "trainer.v1.sampler.sampler_kwargs."


@pytest.mark.parametrize(
    "overrides", [(), ("+clipx=acpo", "+clipx/rollout=seeded", "+clipx/mask=icepop"), ("+clipx=observe",)]
)
def test_of_a_configuration_without_texts_of_the_users_own_everything_stays(overrides):
    config = composition("actor_rollout_ref.rollout.name=vllm", *overrides)
    with open_dict(config):
        config.actor_rollout_ref.actor.policy_loss.pop("run", None)
    kept = kept_configuration(keys.flat(OmegaConf.to_container(config, resolve=True)))
    assert [key for key, value in kept.items() if is_hash(value) and not key.startswith(SAMPLER_ARGUMENTS)] == []
    assert len(kept) > 700


def test_addresses_lose_user_password_and_query():
    assert strip_credentials("s3://me:x@host/a@b?sig=x#y") == "s3://host/a@b" and strip_credentials("a/b?c") == "a/b?c"


@pytest.mark.parametrize("mark", "/?#@:")
def test_an_address_loses_a_password_whose_marks_are_not_escaped(mark):
    assert strip_credentials(f"s3://me:hun{mark}ter@host/a?sig=x") == "s3://host/a"


@pytest.mark.parametrize(
    "address", ["hdfs://host:8020/of/me@work", "s3://[::1]:9000/a@b", "s3://[fe80::1]/a", "hf://a"]
)
def test_an_address_without_a_password_stays(address):
    assert strip_credentials(address) == address


# In a process of its own: other tests register losses, whose parameters the table does not have.
PRINT_DECLARED = """
import json, sys
sys.path.insert(0, "scripts")
import declared_keys
numbers, texts = declared_keys.declared()
listed = {key: sorted(words - {declared_keys.TEXT}) for key, words in texts.items()}
print(json.dumps({"numbers": sorted(numbers), "texts": listed}))
"""


def test_the_table_is_what_its_script_writes():
    root = Path(__file__).parents[2]
    printed = subprocess.run(
        [sys.executable, "-c", PRINT_DECLARED], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    declared = json.loads(printed.splitlines()[-1])
    table = json.loads(TABLE.read_text())
    assert {*declared["texts"]} <= {*table}, "run python scripts/declared_keys.py"
    for key, words in declared["texts"].items():
        assert {*words} <= {*table[key].get("texts", ())}, key
        assert key not in declared["numbers"] or table[key]["numbers"], key
