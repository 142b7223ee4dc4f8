"""What counts as a credential in a configuration, by the lists of secrets.yaml. Not covered: where it is shown."""

import json
import random
import re
import string
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from tests.composition import composition
from verl_clipx.common import secrets
from verl_clipx.common.secrets import REDACTED, redact

CHARACTERS = {"L": "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC2eF4hJ6kL8nP0", "H": "0123456789abcdef" * 4}

LETTERS = string.ascii_letters + string.digits
ALPHABETS = {
    "hex": "0123456789abcdef",
    "lower": string.ascii_lowercase + string.digits,
    "upper": string.ascii_uppercase + string.digits,
    "mixed": LETTERS,
    "url": LETTERS + "-_",
    "base64": LETTERS + "+/",
    "bech32": "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L",
}


def filled(text: str) -> str:
    """A text of secrets.yaml with letters and hashes in the places that stand for them."""

    def characters(match):
        opening, kind, count, closing = match.groups()
        drawn = CHARACTERS[kind][: int(count) if count else None] if kind else ""
        return drawn if opening == "<" else opening + drawn + closing

    return re.sub(r"([<«])([LH]?)(\d*)([>»])", characters, text)


LISTS = yaml.safe_load(filled(Path(__file__).with_name("secrets.yaml").read_text(encoding="utf-8")))


def test_the_value_of_a_credentials_key_is_never_there():
    for key in LISTS["keys"].split():
        found = redact({"reward": [{"kwargs": {key: "xyz"}}], key: {"inner": "xyz"}, "number": {key: 123}})
        assert found == {"reward": [{"kwargs": {key: REDACTED}}], key: REDACTED, "number": {key: REDACTED}}
        assert redact({key: "xyz"}) == {key: REDACTED}


@pytest.mark.parametrize(("text", "shown"), LISTS["texts"].items())
def test_credentials_in_texts(text, shown):
    assert redact(text) == shown == redact(shown) and redact({"command": [text]}) == {"command": [shown]}


@pytest.mark.parametrize(("given", "shown"), LISTS["lists"])
def test_credentials_in_lists(given, shown):
    assert redact(given) == shown == redact(shown)


def test_the_item_behind_a_credentials_option_is_never_there():
    before, after = ["serve", "--api-key"], ["--need-api-key", "--n", 1, "--password", None]
    assert redact({"args": [[*before, "xyz", *after]]}) == {"args": [[*before, REDACTED, *after]]}
    assert redact(("--API_KEY", 123)) == ["--API_KEY", REDACTED]


@pytest.mark.parametrize("shape", LISTS["shapes"])
def test_a_credential_is_known_by_its_place_or_its_beginning(shape):
    before, secret, after = re.split("[«»]", LISTS["shapes"][shape])
    text = before + secret + after
    for value in (text, [text, "x"], {"note": text}, {"env": {"A": f"/home/me/data {text}"}}):
        shown = str(redact(value))
        assert secret not in shown and REDACTED in shown
    # What is redacted once stays as it is.
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize(("prefix", "drawn"), LISTS["drawn"].items())
def test_a_token_of_a_known_provider_is_never_there(prefix, drawn):
    alphabet, length = drawn
    draw = random.Random(prefix)
    for _ in range(20):
        secret = "".join(draw.choices(ALPHABETS[alphabet], k=length))
        shown = redact({"note": f"see {prefix}{secret}, then", "words": [prefix + secret]})
        assert secret not in str(shown) and shown["note"].startswith("see ") and shown["note"].endswith(", then")


@pytest.mark.parametrize("key", LISTS["ordinary"])
def test_ordinary_values_stay(key):
    assert redact({key: LISTS["ordinary"][key]}) == {key: LISTS["ordinary"][key]}


@pytest.mark.parametrize(
    "overrides", [(), ("+clipx=acpo", "+clipx/rollout=seeded"), ("+clipx=bapo", "+clipx/trace=prompts")]
)
def test_a_composed_configuration_stays(overrides):
    config = OmegaConf.to_container(composition(*overrides))
    assert redact(config) == config


@pytest.mark.parametrize(
    "form", ["password={}", 'password="{}"', "password='{}'", "password: {}", "tokens=x password=[{}]"]
)
def test_a_credential_of_any_length_is_never_there(form):
    for length in (990, 1010, 5000):
        word = "hunter2 " if '"' in form or "'" in form else "hunter2-"
        shown = redact(form.format(word * (length // 8)))
        assert "hunter" not in shown and REDACTED in shown


REPEATED = ("a", "A", "1", "f", "a.", "a-", "a=", "a:", "-", "://", "http://a", "val=", "token=", "token: [", "@")
REPEATED += ('"token": "', "bearer ", "a\\'", "-----BEGIN PRIVATE ", "://a@b:", "token \\\\", "?sig=a", "a " * 5)
REPEATED += ("hf_abcdefghijklmnop/",)


def work_on(text):
    """Counts the lines of secrets.py that run for a text; the pieces that it cuts a text into are counted too."""
    lines = 0

    def count(frame, event, argument):
        nonlocal lines
        if frame.f_code.co_filename != secrets.__file__:
            return None
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        redact(text)
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("unit", REPEATED)
def test_the_work_grows_with_the_length_and_not_with_its_square(unit):
    length = 100
    # Of four times the text; the square would be sixteen.
    assert work_on(unit * 4 * length) <= 4 * work_on(unit * length) + 200


def test_the_pieces_of_a_text_are_its_characters_once():
    for unit in REPEATED:
        assert "".join(secrets.PIECE.findall(unit * 50)) == unit * 50


LOOKS_DRAWN = ("verl_clipx/common/secrets.py", "verl_clipx/papers/tasks/tiny_policy")


def test_the_projects_own_files_stay():
    files = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    own = [Path(name) for name in files if not name.startswith(("tests/", *LOOKS_DRAWN))]
    texts = {path: path.read_text() for path in own if path.suffix in (".py", ".sh", ".yaml", ".yml", ".md", ".toml")}
    assert [path for path, text in texts.items() if redact(text) != text] == [] and len(texts) > 100
    for path in Path("verl_clipx/analysis/demo/shipped").rglob("*.run.json"):
        record = json.loads(path.read_text())
        assert redact(record) == record
