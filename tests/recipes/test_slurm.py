"""The Slurm job, under stand-ins for srun and scontrol and a sbatch that runs scripts as Slurm does. Covers: options of
the job, node list, head address, arguments of `ray symmetric-run` (read back by Ray's own parser), containers, requeue
before the time limit and after a lost node, exit code, resume. Not covered: Slurm, several nodes (docs/dev/launching.md
has what was run).
"""

import os
import re
import signal
import subprocess
import time

import pytest

from .shell import RECIPES, ROOT, Machine, options_of, stand_in

SCRIPT = RECIPES / "cluster" / "slurm.sh"
RECIPE = "recipes/acpo/run_qwen2.5_7b_fsdp.sh"
GUARD = ["python3", "recipes/cluster/while_all_nodes_live.py"]

RUN_JOB_HERE = stand_in("sbatch")
ANSWER_FOR_SCONTROL = stand_in("scontrol")
RUN_STEP_HERE = stand_in("srun")


@pytest.fixture
def cluster(tmp_path):
    return Machine(tmp_path / "machine", sbatch=RUN_JOB_HERE, scontrol=ANSWER_FOR_SCONTROL, srun=RUN_STEP_HERE)


def submit(cluster, *words, nodes=3, **settings):
    return cluster.run(cluster.commands / "sbatch", f"--nodes={nodes}", str(SCRIPT), *words, **settings)


def step_of(cluster):
    return next(call for call in cluster.calls if call[0] == "srun" and "hostname" not in call)


def payload_of(step):
    payload = step[step.index("--") + 1 :]
    # Before it, a command that writes the file which says that the run has begun.
    assert payload[:2] == ["bash", "-c"] and payload[4].endswith("/runs/.begun-4242")
    return payload[5:]


def test_the_job_asks_for_what_the_run_needs():
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", SCRIPT.read_text(), re.MULTILINE))
    assert options["ntasks-per-node"] == "1" and {"requeue", "exclusive"} <= options.keys()
    # A requeued job goes on in the same log.
    assert options["open-mode"] == "append"
    # To the script alone: a signal to the steps would end the run at once.
    assert re.fullmatch(r"B:USR1@\d+", options["signal"])


def test_every_node_of_the_list_starts_ray_as_its_own_parser_reads_and_the_first_is_the_head(cluster):
    from ray.scripts.symmetric_run import curate_and_validate_ray_start_args, symmetric_run

    # The first IPv4 address counts.
    result = submit(cluster, "METHOD=acpo", RECIPE, "trainer.save_freq=5", ADDRESSES="fd00::7 10.0.0.7")
    assert result.returncode == 0, result.stderr
    (address_call,) = [call for call in cluster.calls if "hostname" in call]
    assert options_of(address_call)["nodelist"] == "gpu07"
    step = step_of(cluster)
    srun_options = options_of(step[: step.index("ray")])
    assert (srun_options["nodes"], srun_options["ntasks"], srun_options["ntasks-per-node"]) == ("3", "3", "1")
    # Otherwise the exit code is that of the tasks which srun ends, not the run's.
    assert srun_options["kill-on-bad-exit"] == "0" and int(srun_options["wait"]) > 0
    assert "nodes: gpu07 gpu08 gpu09; head: gpu07 (10.0.0.7); start 1 of this job" in result.stdout
    assert step[step.index("ray") + 1] == "symmetric-run"
    ray_arguments = step[step.index("symmetric-run") + 1 : step.index("--")]
    context = symmetric_run.make_context("_", list(ray_arguments), resilient_parsing=True)
    # 20000 + 4242
    assert (context.params["address"], context.params["min_nodes"]) == ("10.0.0.7:24242", 3)
    start_arguments = curate_and_validate_ray_start_args(list(ray_arguments))
    assert start_arguments == ["--num-gpus=8", "--num-cpus=96", "--disable-usage-stats"]


def test_the_recipe_runs_on_the_head_with_all_nodes_and_so_does_a_second_start(cluster):
    words = ["METHOD=dapo", "SETUP=/shared/env.sh", RECIPE, "trainer.save_freq=5", "data.val_files=[a b,c]"]
    submit(cluster, *words)
    first = step_of(cluster)
    with_variables = ["env", "RAY_ADDRESS=10.0.0.7:24242", "env", "NNODES=3", *words[:2]]
    assert payload_of(first) == [*with_variables, *GUARD, "bash", *words[2:]]
    # The same run folder and resume_mode=auto (test_launch.py) then make it go on from the last checkpoint.
    cluster.record.unlink()
    result = submit(cluster, *words, SLURM_RESTART_COUNT="2")
    assert step_of(cluster) == first and "start 3 of this job" in result.stdout
    # Each start has a secret of its own; srun hands the environment on to all nodes.
    secrets = (cluster.commands.parent / "secrets").read_text().splitlines()
    assert len({*secrets}) == 2 and all(re.fullmatch("token [0-9a-f]{64}", secret) for secret in secrets)
    cluster.record.unlink()
    submit(cluster, RECIPE, nodes=1, HEAD_ADDRESS="10.9.9.9", RAY_PORT="7000")
    assert not any("hostname" in call for call in cluster.calls)
    assert "10.9.9.9:7000" in step_of(cluster) and "NNODES=1" in step_of(cluster)


