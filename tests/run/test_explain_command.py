"""`clipx explain -- COMMAND`: the command itself, its session and its stand-ins, with verl's own main and with a
program in verl's place. Not covered: what an answer says (test_explain.py).
"""

import json
import os
import re
import signal
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
FAKE_VERL = """
import json, os, sys
with open(os.environ["CLIPX_EXPLAIN"], "a") as file:
    file.write(json.dumps({"text": sys.argv[1:], "stops": [], "arguments": sys.argv[1:]}) + "\\n")
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
    (tmp_path / "fake.py").write_text(FAKE_VERL)

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


MAIN_OF_THE_USER = """
from hydra import compose, initialize_config_module
from verl.trainer.main_ppo import run_ppo
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", ["+clipx=dgpo", "actor_rollout_ref.actor.use_dynamic_bsz=True"])
run_ppo(config)
"""
# As scripts of verl's recipes give their configuration to a task of their own.
TASK_OF_ITS_OWN = f"""
import sys
import hydra, ray, verl
@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def main(config):
    if not ray.is_initialized():
        ray.init(runtime_env={{"env_vars": {{}}}})
    runner = ray.remote(num_cpus=1)(Runner).remote()
    ray.get(runner.run.remote(config))
class Runner:
    def run(self, config):
        raise SystemExit("it ran")
sys.argv[1:] = {[*MAIN.split()[3:], "+clipx=acpo"]}
main()
"""
MAIN_OF_VERL = f"""
import sys
from verl.trainer.main_ppo import main
sys.argv[1:] = {[*MAIN.split()[3:], "+clipx=acpo", "clipx.alpha=-1"]}
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "code", "answer"),
    [
        (MAIN_OF_THE_USER, 0, "clipx_dgpo\n"),
        (f"import verl, ray\nray.init()\n{MAIN_OF_THE_USER}", 0, "clipx_dgpo\n"),
        (TASK_OF_ITS_OWN, 0, "clipx_acpo (+clipx=acpo)"),
        ("import verl, ray\nray.get(ray.put(1))", 1, "no configuration seen"),
        (MAIN_OF_VERL, 1, "stops: clipx.alpha=-1"),
    ],
    ids=[
        "a main of the user's own",
        "a main that starts Ray first",
        "a main with a task of its own",
        "a program that uses Ray",
        "verl's main",
    ],
)
def test_a_program_answers_under_the_variable_alone(run_fresh, tmp_path, program, code, answer):
    result = run_fresh(f"import os\nos.environ['{EXPLAIN}'] = '1'\n{program}", tmp_path)
    assert result.returncode == code and answer in result.stdout, result


PYTHON = sys.executable


@pytest.mark.slow
def test_a_program_that_starts_ray_and_ends_has_shown_no_configuration():
    # As it ends, which no fork of a server does.
    program = [PYTHON, "-c", "import verl, ray\nassert ray.init() is None and not ray.is_initialized()"]
    result = subprocess.run(program, env={**os.environ, EXPLAIN: "1"}, capture_output=True, text=True)
    assert result.returncode == 1 and "no configuration seen" in result.stdout, result


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (f"ray job submit --address http://x:8265 --no-wait -- {PYTHON} fake.py a=1", ["a=1"]),
        (f"srun -J test -w node1 --export=ALL -- {PYTHON} fake.py -- b", ["--", "b"]),
        (f"srun -N 2 -n8 --overlap --label --cpu-bind=none {PYTHON} fake.py c", ["c"]),
        ("srun -p gpu --container-image=x bash job.sh e 'f g'", ["e", "f g"]),
        (f"ray job submit --runtime-env verl/env.yaml env A=1 {PYTHON} fake.py d", ["d"]),
        # An environment's own programs come before PATH's.
        (f'PATH="$PWD/environment:$PATH"; ray job submit -- {PYTHON} fake.py h', ["h"]),
    ],
)
def test_a_launchers_command_runs_here(write, command, arguments):
    write("job.sh", f'#!/bin/bash\n{PYTHON} fake.py "$@"\n')
    environment = write("run.sh", command).parent / "environment"
    environment.mkdir()
    (environment / "ray").write_text("#!/bin/sh\nexit 9\n")
    (environment / "ray").chmod(0o755)
    results = clipx("--", "bash", "run.sh")
    assert results["runs"][0]["stops"] == []
    text = CliRunner().invoke(app, ["explain", "--", "bash", "run.sh"]).stdout.splitlines()
    assert text[-1 - len(arguments) : -1] == arguments and text[0].startswith("run here: ")


