"""Hashes of settings and sources: what changes them, and what does not. The comparison in a worker is in
tests/training/worker/test_receipt_sources.py.
"""

import sys

import pytest

from verl_clipx.losses.methods import BUILT_IN
from verl_clipx.run import identity
from verl_clipx.run.config import build
from verl_clipx.run.identity import differences_from, identity_of

LOSS = """
from verl_clipx import register_loss

@register_loss("tests_identity")
def wide(ratio, *, slope: float = 1.0):
    return {factor} * slope * ratio
"""


def test_each_method_has_settings_of_its_own_and_the_same_each_time():
    hashes = [identity_of(build(name))["settings"] for name in BUILT_IN]
    assert len({*hashes}) == len(BUILT_IN)
    assert hashes == [identity_of(build(name))["settings"] for name in BUILT_IN]


@pytest.mark.parametrize(
    "change",
    [
        dict(clip_high=1.3),
        dict(dual_clip=None),
        dict(mask={"rule": "icepop"}),
        dict(shaping={"rule": "fipo"}),
        dict(pull={"estimator": "k2", "coefficient": 0.3}),
        dict(hold={"target": "clip_fraction", "value": 0.1}),
        dict(scope="lagged"),
        dict(compile=False),
    ],
    ids=str,
)
def test_what_changes_the_training_changes_the_settings(change):
    before = identity_of(build("grpo"))
    after = identity_of(build("grpo", **change))
    assert differences_from(before, after) == ["the settings of the clipx node are others"]


@pytest.mark.parametrize("change", [dict(receipt="warn"), dict(missing_state="fresh")], ids=str)
def test_what_does_not_change_the_training_changes_nothing(change):
    assert differences_from(identity_of(build("grpo")), identity_of(build("grpo", **change))) == []


def test_another_source_of_a_loss_of_the_users_own_is_another_function(tmp_path, monkeypatch):
    hashes = []
    for factor in (1, 2):
        folder = tmp_path / str(factor)
        folder.mkdir()
        (folder / "identity_losses.py").write_text(LOSS.format(factor=factor))
        with monkeypatch.context() as patched:
            patched.syspath_prepend(folder)
            hashes.append(identity_of(build(function="identity_losses:wide")))
        del sys.modules["identity_losses"]
    assert hashes[0]["settings"] == hashes[1]["settings"]
    assert differences_from(*hashes)[0].startswith("the source of clipx.function is another")
    assert identity_of(build("grpo"))["function"] == ""


def test_any_changed_file_of_the_package_is_another_package(tmp_path, monkeypatch):
    (tmp_path / "part").mkdir()
    for name in ("__init__.py", "part/a.py"):
        (tmp_path / name).write_text("value = 1")
    monkeypatch.setattr(identity.verl_clipx, "__file__", str(tmp_path / "__init__.py"))

    def digest_after_writing(name, text):
        (tmp_path / name).write_text(text)
        identity.package_digest.cache_clear()
        return identity.package_digest()

    before = digest_after_writing("part/a.py", "value = 1")
    changed = digest_after_writing("part/a.py", "value = 2")
    with_new_module = digest_after_writing("part/b.py", "")
    with_notes = digest_after_writing("notes.txt", "no code")
    identity.package_digest.cache_clear()
    assert len({before, changed, with_new_module}) == 3
    assert with_notes == with_new_module


def test_what_the_driver_did_not_say_is_not_compared():
    assert differences_from({}, identity_of(build("grpo"))) == []
