"""`clipx explain -- COMMAND`: the command itself, its session and its stand-ins, with verl's own main and with a
program in verl's place. Not covered: what an answer says (test_explain.py).
"""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest
from typer.testing import CliRunner

from tests.claims.verl_examples.examples import examples, outcomes
from verl_clipx.cli import app
from verl_clipx.run.explain import EXPLAIN

# In verl's place: it answers with its arguments.
FAKE = """
import json, os, sys
with open(os.environ["CLIPX_EXPLAIN"], "a") as file:
    nodes = os.environ.get("SLURM_NNODES")
    file.write(json.dumps({"text": sys.argv[1:], "stops": [], "nodes": nodes, "arguments": sys.argv[1:]}) + "\\n")
"""
MAIN = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_dynamic_bsz=True"


def clipx(*words, code=0):
    """The object that `clipx explain --json` prints."""
    result = CliRunner().invoke(app, ["explain", "--json", *words])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file into the working folder, in which fake.py stands for verl."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fake.py").write_text(FAKE)

    def write(name, text):
        (tmp_path / name).write_bytes(text.encode())
        return tmp_path / name

    return write


@pytest.mark.slow
def test_a_script_of_verls_with_preparations_and_a_heredoc(write, tmp_path):
    # Any that verl composes, and in which a method takes verl's keys over.
    example = next(part for part in examples() if outcomes()[part.name].get("grpo", "").startswith("clip_low"))
    arguments = " \\\n    ".join(f"'{word}'" for word in example.arguments)
    write("prep.py", "open('prepared', 'w').write('yes')\n")
    write("keep", "")
    write(
        "run.sh",
        "set -xeuo pipefail\nnvidia-smi\nray stop --force\nrm -rf keep\npip install verl\npython3 prep.py\n"
        f"python3 - <<'END'\nprint('a heredoc')\nEND\npython3 -m verl.trainer.main_ppo {arguments} \"$@\"\n",
    )
    results = clipx("--", "bash", "run.sh", "+clipx=grpo")
    assert results["runs"][0]["loss_mode"] == "clipx_grpo"
    assert results["stood_in"] == ["ray stop --force", "rm -rf keep", "pip install verl"]
    assert {path.name for path in tmp_path.iterdir()} == {"fake.py", "prep.py", "run.sh", "keep", "prepared"}


@pytest.mark.slow
def test_a_job_of_slurms_and_windows_line_ends_which_would_stop_a_run(write):
    step = f"srun --nodes=2 -n 2 --overlap {MAIN} trainer.nnodes=$SLURM_NNODES $ALL"
    # A critic and LoRA, for which verl itself would ask the hub and vLLM.
    critic = "algorithm.adv_estimator=gae critic.model.path=some/critic critic.ppo_micro_batch_size_per_gpu=4"
    lora = "actor_rollout_ref.rollout.name=vllm actor_rollout_ref.model.lora_rank=8"
    write("params.sh", f"ALL='+clipx=acpo {critic} {lora}'\n")
    write("job.sh", f"#SBATCH --nodes=2\nsource params.sh\n{step}\n")
    results = clipx("--", "sbatch", "--partition", "gpu", "job.sh")
    assert results["runs"][0]["loss_mode"] == "clipx_acpo" and results["stops"] == []
    assert [command.split()[0] for command in results["stood_in"]] == ["sbatch", "srun"]
    write("run.sh", f"set -e\n{MAIN} \\\n  +clipx=acpo\n".replace("\n", "\r\n"))
    results = clipx("--", "bash", "run.sh", code=1)
    assert results["runs"][0]["stops"] == [] and "CRLF" in results["stops"][0]


@pytest.mark.slow
def test_a_main_of_the_users_own(write):
    composing = """
        from hydra import compose, initialize_config_module
        from verl.trainer.main_ppo import run_ppo
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("ppo_trainer", ["+clipx=dgpo", "actor_rollout_ref.actor.use_dynamic_bsz=True"])
        run_ppo(config)
    """
    write("own.py", "\n".join(line[8:] for line in composing.splitlines()))
    assert clipx("--", "python", "own.py")["runs"][0]["loss_mode"] == "clipx_dgpo"
    write("own.py", "import verl\nimport ray\nray.init()\n")
    results = clipx("--", "python", "own.py", code=1)
    assert results["runs"][0]["loss"] == "no configuration seen"