def test_what_would_act_elsewhere_is_only_named(write, tmp_path):
    commands = (
        "ray start --head",
        "sbatch x",
        "ssh host ls",
        "docker run x",
        "kubectl apply -f x",
        "pkill x",
        "wget x",
        "hf x",
    )
    write("keep", "")
    write("run.sh", "\n".join([*commands, "rm -rf keep", "mv keep kept", f"{PYTHON} fake.py 1", "sleep 9"]))
    results = clipx("--", "bash", "run.sh")
    assert results["stood_in"] == [*commands, "rm -rf keep", "mv keep kept"]
    assert (tmp_path / "keep").exists()


def is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_what_was_started_ends_in_the_background_and_in_a_session_of_its_own_too(write, tmp_path):
    write("run.sh", f"sleep 600 & echo $! >pids\nsetsid sleep 600 & echo $! >>pids\n{PYTHON} fake.py\nsleep 600\n")
    began = time.monotonic()
    clipx("--", "bash", "run.sh")
    assert time.monotonic() - began < 60
    # They were sent their signals, and die when the machine comes to it.
    while any(is_running(int(pid)) for pid in (tmp_path / "pids").read_text().split()):
        assert time.monotonic() - began < 60
    # What a script leaves in the background is waited for, if it is a run.
    write("run.sh", f"(sleep 2; {PYTHON} fake.py 1) >log 2>&1 &\n")
    assert len(clipx("--", "bash", "run.sh")["runs"]) == 1
    write("run.sh", f"setsid -f bash -c 'sleep 2; {PYTHON} fake.py 1' >log 2>&1\n")
    assert len(clipx("--", "bash", "run.sh")["runs"]) == 1


@pytest.mark.parametrize(
    "start",
    [
        'PATH=/nowhere\nuv run --frozen --extra vllm python3 -m verl.trainer.main_ppo "$@"\n',
        "echo 'error: Unable to find lockfile at `uv.lock`, but `--frozen` was provided.' >&2; exit 2\n",
    ],
)
def test_a_script_that_uv_cannot_start_has_a_short_answer(write, start):
    write("run.sh", f"set -x\nARGS=({' '.join(f'a.key_{number}=1' for number in range(200))})\n{start}")
    (reason,) = clipx("--", "bash", "run.sh", "+clipx=acpo", code=1)["stops"]
    assert "VERL_USE_UV=0" in reason and "`uv sync`" in reason and len(reason) < 600 and " uv" in reason


def test_a_command_that_takes_long_says_in_a_log_that_it_works(write, monkeypatch):
    write("run.sh", f"sleep 1; {PYTHON} fake.py\n")
    for seconds_of_silence, is_announced in ((0.2, True), (60, False)):
        monkeypatch.setattr("verl_clipx.common.command_line.SECONDS_OF_SILENCE", seconds_of_silence)
        result = CliRunner().invoke(app, ["explain", "--json", "--", "bash", "run.sh"])
        assert ("running the command" in result.stderr) == is_announced and json.loads(result.stdout)["runs"]


def test_what_gives_no_answer_says_why(write):
    write("run.sh", "echo what it said; exit 3\n")
    for command, reason in ((("bash", "run.sh"), "exit code 3"), (("true",), "it ended before")):
        results = clipx("--", *command, code=1)
        assert results["runs"] == [] and reason in results["stops"][0]
    assert "what it said" in clipx("--", "bash", "run.sh", code=1)["stops"][0]
    assert "write the whole command" in clipx("--", "+clipx=acpo", code=1)["error"]
    assert "no_such_program" in clipx("--", "no_such_program", code=1)["error"]
    result = CliRunner().invoke(app, ["explain"])
    assert result.exit_code == 2 and "clipx explain -- python -m verl.trainer.main_ppo" in result.output


