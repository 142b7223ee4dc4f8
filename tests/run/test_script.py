"""`clipx explain -- bash run.sh`: what a script would train, without running it.

Covers, from the command line: variables, arrays, `"$@"`, several commands, words with spaces, what prepares a run and
what launches Python; and what is refused with its line: redirection, cd, other programs, a network, variables of the
environment, endless scripts with all that they left in the background, no Python, overrides that are dropped.
Not covered: what explain says of a
command (test_explain.py); that verl's examples expand as before (scripts/verl_example_overrides.py).
"""

import contextlib
import os
import subprocess
import time

import psutil
import pytest
from typer.testing import CliRunner

from verl_clipx.cli import app
from verl_clipx.run.script import commands_of, put_programs

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
        ("docker run x", "docker: command not found"),
        ("read x < /dev/tcp/127.0.0.1/9", "bash would reach a network"),
        ("while read x; do :; done </dev/udp/127.0.0.1/9", "bash would reach a network"),
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


# What a shell without restrictions would do for a script that cannot write by itself.
OUTSIDE = "[[ $- == *r* ]] || echo run >{0}/run"


@pytest.mark.parametrize(
    "line",
    [
        f"export PS4='$({OUTSIDE})' SHELLOPTS; set -x",
        f"printf() {{{{ {OUTSIDE}; }}}}; export -f printf",
        f"export PROMPT_COMMAND='{OUTSIDE}' BASHOPTS SHELLOPTS",
        "export BASH_ENV={0}/outside.sh",
        "export ENV={0}/outside.sh; set -o posix; export SHELLOPTS",
        "export IFS=/ CDPATH=/ GLOBIGNORE=x; PATH={0}",
    ],
)
def test_what_a_script_exports_is_run_by_no_program(script, line, tmp_path):
    (tmp_path / "outside.sh").write_text(OUTSIDE.format(tmp_path))
    path = script(f"{line.format(tmp_path)}\npython3 -c x\nmkdir x\ncat x | tee y\n{TRAINS} a=1\n")
    with contextlib.suppress(ValueError):
        commands_of(["bash", path])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("program", ["python3", "ray", "mkdir", "tee"])