def test_pyxis_and_apptainer_start_ray_in_the_container_with_the_repository_mounted(cluster):
    submit(cluster, RECIPE, CONTAINER_IMAGE="image.sqsh", CONTAINER_MOUNTS="/shared:/shared")
    pyxis = step_of(cluster)
    options = options_of(pyxis[: pyxis.index("ray")])
    assert options["container-image"] == "image.sqsh"
    assert options["container-mounts"] == f"{ROOT}:{ROOT},/shared:/shared"
    cluster.record.unlink()
    submit(cluster, RECIPE, CONTAINER_IMAGE="image.sif", CONTAINER_RUNTIME="apptainer", ACTIVATE="env.sh")
    words = step_of(cluster)
    start = words.index("apptainer")
    container = ["apptainer", "exec", "--nv", "--bind", f"{ROOT}:{ROOT}", "--pwd", str(ROOT), "image.sif"]
    # Inside the container, the environment before Ray.
    assert words[start : start + 10] == [*container, "bash", "-c"]
    assert words.index("env.sh") + 1 == words.index("ray")


def test_verl_gets_one_makers_devices_and_the_activated_environment(cluster, tmp_path):
    """verl 0.9.1 refuses to start with both variables."""
    (tmp_path / "my env.sh").write_text("export ACTIVATED=yes\n")
    submit(cluster, RECIPE, ACTIVATE=str(tmp_path / "my env.sh"))
    step = step_of(cluster)
    before_ray = step[step.index("bash") : step.index("ray")]
    show = 'echo "$ACTIVATED ${CUDA_VISIBLE_DEVICES-unset} ${ROCR_VISIBLE_DEVICES-unset}"'
    cuda, rocr = ({f"{maker}_VISIBLE_DEVICES": "0,1"} for maker in ("CUDA", "ROCR"))
    for set_by_slurm, expected_devices in ((cuda | rocr, "0,1 unset"), (rocr, "unset 0,1")):
        result = subprocess.run(
            [*before_ray, "bash", "-c", show],
            env={"PATH": os.environ["PATH"], **set_by_slurm},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.stdout == f"yes {expected_devices}\n", result.stderr


@pytest.mark.parametrize(
    ("variables", "code", "requeued", "expected_message"),
    [
        ({"SRUN_EXIT": "7"}, 7, False, ""),
        # A lost node, though not without end.
        ({"SRUN_EXIT": "75", "SLURM_RESTART_COUNT": "18"}, 75, True, "a node was lost: the job is requeued"),
        ({"SRUN_EXIT": "75", "SLURM_RESTART_COUNT": "19"}, 75, False, "MAX_STARTS=20"),
        # `ray symmetric-run` ends with 0 where Ray did not start: the job fails, and a later start may try again.
        ({"RAY_DOES_NOT_START": "1", "SLURM_RESTART_COUNT": "0"}, 1, False, "Ray did not start on all nodes"),
        ({"RAY_DOES_NOT_START": "1", "SLURM_RESTART_COUNT": "1"}, 1, True, "Ray did not start on all nodes"),
    ],
)
def test_the_exit_code_is_the_runs_and_what_may_go_on_is_requeued(cluster, variables, code, requeued, expected_message):
    result = submit(cluster, RECIPE, **variables)
    assert result.returncode == code and expected_message in result.stdout + result.stderr
    assert (["scontrol", "requeue", "4242"] in cluster.calls) == requeued


def test_the_file_that_says_that_the_run_has_begun_is_written_before_it_and_removed(cluster, tmp_path):
    submit(cluster, RECIPE)
    step = step_of(cluster)
    before_recipe = step[step.index("--") + 1 :][:5]
    assert not os.path.exists(before_recipe[4])
    before_recipe[4] = str(tmp_path / "begun")
    result = subprocess.run([*before_recipe, "sh", "-c", f"ls {tmp_path}; exit 7"], capture_output=True, text=True)
    assert (result.returncode, "begun" in result.stdout) == (7, True)


@pytest.mark.slow
@pytest.mark.parametrize("requeue_exit", ["0", "1"])
def test_before_the_time_limit_the_job_goes_back_into_the_queue(cluster, requeue_exit):
    home = cluster.commands.parent
    job = subprocess.Popen(
        ["bash", str(cluster.commands / "sbatch"), str(SCRIPT), RECIPE],
        cwd=ROOT,
        env=cluster.environment(UNTIL_REQUEUED="1", REQUEUE_EXIT=requeue_exit),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while not (home / "step_started").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(job.pid, signal.SIGUSR1)
    output, error = job.communicate(timeout=30)
    assert [call for call in cluster.calls if call[:2] == ["scontrol", "requeue"]] == [["scontrol", "requeue", "4242"]]
    assert "time limit near: the job is requeued" in output
    assert ("submit the same command again" in error) == (requeue_exit == "1")
    # It waited for the step, which ended as one that was told to.
    assert job.returncode == 143