# From what ends a command early to what follows the command that starts verl, and the first word that bash then misses.
ENDED_EARLY_BY = {
    "a comment": (" \\\n  # comment", "trainer.b=2"),
    "a comment with a backslash": (" \\\n  # comment \\", "trainer.b=2"),
    "an empty line": (" \\\n", "trainer.b=2"),
    "a missing backslash": ("", "trainer.b=2"),
    "a pipe's comment": (" \\\n  # comment", "+c=3"),
}


@pytest.mark.parametrize("cause", ENDED_EARLY_BY)
def test_a_command_that_ends_before_its_last_line_has_bashs_message(write, tmp_path, cause):
    between, missing = ENDED_EARLY_BY[cause]
    rest = '+c=3 "$@" | tee log' if cause == "a pipe's comment" else 'trainer.b=2 "$@" >kept'
    write("kept", "yes")
    write("run.sh", f"set -euxo pipefail\n{PYTHON} fake.py a=1{between}\n  {rest}\ntouch trained\n")
    stops = clipx("--", "bash", "run.sh", "+clipx=acpo", code=1)["stops"]
    line = 3 if cause == "a missing backslash" else 4
    assert stops[0].startswith(f"run.sh: line {line}: {missing}: command not found")
    assert not any('"$@"' in reason for reason in stops)
    assert [reason for reason in stops if "+clipx" in reason] == stops[1:]
    # Nothing of it ran.
    assert (tmp_path / "kept").read_text() == "yes" and not {"log", "trained"} & {*os.listdir(tmp_path)}
    # With --all bash says it itself, and goes on.
    if cause == "a comment":
        assert missing in clipx("--all", "--", "bash", "run.sh", code=1)["stops"][0]


def test_a_command_that_is_whole_is_not_called_cut(write):
    # A comment within an array, a variable before a command, and a program that is not installed here.
    array = f'ARGS=(\n  a=1\n  # comment\n  b=2\n)\n{PYTHON} fake.py "${{ARGS[@]}}" "$@"\n'
    for after in ("X=1 Y=2", "i=$((1 + 1))", "no_such_program x", "set -u; $UNSET a=1", "if [ 1 = 1 ]; then echo; fi"):
        write("run.sh", array + after)
        assert clipx("--", "bash", "run.sh", "+clipx=acpo")["stops"] == []


@pytest.mark.parametrize(
    ("script", "words", "reason"),
    [
        (
            'ENGINE=${1:-vllm}\nRUN name=$ENGINE "$@"',
            ["+clipx=acpo"],
            "verl gets name=+clipx=acpo. Put the script's own",
        ),
        (
            'shift 2\nRUN trainer.name=run_$2 "$@"',
            ["8", "x", "y", "clipx.alpha=2"],
            "verl gets trainer.name=run_clipx.",
        ),
        ('case "$1" in vllm) X=1 ;; esac\nRUN a=1', ["+clipx=acpo"], "did not reach verl"),
        ("RUN trainer.nnodes=1", ["trainer.nnodes=1", "+clipx=acpo"], "did not reach verl"),
        ("RUN trainer.nnodes=1", ["trainer.nnodes=1", "clipx.alpha=2"], "did not reach verl"),
        # Neither a variable nor a name of a script's own is an override.
        ("RUN trainer.nnodes=1", ["METHOD=acpo", "data=x"], None),
    ],
)
def test_an_override_that_a_script_keeps_or_reads_as_its_own_parameter_is_named(write, script, words, reason):
    nothing_stops = "Nothing in the configuration stops it."
    write("run.sh", script.replace("RUN", f"{PYTHON} fake.py") + f" '{nothing_stops}'\n")
    command = ("--", "env", "FOLDER=a.b", "bash", "run.sh", *words)
    stops = clipx(*command, code=0 if reason is None else 1)["stops"]
    if reason is None:
        assert stops == []
    else:
        (stop,) = stops
        assert stop.startswith(f"{words[-1]}: ") and reason in stop
    # Nor does the text end with what it prints where nothing stops a run.
    assert (nothing_stops in CliRunner().invoke(app, ["explain", *command]).stdout) == (reason is None)


