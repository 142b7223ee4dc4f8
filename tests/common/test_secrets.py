"""What counts as a credential in a configuration.

Covers: names of keys, nested and in texts; addresses; what is left alone. Not covered: where configurations are written
and shown (tests/report).
"""

import pytest

from verl_clipx.common.secrets import REDACTED, redacted

KEYS = (
    "api_key API-KEY apiKey OPENAI_API_KEY secret_key aws_secret_access_key private_key access_token auth_token "
    "hf_token HF_TOKEN HUGGING_FACE_HUB_TOKEN bearer-token password db_password passwd password_file "
    "api_keys ACCESS-KEYS"
)


MORE_KEYS = (
    "token passphrase credentials credentials.value client_secret cookie Set-Cookie Authorization webhook_url "
    "AWS_SESSION_TOKEN aws_access_key_id AZURE_STORAGE_ACCOUNT_KEY connection_string DB_PWD http.token wandb.key"
)


def test_the_value_of_a_credentials_key_is_never_there():
    for key in KEYS.split():
        found = redacted({"reward": [{"kwargs": {key: "xyz"}}], key: {"inner": "xyz"}, "number": {key: 123}})
        assert found == {"reward": [{"kwargs": {key: REDACTED}}], key: REDACTED, "number": {key: REDACTED}}
    for key in MORE_KEYS.split():
        assert redacted({key: "xyz"}) == {key: REDACTED}


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


LETTERS = "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC2eF4hJ6kL8nP0"
HEX = "0123456789abcdef" * 4
WHERE = "/home/me/data"

