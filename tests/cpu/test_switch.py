"""The check behind ${clipx_platform:cpu}."""

import pytest

from verl_clipx import cpu
from verl_clipx.cpu.switch import check_platform


@pytest.mark.parametrize("value", ["cpu", " CPU "])
def test_the_right_variable_passes(monkeypatch, value):
    monkeypatch.setenv("VERL_PLATFORM", value)
    assert check_platform("cpu") == "cpu"
    assert cpu.is_active()


@pytest.mark.parametrize(("value", "found"), [("", "no VERL_PLATFORM"), ("nvidia", "VERL_PLATFORM=nvidia")])
def test_another_one_says_what_to_run(monkeypatch, value, found):
    monkeypatch.setenv("VERL_PLATFORM", value)
    with pytest.raises(ValueError, match=rf"found {found}.*VERL_PLATFORM=cpu python -m verl\.trainer\.main_ppo"):
        check_platform("cpu")
    assert not cpu.is_active()
