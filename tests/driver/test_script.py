"""`clipx explain -- bash run.sh`: what a script would train, without running it.

Covers, from the command line: variables, arrays, `"$@"`, several commands, words with spaces; and what is refused with
its line: redirection, cd, other programs, variables of the environment, endless scripts, no Python. Not covered: what
explain says of a command (test_explain.py).
"""

import os

import pytest
from typer.testing import CliRunner

from verl_clipx.cli import app
from verl_clipx.driver.script import commands_of

TRAINS = "python3 -m verl.trainer.main_ppo"


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "run.sh"
        path.write_text(text)
        return str(path)

    return write


def test_a_script_is_expanded_by_bash_itself(script):
    path = script(
        "set -xeuo pipefail\nlow=0.1\nshared=(data.train_batch_size=8 'a.b=two words')\nmkdir -p logs\n"
        "name=$(basename /x/{y}.sh)\n"
        f'{TRAINS} "${{shared[@]}}" \\\n  clip=$low name="$name" "$@" 2>&1 | tee logs/log.txt\n'
    )
    (words,) = commands_of(["bash", path, "+clipx=acpo", ""])
    assert words[:3] == ["python3", "-m", "verl.trainer.main_ppo"]
    assert words[3:] == ["data.train_batch_size=8", "a.b=two words", "clip=0.1", "name={y}.sh", "+clipx=acpo", ""]


def test_it_explains_what_the_script_would_train(script):
    path = script(f'mode=token-mean\n{TRAINS} actor_rollout_ref.actor.loss_agg_mode=$mode {BATCHES} "$@"\n')
    shown = CliRunner().invoke(app, ["explain", "--", "bash", path, "+clipx=acpo", "clipx.alpha=2"])
    assert shown.exit_code == 0, shown.output
    assert "clipx: clipx_acpo (+clipx=acpo), scope mini_batch, alpha=2 (group: 3)" in shown.output


BATCHES = " ".join(
    [
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        "algorithm.adv_estimator=grpo",
    ]
)


def test_every_command_of_a_script_is_explained(script):
    path = script(f"for group in grpo acpo; do {TRAINS} {BATCHES} +clipx=$group; done\n")
    shown = CliRunner().invoke(app, ["explain", "--", "bash", path])
    assert "clipx_grpo" in shown.output and "clipx_acpo" in shown.output


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("echo here > here.txt", "restricted: cannot redirect output"),
        (f"{TRAINS} >log.txt", "restricted: cannot redirect output"),
        ("cd /", "cd: restricted"),
        ("/bin/rm -rf x", "restricted: cannot specify"),
        ("rm -rf x", "rm: command not found"),
        ("curl example.org", "curl: command not found"),
        ("PATH=/bin", "PATH: readonly variable"),
    ],
)
def test_what_needs_more_is_refused_with_its_line(script, line, said, tmp_path):
    path = script(f"# A comment.\n{line}\n{TRAINS} +clipx=acpo\n")
    refused = CliRunner().invoke(app, ["explain", "--", "bash", path])
    assert refused.exit_code == 1
    message = " ".join(refused.output.split())
    assert "line 2" in message and said in message
    assert sorted(os.listdir(tmp_path)) == ["run.sh"]


def test_variables_of_the_environment_are_not_there(script, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    path = script(f'set -u\n{TRAINS} key="$WANDB_API_KEY"\n')
    with pytest.raises(ValueError, match=r"line 2, .*WANDB_API_KEY: unbound variable"):
        commands_of(["bash", path])
    (words,) = commands_of(["bash", script(f'{TRAINS} home="$HOME" key="${{WANDB_API_KEY:-}}"\n')])
    assert words[-1] == "key=" and words[-2] != f"home={os.environ['HOME']}"


def test_an_endless_script_ends(script):
    with pytest.raises(ValueError, match=r"not done within 0\.5 s"):
        commands_of(["bash", script("while true; do :; done\n")], seconds=0.5)


@pytest.mark.parametrize(
    ("words", "said"),
    [(["bash"], "name a script"), (["bash", "-c", "true"], "name a script"), (["sh", "no.sh"], "no such")],
)
def test_what_is_no_script_is_refused(words, said):
    with pytest.raises(ValueError, match=said):
        commands_of(words)


def test_a_script_without_python_is_refused(script):
    with pytest.raises(ValueError, match=r"starts no Python \(exit code 3\)"):
        commands_of(["bash", script("exit 3\n")])