# Put together here, so that no scanner takes this file for a leak. Each is a text and what must not be left of it.
SHAPES = {
    "Bearer header": (f"Authorization: Bearer {LETTERS}", LETTERS),
    "bare Bearer": (f"curl -H 'bearer {LETTERS}'", LETTERS),
    "basic header": ("authorization=Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
    "header in JSON": ('{"Authorization": "Token xyzxyz"}', "xyzxyz"),
    "API key header": ("X-Api-Key: xyzxyz", "xyzxyz"),
    "PEM key": ("-----BEGIN RSA PRIVATE " + f"KEY-----\n{LETTERS}\n-----END RSA PRIVATE KEY-----", LETTERS),
    "OpenSSH key, cut off": ("-----BEGIN OPENSSH PRIVATE " + f"KEY-----\n{LETTERS}\n{HEX}", HEX),
    "option token=": ("serve --token=xyzxyz --n 1", "xyzxyz"),
    "option token": ("serve --token xyzxyz --n 1", "xyzxyz"),
    "token in JSON": ('{"token": "xyzxyz"}', "xyzxyz"),
    "passphrase": ("ssh.passphrase=xyzxyz", "xyzxyz"),
    "credentials.value": ("+credentials.value=xyzxyz", "xyzxyz"),
    "client secret": ("client_secret: xyzxyz", "xyzxyz"),
    "SAS signature": ("https://a.blob.core.windows.net/c?sv=2024&sig=xyz%2Fxyz%3D&se=1", "xyz%2Fxyz%3D"),
    "Amazon's signed address": (f"https://b.s3.amazonaws.com/k?X-Amz-Signature={HEX}", HEX),
    "Google's signed address": (f"https://storage.googleapis.com/k?a=1&X-Goog-Signature={HEX}", HEX),
    "Azure connection string": ("AccountName=me;AccountKey=xyzxyz==;EndpointSuffix=x", "xyzxyz"),
    "Amazon key id": ("note AKIA" + "ABCDEFGHIJKLMNOP", "ABCDEFGHIJKLMNOP"),
    "Amazon temporary key id": ("ASIA" + "ABCDEFGHIJKLMNOP", "ABCDEFGHIJKLMNOP"),
    "Google API key": ("AIza" + LETTERS[:35], LETTERS[:35]),
    "Google access": ("ya29." + LETTERS, LETTERS),
    "Google client secret": ("GOCSPX-" + LETTERS[:28], LETTERS[:28]),
    "cookie": ("Cookie: session=xyzxyz; csrf=zyxzyx", "zyxzyx"),
    "cookie in JSON": ('{"Set-Cookie": "id=xyzxyz; Secure"}', "xyzxyz"),
    "Slack webhook": ("https://hooks.slack.com" + f"/services/T0/B0/{LETTERS}", LETTERS),
    "Discord webhook": ("https://discord.com/api" + f"/webhooks/12/{LETTERS}", LETTERS),
    "Teams webhook": ("https://me.webhook.office.com" + f"/webhookb2/{LETTERS}", LETTERS),
    "Feishu webhook": ("https://open.feishu.cn" + f"/open-apis/bot/v2/hook/{LETTERS}", LETTERS),
    "Telegram bot": ("https://api.telegram.org" + f"/bot123456789:{LETTERS[:35]}/send", LETTERS[:35]),
    "hub": ("hf_" + LETTERS[:34], LETTERS[:34]),
    "hub in a list of words": ("login hf_" + LETTERS[:34] + " now", LETTERS[:34]),
    "GitHub": ("ghp_" + LETTERS[:36], LETTERS[:36]),
    "GitHub, fine-grained": ("github_pat_" + LETTERS, LETTERS),
    "GitLab": ("glpat-" + LETTERS[:20], LETTERS[:20]),
    "Slack": ("xoxb-" + f"123456789012-{LETTERS[:24]}", LETTERS[:24]),
    "OpenAI": ("sk-proj-" + LETTERS, LETTERS),
    "Anthropic": ("sk-ant-api03-" + LETTERS, LETTERS),
    "Stripe": ("sk_live_" + LETTERS[:24], LETTERS[:24]),
    "Groq": ("gsk_" + LETTERS, LETTERS),
    "NVIDIA": ("nvapi-" + LETTERS, LETTERS),
    "W&B key under its name": (f"WANDB_API_KEY={HEX[:40]}", HEX[:40]),
    "W&B key of a login": (f"wandb login {HEX[:40]}", HEX[:40]),
    "W&B key, long": ("wandb_v1_" + LETTERS, LETTERS),
    "JSON web token": (f"eyJ{LETTERS}.eyJ{LETTERS}.{HEX}", HEX),
    "npm": ("npm_" + LETTERS[:36], LETTERS[:36]),
    "PyPI": ("pypi-" + LETTERS * 2, LETTERS),
    "SendGrid": ("SG." + f"{LETTERS[:22]}.{LETTERS}", LETTERS),
    "address with password": ("postgres://user:xyzxyz@host/db", "xyzxyz"),
    "address with user only": (f"https://{LETTERS}@host/repository.git", LETTERS),
}


def test_a_credential_is_known_by_its_shape_under_any_name():
    for shape, (text, secret) in SHAPES.items():
        assert secret in text, shape
        for value in (text, [text, "x"], {"note": text}, {"env": {"A": f"{WHERE} {text}"}}):
            shown = str(redacted(value))
            assert secret not in shown and REDACTED in shown, shape
        # What is redacted once stays as it is.
        assert redacted(redacted(text)) == redacted(text), shape


def test_ordinary_values_stay():
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
        "path": "/home/me/data/sk-learn/model.safetensors",
        "model": "Qwen/Qwen2.5-7B-Instruct-hf_format",
        "tokenizer": "hf_tokenizer_and_processor_of_the_model",
        "name": "sk-learn-random-forest-classifier-large",
        "lr": 1e-6,
        "commit": HEX[:40],
        "digest": f"sha256:{HEX}",
        "PWD": "/home/me",
        "stop_token_ids": [1, 2],
        "note": "Basic functionality; the bearer of this message; a cookie recipe",
        "time": "12:30:05.123 of 2026-11-25",
        "data": "https://huggingface.co/datasets/openai/gsm8k?split=train&n=5",
        "discord": "https://discord.com/invite",
        "override": "actor_rollout_ref.actor.optim.lr=1e-6 data.max_tokens=5",
        "secretary": "x",
        "task": "task-aB3dE5gH7jK9mN1pQ3sT5vW7",
        "uuid": "123e4567-e89b-12d3-a456-426614174000",
        "signature": "question -> answer",
        "address_of_ray": "10.0.0.1:6379",
    }
    assert redacted(rest) == rest
