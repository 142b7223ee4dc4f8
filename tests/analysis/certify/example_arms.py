"""Made-up arms for `clipx certify`: the folders of sound runs, in which a test changes what it asks about."""

import hashlib
import json

from tests.analysis.runs.commands import clipx
from tests.analysis.runs.example_runs import write_validation
from verl_clipx.run.record import as_json, record_of

STEPS = range(1, 6)
ACTOR = "actor_rollout_ref.actor"
CONFIGURATION = {
    "data": {"seed": 1, "train_batch_size": 16, "train_files": "train.parquet", "val_files": "test.parquet"},
    "actor_rollout_ref": {
        "actor": {
            "loss_agg_mode": "token-mean",
            "ppo_mini_batch_size": 4,
            "ppo_epochs": 1,
            # Which has no rounding worth a floor.
            "fsdp_config": {"mixed_precision": {"param_dtype": "fp32"}},
            "policy_loss": {"loss_mode": "clipx_grpo"},
            "optim": {"lr": 1e-6},
        },
        "model": {"path": "models/base"},
        "rollout": {"n": 8, "name": "vllm"},
    },
    "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync", "sampler": {"max_off_policy_threshold": 8}}},
    "reward": {"custom_reward_function": {"path": "reward.py", "name": "score"}},
    "clipx": {"method": "grpo", "clip_low": 0.8, "clip_high": 1.2},
}
SOUND_VERSIONS = {"verl": "0.9.1", "verl-clipx": "0.1.0", "torch": "2.9.0", "transformers": "4.57.0", "vllm": "0.11.0"}
ACPO = {f"{ACTOR}.policy_loss.loss_mode": "clipx_acpo", "clipx.method": "acpo", "clipx.alpha": 3.0}


def name_of(*parts):
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def write_run(folder, seed=1, change=None, loss=None, keep=lambda line: line, record=None, validations=None):
    """Writes a run's folder: five steps of a sound run, with changed keys, and lines as `keep` says."""
    folder.mkdir(parents=True)
    configuration = json.loads(json.dumps(CONFIGURATION))
    for key, value in ({"data.seed": seed} | (loss or {}) | (change or {})).items():
        *nodes, last = key.split(".")
        node = configuration
        for part in nodes:
            node = node.setdefault(part, {})
        node[last] = value
    lines = []
    # The arms have the same weights in the first step only.
    offset = int(name_of(folder.name), 16) % 97 * 1e-5
    for step in STEPS:
        data = {
            "critic/score/mean": 0.3 + 0.01 * step + 0.001 * seed + offset * (step > 1),
            "response_length/mean": 40.0 + step * seed,
            "critic/advantages/max": 1.5 + 0.1 * step * seed,
            "actor/clipx/clip_fraction_low": 0.01,
            "actor/clipx/clip_fraction_high": 0.002,
            "training/off_policy/trajectory_staleness/max": 0.0,
            "actor/lr": 1e-6,
        } | ({"actor/clipx/receipt": 0.0, "actor/clipx/receipt_failed": 0.0} if step == 1 else {})
        batch = {
            "prompts": name_of(seed, step),
            "responses": name_of(folder.name, step),
            "rows": name_of(folder.name, step, "rows"),
            **{"groups": 16, "sequences": 128, "tokens": 128 * (40 + step * seed), "distinct": 120},
            "versions": [step - 1, step - 1],
        }
        # Two updates have the batch's rows between them.
        half = int(name_of(folder.name, step, "half"), 16)
        batch["updates"] = [f"{of % 2**64:016x}" for of in (half, int(batch["rows"], 16) - half)]
        line = keep({"step": step, "data": data, "batch": batch})
        lines.append(json.dumps({key: value for key, value in line.items() if value is not None}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    kept = as_json(record_of(configuration)) | {"versions": SOUND_VERSIONS, "commit": "c" * 40}
    for name in ("model", "data", "validation", "reward"):
        kept[name] |= {"hash": name_of(name)}
    for key, value in (record or {}).items():
        part, _, name = key.partition("/")
        kept[part] = {**kept[part], name: value} if name else value
    (folder / "metrics.run.json").write_text(json.dumps(kept))
    write_validation(folder / "validation", validations or {5: [(1.0,), (0.0,)]})
    return folder


def certified(tmp_path, *, first=({}, {}), second=({}, {}), words=(), code):
    """What certify says of two runs, seeds 1 and 2, in each arm, each written with some arguments."""
    arms = [
        [write_run(tmp_path / f"{name}-seed{seed}", **{"seed": seed, "loss": loss} | given) for seed, given in given_of]
        for name, loss, given_of in (("grpo", {}, enumerate(first, 1)), ("acpo", ACPO, enumerate(second, 1)))
    ]
    said = clipx("certify", *arms[0], "vs", *arms[1], *words, code=code)
    return {
        line.split(": ")[1]: line
        for line in said.replace(" passed: ", "\npassed: ")
        .replace(" failed: ", "\nfailed: ")
        .replace(" not recorded: ", "\nnot recorded: ")
        .splitlines()[1:]
    } | {"": said}
