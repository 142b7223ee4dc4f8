"""What counts as a credential in a configuration, by the lists of secrets.yaml. Not covered: where it is shown."""

import re
from pathlib import Path

import pytest
import yaml

from verl_clipx.common.secrets import REDACTED, redact

CHARACTERS = {"L": "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC2eF4hJ6kL8nP0", "H": "0123456789abcdef" * 4}


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
    assert redact(text) == shown and redact({"command": [text]}) == {"command": [shown]}


def test_the_item_behind_a_credentials_option_is_never_there():
    before, after = ["serve", "--api-key"], ["--need-api-key", "--n", 1, "--password", None]
    assert redact({"args": [[*before, "xyz", *after]]}) == {"args": [[*before, REDACTED, *after]]}
    assert redact(("--API_KEY", 123)) == ["--API_KEY", REDACTED]


@pytest.mark.parametrize("shape", LISTS["shapes"])
def test_a_credential_is_known_by_its_shape_under_any_name(shape):
    before, secret, after = re.split("[«»]", LISTS["shapes"][shape])
    text = before + secret + after
    for value in (text, [text, "x"], {"note": text}, {"env": {"A": f"/home/me/data {text}"}}):
        shown = str(redact(value))
        assert secret not in shown and REDACTED in shown
    # What is redacted once stays as it is.
    assert redact(redact(text)) == redact(text)


def test_ordinary_values_stay():
    assert redact(LISTS["ordinary"]) == LISTS["ordinary"]