def test_of_several_runs_only_the_first_is_explained_unless_all_are_asked_for(write):
    hint = "Only the first run is explained. If the command starts several, `clipx explain --all -- "
    write("run.sh", f"for seed in 1 2; do\n  {PYTHON} fake.py seed=$seed\ndone\n")
    for command, runs, has_hint in (
        (("--", "bash", "run.sh"), 1, True),
        (("--all", "--", "bash", "run.sh"), 2, False),
        (("--", PYTHON, "fake.py", "1"), 1, False),
    ):
        assert len(clipx(*command)["runs"]) == runs
        assert (hint in CliRunner().invoke(app, ["explain", *command]).stdout) == has_hint


# The files of a verl that would train.
FILES_OF_A_VERL = {
    "verl/__init__.py": "",
    "verl/trainer/__init__.py": "",
    "verl/trainer/main_ppo.py": "open('trained', 'w')\n",
}


def test_a_python_without_the_plugin_does_not_train_and_is_named(write, tmp_path, monkeypatch):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "other"], check=True)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    python = tmp_path / "other/bin/python3"
    results = clipx("--", str(python), "-m", "verl.trainer.main_ppo", code=1)
    assert results["stops"] == [f"no configuration seen: {python} has no verl and no verl-clipx."]
    (tmp_path / "other/lib").mkdir(exist_ok=True)
    (site,) = (tmp_path / "other/lib").glob("python*/site-packages")
    for name, text in FILES_OF_A_VERL.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    write("run.sh", f'export PATH={python.parent}:$PATH\npython3 -m verl.trainer.main_ppo a=1 "$@"\n')
    results = clipx("--", "bash", "run.sh", "+clipx=acpo", code=1)
    assert results["stops"] == [f"no configuration seen: {python} has verl and no verl-clipx."]
    assert not (tmp_path / "trained").exists()
    # As `uv run` sets it.
    monkeypatch.setenv("UV", "uv")
    assert "from which `uv sync` removes it" in clipx("--", "bash", "run.sh", code=1)["stops"][0]
    # The site's own customization runs as ever, and a program that can do without verl goes on.
    (site / "sitecustomize.py").write_text("import builtins\nbuiltins.site_value = 1\n")
    program = "import importlib.util, sys; importlib.util.find_spec('verl'); print('site', site_value); sys.exit(3)"
    assert "site 1" in clipx("--", str(python), "-c", program, code=1)["stops"][0]


def test_a_plugin_that_a_variable_leaves_out_is_named(write, tmp_path, monkeypatch):
    # In the working folder, from which Python imports first; it loads no plugin, as verl under this variable.
    for name, text in FILES_OF_A_VERL.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(name, text)
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    (reason,) = clipx("--", PYTHON, *MAIN.split()[1:], code=1)["stops"]
    assert "VERL_USE_EXTERNAL_PLUGINS=none leaves verl-clipx out" in reason and not (tmp_path / "trained").exists()


def test_a_missing_program_is_named_without_a_trace(write):
    overrides = " ".join(f"data.key{index}=value" for index in range(400))
    for script, shell in ((f"set -x\nno_uv run python {overrides}", "bash"), (f"no_uv run {overrides}", "sh")):
        write("run.sh", script)
        (reason,) = clipx("--", shell, "run.sh", code=1)["stops"]
        assert re.fullmatch(r"no configuration seen: run\.sh: .*no_uv:( command)? not found\.", reason), reason
    write("run.sh", f"echo {overrides}\necho {overrides}\n")
    assert len(clipx("--", "bash", "run.sh", code=1)["stops"][0]) < 1000