@pytest.mark.slow
def test_supervised_training_and_the_variable_alone(write):
    results = clipx("--", "python", "-m", "verl.trainer.sft_trainer")
    assert results["runs"][0]["loss"].startswith("no policy loss")
    done = subprocess.run(
        [*MAIN.replace("python3", sys.executable).split(), "+clipx=acpo", "clipx.alpha=-1"],
        env={**os.environ, EXPLAIN: "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "stops: clipx.alpha=-1" in done.stdout


PYTHON = sys.executable


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (f"ray job submit --address http://x:8265 --no-wait -- {PYTHON} fake.py a=1", ["a=1"]),
        (f"ray symmetric-run --address h:1 --min-nodes 2 -- {PYTHON} fake.py b", ["b"]),
        (f"srun -N 2 -n8 --overlap --label --cpu-bind=none {PYTHON} fake.py c", ["c"]),
        (f"sbatch --wrap '{PYTHON} fake.py d'", ["d"]),
        ("sbatch -N 3 --exclusive job.sh e 'f g'", ["e", "f g"]),
        # An environment's own programs come before PATH's.
        (f'PATH="$PWD/environment:$PATH"; ray job submit -- {PYTHON} fake.py h', ["h"]),
    ],
)
def test_a_launchers_command_runs_here(write, command, arguments):
    write("job.sh", f'#!/bin/bash\n#SBATCH --nodes=2\n{PYTHON} fake.py "$@"\n')
    (environment := write("run.sh", command).parent / "environment").mkdir()
    (environment / "ray").write_text("#!/bin/sh\nexit 9\n")
    (environment / "ray").chmod(0o755)
    results = clipx("--", "bash", "run.sh")
    assert results["runs"][0]["stops"] == []
    text = CliRunner().invoke(app, ["explain", "--", "bash", "run.sh"]).stdout.splitlines()
    assert text[-len(arguments) :] == arguments and text[0].startswith("run here: ")
    if "-N 3" in command:
        assert results["runs"][0]["nodes"] == "3"


def test_what_would_act_elsewhere_is_only_named(write, tmp_path):
    names = ("ray start --head", "ssh host ls", "docker run x", "kubectl apply -f x", "pkill -9 x", "wget x", "hf x")
    write("keep", "")
    write("run.sh", "\n".join([*names, "rm -rf keep", "mv keep kept", f"{PYTHON} fake.py 1", "sleep 9"]))
    results = clipx("--", "bash", "run.sh")
    assert results["stood_in"] == [*names, "rm -rf keep", "mv keep kept"]
    assert (tmp_path / "keep").exists()
    write("run.sh", f"mv keep kept\n{PYTHON} fake.py 1\n{PYTHON} fake.py 2\n")
    results = clipx("--all", "--run-preparations", "--", "bash", "run.sh")
    assert (results["stood_in"], len(results["runs"])) == ([], 2) and (tmp_path / "kept").exists()


def test_the_session_ends_with_its_background_processes(write, tmp_path):
    write("run.sh", f"sleep 600 & echo $! >pid\n{PYTHON} fake.py\nsleep 600\n")
    began = time.monotonic()
    clipx("--", "bash", "run.sh")
    assert time.monotonic() - began < 60
    pid = int((tmp_path / "pid").read_text())
    # It was sent its signal, and dies when the machine comes to it.
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - began < 60
    # What a script leaves in the background is waited for, if it is a run.
    write("run.sh", f"(sleep 2; {PYTHON} fake.py 1) >log 2>&1 &\n")
    assert len(clipx("--", "bash", "run.sh")["runs"]) == 1


def test_overrides_that_a_script_keeps_to_itself_are_named(write):
    write("run.sh", f"{PYTHON} fake.py trainer.nnodes=1\n")
    for lost in ("+clipx=acpo", "clipx.alpha=2"):
        (why,) = clipx("--", "bash", "run.sh", "trainer.nnodes=1", lost, code=1)["stops"]
        assert why.startswith(f"{lost}: did not reach verl")
    # Neither a variable nor a name of a script's own is an override.
    clipx("--", "env", "FOLDER=a.b", "bash", "run.sh", "METHOD=acpo", "data=x")


def test_what_gives_no_answer_says_why(write):
    write("run.sh", "echo what it said; exit 3\n")
    for command, said in ((("bash", "run.sh"), "exit code 3"), (("true",), "it ended before")):
        results = clipx("--", *command, code=1)
        assert results["runs"] == [] and said in results["stops"][0]
    assert "what it said" in clipx("--", "bash", "run.sh", code=1)["stops"][0]
    assert "write the whole command" in clipx("--", "+clipx=acpo", code=1)["error"]
    assert "no_such_program" in clipx("--", "no_such_program", code=1)["error"]
    result = CliRunner().invoke(app, ["explain"])
    assert result.exit_code == 2 and "clipx explain -- python -m verl.trainer.main_ppo" in result.output
