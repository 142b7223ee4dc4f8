"""The Slurm job that is made up for a command that is explained, on the nodes that its script asks for.

None of these nodes exists. Stand-ins import this module without the packages of any environment, so that it may import
only the standard library.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

# The variable that a made-up job has, and a real one has not.
MADE_UP = "CLIPX_EXPLAIN_SLURM"
# The number of nodes, and of GPUs on each, if a script asks for none.
NODES = 2
GPUS = 8
JOB = "1000001"
ADDRESS = "10.0.0.{number}"

# The long names of sbatch's options, by the letter of the short one.
LETTERS = {
    "N": "nodes",
    "n": "ntasks",
    "c": "cpus-per-task",
    "G": "gpus",
    "J": "job-name",
    "p": "partition",
    "a": "array",
    "A": "account",
}
OTHER_NAMES = {"tasks-per-node": "ntasks-per-node"}
OPTION = re.compile(r"--(?P<name>[\w-]+)(?:=(?P<value>.*))?|-(?P<letter>[A-Za-z])(?P<rest>.*)")
DIRECTIVE = re.compile(r"#SBATCH\s+(?P<words>.*)")
COUNT = re.compile(r"(\d+)(?:-\d+)?$")
ASKS_FOR_ADDRESS = re.compile(r"-\w*[iI]\w*|--ip-address|--all-ip-addresses")
FIELDS = {"%T": "RUNNING", "%t": "R", "%L": "1:00:00", "%M": "0:01", "%i": JOB, "%A": JOB}


def options_of(words: Sequence[str]) -> dict[str, str]:
    """Return the values of sbatch's options by their long names; empty for an option without a value."""
    options = {}
    for index, word in enumerate(words):
        option = OPTION.fullmatch(word)
        if not option:
            continue
        if option["name"]:
            name = option["name"]
            value = option["value"]
        else:
            name = LETTERS.get(option["letter"], option["letter"])
            # Empty if the value is the next word, as in -N 2.
            value = option["rest"] or None
        if value is None:
            next_word = words[index + 1] if index + 1 < len(words) else ""
            value = "" if next_word.startswith("-") else next_word
        options[OTHER_NAMES.get(name, name)] = value
    return options


def directives_of(script: str) -> list[str]:
    """Return the words of a script's #SBATCH lines."""
    words = []
    for line in script.splitlines():
        if directive := DIRECTIVE.match(line):
            words += shlex.split(directive["words"], comments=True)
    return words


def count(value: str | None, default: int) -> int:
    """Return the number at the end of an option's value, such as 8 in gpu:h100:8; for a range, its lower end.

    Args:
        value: the option's value; None if the option is not given.
        default: the number if the value has none.
    """
    number = COUNT.search(value or "")
    return int(number[1]) if number else default