@pytest.mark.parametrize(
    "command",
    [
        f"env -i {PYTHON} trains.py",
        f"{PYTHON} -c 'import subprocess as s; s.run(\"{PYTHON} trains.py\".split(), env={{}})'",
    ],
)
def test_a_python_that_gets_no_variable_is_ended_before_it_trains(write, tmp_path, command):
    write("trains.py", "import time\ntime.sleep(20)\nopen('trained', 'w')\n")
    write("run.sh", f"{command}\n")
    (reason,) = clipx("--", "bash", "run.sh", code=1)["stops"]
    assert "trains.py: it got no CLIPX_EXPLAIN" in reason and not (tmp_path / "trained").exists()


def test_what_a_script_prints_may_be_large_or_no_text(write, tmp_path):
    write("run.sh", f"{PYTHON} -c 'print(\"x y \" * 10_000_000)'\necho its end; exit 3\n")
    began = time.monotonic()
    assert "its end" in clipx("--", "bash", "run.sh", code=1)["stops"][0] and time.monotonic() - began < 30
    (tmp_path / "run.sh").write_bytes(b"ray \xff\necho \xff\xfe: said; exit \xff\n")
    results = clipx("--", "bash", "run.sh", code=1)
    assert "said" in results["stops"][0] and results["stood_in"]
    # Line ends of Windows.
    write("run.sh", f'{PYTHON} fake.py a.b=1 "$@"\r\n')
    assert "sed -i" in clipx("--", "bash", "run.sh", "x.y=1", code=1)["stops"][0]


def test_a_preparation_that_fails_in_silence_is_named(write):
    write("run.sh", "set -e\nN=$(nvidia-smi -L | grep -c GPU)\ntest -f model/config.json\n")
    (reason,) = clipx("--", "bash", "run.sh", code=1)["stops"]
    assert re.search(r"The last command was run\.sh: line 2: \S+ -", reason), reason


# Scripts that wait for nodes or GPUs which never come while they are explained, by what makes the loop.
WAITING_LOOPS = {
    "while": "n=0\nwhile [ $n -lt 2 ]; do n=$(ray status | grep -c node_); sleep 1; done",
    "until": "until ray status | grep -q 2.node; do sleep 1; done",
    "for": "for i in $(seq 500); do ray list nodes | grep -q ALIVE && break; sleep 1; done",
    "timeout": "timeout 500 bash -c 'until ray status | grep -q node; do sleep 1; done'",
    "a missing program": "until [ $(no_sinfo -h | wc -l) -ge 2 ]; do sleep 1; done",
    "a function": "ready() { ssh head test -e up | grep -q up; }\nuntil ready; do sleep 1; done",
    "no sleep": "while [ $(ray list nodes | grep -c ALIVE) -lt 2 ]; do :; done",
}


@pytest.mark.slow
@pytest.mark.parametrize("loop", WAITING_LOOPS)
def test_a_script_that_waits_in_a_loop_ends_with_its_place(write, monkeypatch, loop):
    monkeypatch.setattr("verl_clipx.run.explain.SECONDS_OF_A_LOOP", 2.0)
    write("run.sh", f"{WAITING_LOOPS[loop]}\n{PYTHON} fake.py a=1\n")
    began = time.monotonic()
    (reason,) = clipx("--", "bash", "run.sh", code=1)["stops"]
    place = "ray list nodes: " if loop == "no sleep" else "sleep 1: "
    assert f"{place}the script waits here in a loop" in reason and EXPLAIN in reason, reason
    assert time.monotonic() - began < 120


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        # Single waits, and a wait for what the script itself started.
        "ray start --head\nsleep 2\nray status\nsleep 2\nray status\nsleep 2",
        "(PYTHON -c 'import time; time.sleep(7)'; touch ready) &\nuntil [ -e ready ]; do sleep 1; done",
        "for host in a b c d; do ssh $host ls; rm -f x; done",
    ],
)
def test_what_ends_by_itself_is_no_waiting_loop(write, monkeypatch, script):
    monkeypatch.setattr("verl_clipx.run.explain.SECONDS_OF_A_LOOP", 2.0)
    write("run.sh", f"{script.replace('PYTHON', PYTHON)}\n{PYTHON} fake.py a=1\n")
    assert clipx("--", "bash", "run.sh")["stops"] == []


