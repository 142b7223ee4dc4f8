"""`clipx explain` of Slurm scripts and Ray jobs as people write them, with a program in verl's place: what they ask
Slurm, what starts inside, and whether a Ray job gets the plugin. Not covered: Slurm itself.
"""

import json
import sys

import pytest
from typer.testing import CliRunner

from verl_clipx.cli import app
from verl_clipx.run import slurm

PYTHON = sys.executable
# In verl's place: it answers with its arguments, as a run of the plugin's.
FAKE_VERL = """
import json, os, sys
answer = {"text": sys.argv[1:], "stops": [], "arguments": sys.argv[1:], "of_the_plugin": True}
with open(os.environ["CLIPX_EXPLAIN"], "a") as file:
    file.write(json.dumps(answer) + "\\n")
"""
TRAIN = f"{PYTHON} fake.py trainer.nnodes=$SLURM_JOB_NUM_NODES trainer.n_gpus_per_node=$SLURM_GPUS_ON_NODE"
TWO_NODES_OF_EIGHT = ["trainer.nnodes=2", "trainer.n_gpus_per_node=8"]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file into the working folder, outside any job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "fake.py").write_text(FAKE_VERL)

    def write(name, text):
        (tmp_path / name).write_text(text)

    return write


def explain(*words, code=0):
    """The object that `clipx explain --json` prints."""
    result = CliRunner().invoke(app, ["explain", "--json", "--", *words])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def arguments(*words):
    """What verl's main gets from a command."""
    (run,) = explain(*words)["runs"]
    return run["arguments"]


NAME_THE_HEAD = """
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
nodes_array=($nodes)
head_node=${nodes_array[0]}
worker_num=$((SLURM_JOB_NUM_NODES - 1))
[[ ${#nodes_array[@]} == "$SLURM_JOB_NUM_NODES" ]]
"""
# By kind: what a script does before it starts verl.
PREPARATIONS = {
    "the address of the head by srun": NAME_THE_HEAD
    + 'ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)\n[[ $ip == 10.* ]]',
    "the address of the head by getent": NAME_THE_HEAD
    + "ip=$(getent hosts \"$head_node\" | awk '{print $1}')\n[[ $ip == 10.* ]]",
    "the address of the head by ssh": NAME_THE_HEAD
    + "ip=$(ssh \"$head_node\" hostname -I | awk '{print $1}')\n[[ -n $ip ]]",
    "an array read by mapfile": 'mapfile -t hosts < <(scontrol show hostnames)\n[[ ${hosts[1]} == "node2" ]]',
    "workers in a loop, with long pauses": NAME_THE_HEAD
    + 'srun --overlap -N 1 -n 1 -w "$head_node" ray start --head --port=6379 --block &\nsleep 60\n'
    + 'for ((i = 1; i <= worker_num; i++)); do\n  srun -N 1 -n 1 -w "${nodes_array[$i]}" ray start --block &\n'
    + "  sleep 30\ndone",
    "modules and an environment": "module purge\nmodule load cuda/12.4\nml gcc\nconda activate verl",
    "the state of the job": '[[ $(squeue -h -j "$SLURM_JOB_ID" -o %T) == RUNNING ]]\n'
    '[[ $(squeue -h -j "$SLURM_JOB_ID" -o "%N") == "$SLURM_JOB_NODELIST" ]]\n'
    'scontrol show job "$SLURM_JOB_ID" | grep -q NumNodes=',
    "a wait until all nodes of Ray are there": "until [[ $(ray status | grep -c ' 1 node_') -ge $SLURM_NNODES ]]\n"
    "do\n  sleep 5\ndone",
    "numbers of the job": "(( SLURM_NNODES * SLURM_GPUS_PER_NODE == 16 ))\n[[ -d $SLURM_SUBMIT_DIR ]]\n"
    "[[ -n $SLURM_CPUS_PER_TASK ]]\n(( SLURM_NTASKS > 0 )); (( SLURM_PROCID == 0 )); (( SLURM_NODEID == 0 ))",
}


@pytest.mark.parametrize("preparation", PREPARATIONS)
def test_a_script_gets_through_to_verl(write, preparation):
    lines = "#!/bin/bash\n#SBATCH --job-name=dapo\n#SBATCH --exclusive\nset -euo pipefail\n"
    write("job.sh", f"{lines}{PREPARATIONS[preparation]}\n{TRAIN}\n")
    assert arguments("sbatch", "job.sh") == TWO_NODES_OF_EIGHT