def test_a_stand_in_takes_nothing_from_its_environment(program, tmp_path):
    # As root, or from a restricted shell, bash passes only some of this on. A stand-in ignores all of it.
    outside, record = tmp_path / "outside.sh", tmp_path / "record"
    outside.write_text(OUTSIDE.format(tmp_path))
    exported = {
        "SHELLOPTS": "xtrace:posix",
        "PS4": f"$({OUTSIDE})".format(tmp_path),
        "ENV": outside,
        "BASH_ENV": outside,
    }
    functions = dict.fromkeys(("printf", "exec", ":"), f"() {{ {OUTSIDE.format(tmp_path)}; }}")
    put_programs(tmp_path / "programs", record)
    done = subprocess.run(
        [tmp_path / "programs" / program, "a=1"],
        env=exported | {f"BASH_FUNC_{name}%%": body for name, body in functions.items()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert not (tmp_path / "run").exists() and "+" not in done.stderr
    assert record.exists() == (program in ("python3", "ray"))


@pytest.mark.parametrize(
    "line",
    [
        "export LD_PRELOAD={0}/code.so",
        "LD_PRELOAD={0}/code.so cat x",
        'declare -x "LD_""AUDIT={0}/code.so"',
        "declare -n other=LD_LIBRARY_PATH; export other; other={0}",
        "printf -v LD_PRELOAD %s {0}/code.so; export LD_PRELOAD",
        "read -r LD_PRELOAD <<<{0}/code.so; export LD_PRELOAD",
        "load() {{ local -x LD_PRELOAD={0}/code.so; cat x; }}; load",
        "set -a; for GCONV_PATH in {0}; do cat x; done",
        "export LOCPATH={0} LC_ALL=own",
        "export LD_DEBUG=all LD_DEBUG_OUTPUT={0}/run",
        "export LD_PROFILE=libc.so.6 LD_PROFILE_OUTPUT={0}",
        "export GLIBC_TUNABLES=glibc.malloc.check=3",
        "unset LD_PRELOAD; export LD_PRELOAD={0}/code.so",
    ],
)
def test_a_variable_that_makes_programs_load_code_is_refused_with_its_line(script, line, tmp_path):
    path = script(f"# A comment.\n{line.format(tmp_path)}\n{TRAINS} a=1\n")
    with pytest.raises(ValueError, match=r"line 2, .*(LD_|GCONV_|LOC|GLIBC_)\w*: (cannot unset: )?readonly variable"):
        commands_of(["bash", path])
    assert sorted(os.listdir(tmp_path)) == ["run.sh"]


def test_variables_of_the_environment_are_not_there(script, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    path = script(f'set -u\n{TRAINS} key="$WANDB_API_KEY"\n')
    with pytest.raises(ValueError, match=r"line 2, .*WANDB_API_KEY: unbound variable"):
        commands_of(["bash", path])
    (words,) = commands_of(["bash", script(f'{TRAINS} home="$HOME" key="${{WANDB_API_KEY:-}}"\n')])
    assert words[-1] == "key=" and words[-2] != f"home={os.environ['HOME']}"


def test_what_prepares_a_run_does_nothing(script, tmp_path):
    prepares = "nvidia-smi\nray stop --force\nray start --head\npip install x\ngit pull\nhf download x\nrm -rf x\n"
    tries = "curl x\nif python3 -c 'import torch_npu'; then exit 1; fi"
    path = script(f"set -euo pipefail\n{prepares}{tries}\n{TRAINS} a=1")
    assert commands_of(["bash", path]) == [["python3", "-m", "verl.trainer.main_ppo", "a=1"]]
    assert sorted(os.listdir(tmp_path)) == ["run.sh"]


def test_what_launches_python_is_explained(script):
    (words,) = commands_of(["bash", script(f"ray start --head\nray job submit --no-wait -- {TRAINS} a=1\n")])
    assert words[0] == "ray" and words[-3:] == ["-m", "verl.trainer.main_ppo", "a=1"]


def test_an_argument_reaches_no_network_either(script):
    with pytest.raises(ValueError, match=r"argument '/dev/tcp/h/80', .*bash would reach a network"):
        commands_of(["bash", script(f'read x < "$1"\n{TRAINS}\n'), "/dev/tcp/h/80"])


def test_an_endless_script_ends(script):
    with pytest.raises(ValueError, match=r"did not finish within 0\.5 s"):
        commands_of(["bash", script("while true; do :; done\n")], seconds=0.5)


@pytest.mark.parametrize("before", ["", "set -m\n"], ids=["in its process group", "in a group of its own"])
@pytest.mark.parametrize("after", [f"{TRAINS} a=1 2>&-", "while true; do :; done"], ids=["done", "timed out"])
def test_nothing_is_left_in_the_background(script, before, after):
    path = script(f"{before}while true; do :; done 2>&- >&- <&- &\n{after}\n")
    try:
        commands_of(["bash", path], seconds=0.5)
    except ValueError as error:
        assert "did not finish" in str(error)
    time.sleep(0.1)
    assert not [process for process in psutil.process_iter() if path in cmdline(process)]


def cmdline(process):
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bash"], "no script is named"),
        (["bash", "-c", "true"], "no script is named"),
        (["sh", "no.sh"], "does not exist"),
    ],
)
def test_what_is_no_script_is_refused(words, said):
    with pytest.raises(ValueError, match=said):
        commands_of(words)


def test_a_script_without_python_is_refused(script):
    with pytest.raises(ValueError, match=r"does not start Python \(exit code 3\)"):
        commands_of(["bash", script("exit 3\n")])


@pytest.mark.parametrize("end", ["", "$1", " $2"], ids=["no arguments", "glued", "the second only"])
def test_a_script_that_drops_overrides_is_refused(script, end):
    path = script(f"{TRAINS} {BATCHES}{end}\n")
    refused = CliRunner().invoke(app, ["explain", "--", "bash", path, "+clipx=bapo", "~trainer.logger"])
    assert refused.exit_code == 1
    message = " ".join(refused.output.split())
    dropped = "+clipx=bapo" if end == " $2" else "+clipx=bapo ~trainer.logger"
    assert f"drops {dropped}, because it does not pass its arguments on" in message
    assert 'End its python command with "$@".' in message


def test_an_argument_that_is_no_override_may_be_the_scripts_own(script):
    path = script(f'nodes=$1; shift\n{TRAINS} trainer.nnodes=$nodes "$@"\n')
    (words,) = commands_of(["bash", path, "2", "+clipx=bapo"])
    assert words[-2:] == ["trainer.nnodes=2", "+clipx=bapo"]