@pytest.mark.parametrize(
    "script",
    [
        "set -e\nN=$(nvidia-smi -L | grep -c GPU)",
        "set -e\nN=$(expr $(ray list nodes | wc -l) \\* 8)",
        f'set -e\nN=$(ray list nodes | wc -l)\n{PYTHON} -c "print(8 % $N)"',
    ],
)
def test_a_script_that_cannot_go_on_with_a_count_of_0_says_so(write, script):
    write("run.sh", f"{script}\n{PYTHON} fake.py a=$N\n")
    (reason,) = clipx("--", "bash", "run.sh", code=1)["stops"]
    assert "0 was counted here" in reason


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT])
def test_a_signal_ends_what_was_started(write, tmp_path, number):
    write("run.sh", "sleep 601 & echo $! >children\nsetsid sleep 602 & echo $! >>children\necho >ready\nwait\n")
    (tmp_path / "temporary").mkdir()
    explaining = subprocess.Popen(
        [sys.executable, "-m", "verl_clipx.cli", "explain", "--", "bash", "run.sh"],
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
        # A shell that starts the tests with & makes them ignore two of these signals, and what is ignored stays so.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    try:
        began = time.monotonic()
        while not (tmp_path / "ready").exists():
            assert time.monotonic() - began < 60
            time.sleep(0.1)
        explaining.send_signal(number)
        assert explaining.wait(timeout=60) == 128 + number and os.listdir(tmp_path / "temporary") == []
        assert not any(is_running(int(pid)) for pid in (tmp_path / "children").read_text().split())
    finally:
        explaining.kill()


def test_what_was_started_ends_where_explain_is_killed(write, tmp_path):
    write("run.sh", "sleep 603 & echo $! >children\nsetsid sleep 604 & echo $! >>children\necho >ready\nsleep 605\n")
    (tmp_path / "temporary").mkdir()
    explaining = subprocess.Popen(
        [sys.executable, "-m", "verl_clipx.cli", "explain", "--", "bash", "run.sh"],
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
    )
    began = time.monotonic()
    while not (tmp_path / "ready").exists():
        assert time.monotonic() - began < 60
        time.sleep(0.1)
    assert os.listdir(tmp_path / "temporary") != []
    explaining.kill()
    explaining.wait()
    children = [int(pid) for pid in (tmp_path / "children").read_text().split()]
    while any(is_running(pid) for pid in children) or os.listdir(tmp_path / "temporary"):
        assert time.monotonic() - began < 120, "what explain started goes on, or its folder is left"
        time.sleep(0.1)


SECRET = "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH"


def test_no_credential_of_a_command_of_its_output_or_of_its_configuration_is_printed(write):
    address = "https://someone:hunter2@host/x"
    curl = f"curl -H 'Authorization: Bearer {SECRET}' {'x' * 60} {address}"
    write("run.sh", f"{curl}\n{PYTHON} fake.py own.token={SECRET}")
    write("fails.sh", f"set -x\nexport HF_TOKEN={SECRET}\necho {address} {SECRET}\nexit 1\n")
    write("lost.sh", f"{PYTHON} fake.py a=1\n")
    for words in (
        ("bash", "run.sh"),
        ("bash", "fails.sh"),
        ("bash", "lost.sh", f"+own.api_key={SECRET}", f"own.address={address}"),
        (f"HF_TOKEN={SECRET}", "python"),
        (f"./no/{SECRET}",),
    ):
        for options in ((), ("--json",)):
            output = CliRunner().invoke(app, ["explain", *options, "--", *words]).output
            assert "[redacted]" in output, output
            assert SECRET[:12] not in output and "hunter2" not in output, output