def variables_of(script: str, words: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that Slurm would set in the made-up job.

    Args:
        script: the text of the job's script.
        words: the arguments of sbatch. Its options win over those in the script.
    """
    options = {**options_of(directives_of(script)), **options_of(words)}
    nodes = count(options.get("nodes"), NODES)
    tasks = count(options.get("ntasks-per-node"), 1)
    if "gpus" in options and "gpus-per-node" not in options:
        gpus = max(count(options["gpus"], GPUS * nodes) // nodes, 1)
    elif "gpus-per-task" in options and "gpus-per-node" not in options:
        gpus = count(options["gpus-per-task"], GPUS) * tasks
    else:
        gpus = count(options.get("gpus-per-node") or gpus_of(options.get("gres", "")), GPUS)
    processors = count(options.get("cpus-per-task"), 1)
    listed = "node1" if nodes == 1 else f"node[1-{nodes}]"
    variables = {
        MADE_UP: "1",
        "SLURM_JOB_ID": JOB,
        "SLURM_JOBID": JOB,
        "SLURM_JOB_NAME": options.get("job-name", "job"),
        "SLURM_JOB_PARTITION": options.get("partition", "partition"),
        "SLURM_JOB_ACCOUNT": options.get("account", "account"),
        "SLURM_JOB_NODELIST": listed,
        "SLURM_NODELIST": listed,
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(count(options.get("ntasks"), nodes * tasks)),
        "SLURM_NPROCS": str(count(options.get("ntasks"), nodes * tasks)),
        "SLURM_NTASKS_PER_NODE": str(tasks),
        "SLURM_TASKS_PER_NODE": f"{tasks}(x{nodes})",
        "SLURM_CPUS_PER_TASK": str(processors),
        "SLURM_CPUS_ON_NODE": str(processors * tasks),
        "SLURM_JOB_CPUS_PER_NODE": f"{processors * tasks}(x{nodes})",
        "SLURM_GPUS_ON_NODE": str(gpus),
        "SLURM_GPUS_PER_NODE": str(gpus),
        "SLURM_GPUS": str(gpus * nodes),
        "SLURM_JOB_GPUS": ",".join(map(str, range(gpus))),
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURMD_NODENAME": "node1",
        "SLURM_SUBMIT_DIR": os.getcwd(),
        "SLURM_SUBMIT_HOST": "login1",
        "SLURM_CLUSTER_NAME": "cluster",
    }
    if "array" in options:
        first = re.match(r"\d+", options["array"])
        variables |= {"SLURM_ARRAY_JOB_ID": JOB, "SLURM_ARRAY_TASK_ID": first[0] if first else "0"}
    return variables


def gpus_of(resources: str) -> str:
    """Return the part of the value of --gres that is on GPUs, such as gpu:8; empty if there is none."""
    return next((part for part in resources.split(",") if part.partition(":")[0] == "gpu"), "")


def script_of(words: Sequence[str]) -> int | None:
    """Return the index of the script among the arguments of sbatch; None if there is no script among them."""
    for index, word in enumerate(words):
        if not word.startswith("-") and is_script(Path(word)):
            return index
    return None


def is_script(path: Path) -> bool:
    """Return whether there is a file that begins with #!, as sbatch wants a script to."""
    try:
        if not path.is_file():
            return False
        # A word of a command may name a large file, such as a checkpoint.
        with path.open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def expand_nodes(node_list: str) -> list[str]:
    """Return the names of the nodes in a list such as node[01-02,4],other.

    A name has at most one bracket, at its end, as in the lists that `variables_of` makes.
    """
    names = []
    # A name, and perhaps a bracket behind it. Commas within the bracket do not separate names.
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", node_list):
        prefix, bracket, numbers = part.partition("[")
        if not bracket:
            names.append(part)
            continue
        for number_range in numbers.rstrip("]").split(","):
            first, _, last = number_range.partition("-")
            # Leading zeros stay.
            width = len(first)
            names += [f"{prefix}{number:0{width}}" for number in range(int(first), int(last or first) + 1)]
    return names


def reply(program: str, words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return what a program prints about the made-up job and its nodes; empty if it prints nothing.

    Args:
        program: the program's name.
        words: its arguments.
        environment: the variables of the process, with those of `variables_of` inside the job.
    """
    node_list = environment.get("SLURM_JOB_NODELIST", f"node[1-{NODES}]")
    if program == "scontrol" and [word.rstrip("s") for word in words[:2]] == ["show", "hostname"]:
        return "\n".join(expand_nodes(words[2] if len(words) > 2 else node_list))
    if program == "scontrol" and words[:2] == ["show", "job"]:
        return (
            f"JobId={JOB} JobState=RUNNING NodeList={node_list} NumNodes={len(expand_nodes(node_list))} BatchHost=node1"
        )
    if program == "squeue":
        return squeue(words, node_list)
    if program in ("srun", "ssh") and "hostname" in words:
        address = any(ASKS_FOR_ADDRESS.fullmatch(word) for word in words[words.index("hostname") + 1 :])
        return ADDRESS.format(number=1) if address else "node1"
    if MADE_UP in environment and program == "ray" and words[:1] == ["status"]:
        return status_of_ray(len(expand_nodes(node_list)), int(environment.get("SLURM_GPUS_ON_NODE", GPUS)))
    if MADE_UP in environment and program == "getent" and words[:1] in (["hosts"], ["ahosts"], ["ahostsv4"]):
        number = re.search(r"\d*$", words[-1])[0] or "1"
        return f"{ADDRESS.format(number=number)} {words[-1]}"
    return ""


def squeue(words: Sequence[str], node_list: str) -> str:
    """Return squeue's row of the job.

    Args:
        words: the arguments of squeue, perhaps with a format.
        node_list: the job's nodes, such as node[1-2].
    """
    options = options_of(words)
    row_format = options.get("o", options.get("format", "%i %T"))
    fields = {**FIELDS, "%N": node_list, "%D": str(len(expand_nodes(node_list)))}
    return re.sub(r"%\.?\d*([A-Za-z])", lambda match: fields.get(f"%{match[1]}", ""), row_format)


def status_of_ray(nodes: int, gpus: int) -> str:
    """Return what `ray status` prints of a cluster with this number of nodes and of GPUs on each."""
    active = "\n".join(f" 1 node_{number}" for number in range(1, nodes + 1))
    return f"Node status\nActive:\n{active}\nPending:\n (no pending nodes)\nResources\n 0.0/{nodes * gpus}.0 GPU"
