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

# What stands in secrets.yaml for letters and digits, and for a hash.
CHARACTERS_OF_MARK = {"L": "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC2eF4hJ6kL8nP0", "H": "0123456789abcdef" * 4}
LETTERS_AND_DIGITS = string.ascii_letters + string.digits
# The alphabets of secrets.yaml, by their names there.
ALPHABETS = {
    "hex": "0123456789abcdef",
    "lower": string.ascii_lowercase + string.digits,
    "upper": string.ascii_uppercase + string.digits,
    "mixed": LETTERS_AND_DIGITS,
    "url": LETTERS_AND_DIGITS + "-_",
    "base64": LETTERS_AND_DIGITS + "+/",
    "bech32": "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L",
}


def fill_marks(text: str) -> str:
    """Return a text of secrets.yaml with letters and hashes in the places that stand for them."""

    def fill_mark(match):
        opening, kind, count, closing = match.groups()
        characters = ""
        if kind:
            length = int(count) if count else None
            characters = CHARACTERS_OF_MARK[kind][:length]
        if opening == "<":
            return characters
        return opening + characters + closing

    return re.sub(r"([<«])([LH]?)(\d*)([>»])", fill_mark, text)


LISTS = yaml.safe_load(fill_marks(Path(__file__).with_name("secrets.yaml").read_text(encoding="utf-8")))


def test_the_value_of_a_credentials_key_is_never_there():
    for key in LISTS["keys"].split():
        assert redact({key: "xyz"}) == {key: REDACTED}
        assert redact({key: {"inner": "xyz"}}) == {key: REDACTED}
        assert redact({"number": {key: 123}}) == {"number": {key: REDACTED}}
        assert redact({"reward": [{"kwargs": {key: "xyz"}}]}) == {"reward": [{"kwargs": {key: REDACTED}}]}


@pytest.mark.parametrize(("text", "redacted"), LISTS["texts"].items())
def test_credentials_in_texts(text, redacted):
    assert redact(text) == redacted
    assert redact({"command": [text]}) == {"command": [redacted]}
    assert redact(redacted) == redacted


@pytest.mark.parametrize(("items", "redacted"), LISTS["lists"])
def test_credentials_in_lists(items, redacted):
    assert redact(items) == redacted
    assert redact(redacted) == redacted


def test_the_item_behind_a_credentials_option_is_never_there():
    rest = ["--need-api-key", "--n", 1, "--password", None]
    arguments = ["serve", "--api-key", "xyz", *rest]
    assert redact({"args": [arguments]}) == {"args": [["serve", "--api-key", REDACTED, *rest]]}
    assert redact(("--API_KEY", 123)) == ["--API_KEY", REDACTED]


@pytest.mark.parametrize("shape", LISTS["shapes"])
def test_a_credential_is_known_by_its_place_or_its_beginning(shape):
    before, secret, after = re.split("[«»]", LISTS["shapes"][shape])
    text = before + secret + after
    for value in (text, [text, "x"], {"note": text}, {"env": {"A": f"/home/me/data {text}"}}):
        redacted = str(redact(value))
        assert secret not in redacted
        assert REDACTED in redacted
    # What is redacted once stays as it is.
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize(("prefix", "alphabet_and_length"), LISTS["drawn"].items())
def test_a_token_of_a_known_provider_is_never_there(prefix, alphabet_and_length):
    alphabet, length = alphabet_and_length
    generator = random.Random(prefix)
    for _ in range(20):
        secret = "".join(generator.choices(ALPHABETS[alphabet], k=length))
        redacted = redact({"note": f"see {prefix}{secret}, then", "words": [prefix + secret]})
        assert secret not in str(redacted)
        assert redacted["note"].startswith("see ")
        assert redacted["note"].endswith(", then")


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
        redacted = redact(form.format(word * (length // 8)))
        assert "hunter" not in redacted
        assert REDACTED in redacted


# What a search with a careless pattern would begin anew at each repetition.
REPEATED_TEXTS = (
    "a",
    "A",
    "1",
    "f",
    "a.",
    "a-",
    "a=",
    "a:",
    "-",
    "://",
    "http://a",
    "val=",
    "token=",
    "token: [",
    "@",
    '"token": "',
    "bearer ",
    "a\\'",
    "-----BEGIN PRIVATE ",
    "://a@b:",
    "token \\\\",
    "?sig=a",
    "a " * 5,
    "hf_abcdefghijklmnop/",
)


def count_lines_run_for(text):
    """Return how many lines of secrets.py run for a text, among them one for each piece that it cuts a text into."""
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


@pytest.mark.parametrize("text", REPEATED_TEXTS)
def test_the_work_grows_with_the_length_and_not_with_its_square(text):
    # For four times the text; the square would be sixteen.
    assert count_lines_run_for(text * 400) <= 4 * count_lines_run_for(text * 100) + 200


def test_the_pieces_of_a_text_are_its_characters_once():
    for text in REPEATED_TEXTS:
        assert "".join(secrets.PIECE.findall(text * 50)) == text * 50


def test_the_projects_own_files_stay():
    names = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    # These have what looks like a credential.
    exceptions = ("tests/", "verl_clipx/common/secrets.py", "verl_clipx/papers/tasks/tiny_policy")
    texts = {}
    for name in names:
        is_text = Path(name).suffix in (".py", ".sh", ".yaml", ".yml", ".md", ".toml")
        if is_text and not name.startswith(exceptions):
            texts[name] = Path(name).read_text()
    assert len(texts) > 100
    assert [name for name, text in texts.items() if redact(text) != text] == []


def test_the_records_of_the_shipped_runs_stay():
    for path in Path("verl_clipx/analysis/demo/shipped").rglob("*.run.json"):
        record = json.loads(path.read_text())
        assert redact(record) == record
