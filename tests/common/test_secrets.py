"""What counts as a credential in a configuration.

Covers: names of keys, nested and in texts; addresses; what is left alone. Not covered: where configurations are written
and shown (tests/diagnostics).
"""

import pytest

from verl_clipx.common.secrets import REDACTED, redacted

KEYS = (
    "api_key API-KEY apiKey OPENAI_API_KEY secret_key aws_secret_access_key private_key access_token auth_token "
    "hf_token HF_TOKEN bearer-token password db_password passwd password_file"
)


@pytest.mark.parametrize("key", KEYS.split())
def test_the_value_of_a_credential_s_key_is_never_there(key):
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
    ],
)
def test_credentials_in_texts(text, shown):
    assert redacted(text) == shown and redacted({"command": [text]}) == {"command": [shown]}


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
        "text": "the token = xyz; a key: b",
    }
    assert redacted(rest) == rest
