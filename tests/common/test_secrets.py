"""What counts as a credential in a configuration.

Covers: names of keys, nested and in texts; addresses; what is left alone. Not covered: where configurations are written
and shown (tests/diagnostics).
"""

import pytest

from verl_clipx.common.secrets import REDACTED, redacted

KEYS = (
    "api_key API-KEY apiKey OPENAI_API_KEY secret_key aws_secret_access_key private_key access_token auth_token "
    "hf_token HF_TOKEN HUGGING_FACE_HUB_TOKEN bearer-token password db_password passwd password_file "
    "api_keys ACCESS-KEYS"
)


@pytest.mark.parametrize("key", KEYS.split())
def test_the_value_of_a_credentials_key_is_never_there(key):
    found = redacted({"reward": [{"kwargs": {key: "xyz"}}], key: {"inner": "xyz"}, "number": {key: 123}})
    assert found == {"reward": [{"kwargs": {key: REDACTED}}], key: REDACTED, "number": {key: REDACTED}}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("+reward_model.reward_kwargs.api_key=xyz", f"+reward_model.reward_kwargs.api_key={REDACTED}"),
        ("a.hf_token: xyz, b=1", f"a.hf_token: {REDACTED}, b=1"),
        ('{"api_key": "xyz", "n": 1}', f'{{"api_key": "{REDACTED}", "n": 1}}'),
        ("https://host/path?api_key=xyz&n=1", f"https://host/path?api_key={REDACTED}&n=1"),
        ("http://user:x/y@proxy:8080/a", "http://user:x/y@proxy:8080/a"),
        ("http://user:xyz@proxy:8080/a@b", f"http://{REDACTED}@proxy:8080/a@b"),
        ("see http://xyz@host, then", f"see http://{REDACTED}@host, then"),
        ("+reward.api_keys=[x,yz] n=1", f"+reward.api_keys={REDACTED} n=1"),
        ('{"api_keys": ["x", "yz"], "n": 1}', f'{{"api_keys": {REDACTED}, "n": 1}}'),
        ("serve --api-key xyz --n 1", f"serve --api-key {REDACTED} --n 1"),
        ("serve --vllm.hf-token  'xyz' -n 1", f"serve --vllm.hf-token  '{REDACTED}' -n 1"),
        ("serve --need-api-key --n 1", "serve --need-api-key --n 1"),
    ],
)
def test_credentials_in_texts(text, shown):
    assert redacted(text) == shown and redacted({"command": [text]}) == {"command": [shown]}


def test_the_item_behind_a_credentials_option_is_never_there():
    command = ["serve", "--api-key", "xyz", "--need-api-key", "--n", 1, "--password", None]
    shown = ["serve", "--api-key", REDACTED, "--need-api-key", "--n", 1, "--password", None]
    assert redacted({"args": [command]}) == {"args": [shown]}
    assert redacted(("--API_KEY", 123)) == ["--API_KEY", REDACTED]


def test_the_rest_stays():
    rest = {
        "max_tokens": 5,
        "pad_token": "<pad>",
        "eos_token_id": 2,
        "hf_tokenizer": "path",
        "access_tokens_per_second": 1.5,
        "key": "prompt",
        "api_key": None,
        "password": "",
        "use_auth_token": False,
        "address": "http://host:8080/a@b",
        "text": "the token = xyz; a key: b; an api key c",
        "words": ["api_key", "xyz", "--max-tokens", "5"],
    }
    assert redacted(rest) == rest