@pytest.mark.parametrize(
    ("lines", "options", "nodes_and_gpus"),
    [
        ("#SBATCH --nodes=4\n#SBATCH --gres=gpu:h100:4", "", (4, 4)),
        ("#SBATCH -N 3\n#SBATCH --gpus-per-node=a100:2  # as many as there are", "", (3, 2)),
        ("#SBATCH -N4 -G 16", "", (4, 4)),
        ("#SBATCH --nodes 1\n##SBATCH --nodes 9\n#SBATCH --gpus-per-task=1 --tasks-per-node=8", "", (1, 8)),
        ("#SBATCH --nodes=2-4\n#SBATCH --mem=0", "", (2, 8)),
        ("#SBATCH --nodes=2", "--nodes=8 --gpus-per-node 8 -p gpu", (8, 8)),
    ],
)
def test_a_scripts_lines_and_the_commands_options_say_how_many_nodes_and_gpus(write, lines, options, nodes_and_gpus):
    write("job.sh", f"#!/bin/bash -l\n{lines}\n{TRAIN}\n")
    nodes, gpus = nodes_and_gpus
    expected = [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={gpus}"]
    assert arguments("sbatch", *options.split(), "job.sh") == expected
    if not options:
        # As it is explained where sbatch is left out.
        assert arguments("bash", "job.sh") == expected


def test_sbatch_within_a_script_starts_its_script_once(write):
    write("job.sh", f'#!/bin/bash\n#SBATCH -N 2\nsbatch --dependency=afterany:$SLURM_JOB_ID job.sh\n{TRAIN} "$@"\n')
    write("submit.sh", "for seed in 1 2; do sbatch --export=ALL job.sh data.seed=$seed; done\n")
    assert arguments("bash", "submit.sh") == [*TWO_NODES_OF_EIGHT, "data.seed=1"]
    write("submit.sh", f"sbatch -N 2 <<'END'\n#!/bin/bash\n#SBATCH --gpus-per-node=8\n{TRAIN}\nEND\n")
    assert arguments("bash", "submit.sh") == TWO_NODES_OF_EIGHT
    write("submit.sh", f'sbatch -N 2 --wrap "{PYTHON} fake.py a=1"\n')
    assert arguments("bash", "submit.sh") == ["a=1"]


def test_the_options_on_the_first_line_of_a_script_hold(write):
    for options, reaches_verl in (("-l", True), ("-e", False), ("-le", False)):
        write("job.sh", f"#!/bin/bash {options}\n#SBATCH -N 2\nfalse\n{TRAIN}\n")
        answer = explain("sbatch", "job.sh", code=0 if reaches_verl else 1)
        assert len(answer["runs"]) == (1 if reaches_verl else 0), options
    write("submit.sh", f"sbatch -N 2 <<'END'\n#!/bin/bash -e\nfalse\n{TRAIN}\nEND\n")
    assert explain("bash", "submit.sh", code=1)["runs"] == []


@pytest.mark.parametrize(
    "start",
    [
        "srun --container-image=image.sqsh --container-mounts=/data:/data bash inner.sh",
        "apptainer exec --nv --bind /data image.sif bash inner.sh",
        "singularity run --nv image.sif bash inner.sh",
        "salloc -N 2 bash inner.sh",
    ],
)
def test_what_starts_inside_is_explained(write, start):
    write("inner.sh", f"{PYTHON} fake.py b=1\n")
    write("job.sh", f"#!/bin/bash\n#SBATCH -N 2\n{start}\n")
    answer = explain("sbatch", "job.sh")
    assert answer["runs"][0]["arguments"] == ["b=1"]
    text = CliRunner().invoke(app, ["explain", "--", "sbatch", "job.sh"]).stdout
    assert "run here: sbatch job.sh" in text and f"run here: {start.split()[0]}" in text


def test_what_a_container_of_other_paths_starts_has_a_hint(write):
    write(
        "job.sh", "#!/bin/bash\n#SBATCH -N 2\ndocker run --gpus all -v $PWD:/workspace image bash /workspace/run.sh\n"
    )
    stops = explain("sbatch", "job.sh", code=1)["stops"]
    assert any("put `clipx explain --` in front of it inside the container" in reason for reason in stops)


@pytest.mark.slow
def test_a_wait_that_never_ends_is_ended_with_its_line(write):
    write("job.sh", f"#!/bin/bash\n#SBATCH -N 2\nuntil [[ -e joined ]]; do\n  sleep 5\ndone\n{TRAIN}\n")
    (reason,) = explain("sbatch", "job.sh", code=1)["stops"]
    assert "job.sh: line 4: sleep 5" in reason and "waits here in a loop" in reason


TRAIN_ACPO = f"{PYTHON} fake.py +clipx=acpo clipx.scope=mini_batch"


@pytest.mark.parametrize(
    ("options", "lacks_plugin"),
    [
        ("--working-dir .", True),
        ("--runtime-env env.yaml", True),
        ("""--runtime-env-json '{"env_vars": {"NCCL_DEBUG": "WARN"}}'""", True),
        ("""--runtime-env-json '{"py_modules": ["/wheels/verl_clipx-0.1.0-py3-none-any.whl"]}'""", False),
        ("""--runtime-env-json='{"pip": ["verl-clipx"]}'""", False),
        ("""--runtime-env-json='{"pip": "needs.txt"}'""", False),
        ("""--runtime-env-json='{"env_vars": {"PYTHONPATH": "/shared/clipx"}}'""", False),
        ("--runtime-env with.yaml", False),
        ("--working-dir code", False),
    ],
)
def test_a_ray_job_without_the_plugin_is_remarked_on(write, tmp_path, options, lacks_plugin):
    write("env.yaml", "working_dir: ./\nenv_vars:\n  NCCL_DEBUG: WARN\n")
    write("with.yaml", "py_modules:\n  - /wheels/verl_clipx-0.1.0-py3-none-any.whl\n")
    write("needs.txt", "verl-clipx\n")
    (tmp_path / "code" / "verl_clipx").mkdir(parents=True)
    write("run.sh", f'ray job submit --address http://head:8265 {options} -- {TRAIN_ACPO} "$@"\n')
    remarks = explain("bash", "run.sh")["remarks"]
    output = CliRunner().invoke(app, ["explain", "--", "bash", "run.sh"]).stdout
    assert ("names verl-clipx" in output) == lacks_plugin
    if lacks_plugin:
        (remark,) = remarks
        assert remark.startswith("nothing that `ray job submit` gives the job")
    else:
        assert remarks == []


def test_a_node_list_with_ranges_is_expanded_to_its_names():
    assert slurm.expand_nodes("gpu[01-03,07],login1") == ["gpu01", "gpu02", "gpu03", "gpu07", "login1"]
