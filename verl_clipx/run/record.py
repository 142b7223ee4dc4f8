"""The record of a run: the driver writes it beside the log, and whoever reads a run reads its fields.

`record_of` makes a record from any configuration that verl prints, so that a run without the plugin has one too. What
the configuration does not say is None in it. docs/record.md lists the fields. Importing this is cheap.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_clipx.common.files import EMPTY
from verl_clipx.common.secrets import redact
from verl_clipx.losses.base.parameters import NODE
from verl_clipx.losses.base.tolerances import TOLERANCES
from verl_clipx.losses.groups import OBSERVE
from verl_clipx.run import keys
from verl_clipx.run.kept_values import hash_of, is_name, kept_configuration, kept_value
from verl_clipx.run.sampling import Correction, Sampling
from verl_clipx.run.schedule import Schedule, recorded_schedule
from verl_clipx.run.trainer import Trainer, trainer_of

# The number of the form of a record's file. An older record has no number, and is read by its configuration. Form 1 has
# texts where form 2 has hashes. Form 3 has fields that are derived from the configuration in a record of form 2.
SCHEMA = 3
# Keys of the clipx node that say which loss it is, or how it is built.
CHOOSES_LOSS = ("method", "function", "_target_")
# The nodes in the clipx node that change a method.
MODIFIERS = ("shaping", "mask", "select", "update", "hold", "pull")
FSDP = ("fsdp", "fsdp2")
# verl's short names of dtypes.
PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "16": "float16", "fp32": "float32", "32": "float32"}


@dataclass(frozen=True)
class Loss:
    """The policy loss.

    Args:
        mode: verl's loss_mode.
        method: the plugin's method, "observe" under +clipx=observe; None without a clipx node, or for a loss of the
            user's own.
        function: a loss of the user's own, as package.module:name.
        group: the group that was chosen, as in +clipx=<group>.
        parameters: the other keys of the clipx node, by their dotted names in it.
        modifiers: the keys of each node that changes the method, by the node's name, such as mask.
        taken: by parameter, for each that took a value over: `key`, verl's clip key by its name below the actor;
            `given`, the value of that key; `value`, the value that the parameter got.
        unused: by full key, the values of verl's clip keys that are set and that the method does not read.
        widths: the values of verl's clip keys, by their names below the actor.
        uncompiled_by: the first of verl's keys that switches torch.compile off, which clipx.compile=auto follows; None
            if none does.
    """

    mode: str | None = None
    method: str | None = None
    function: str | None = None
    group: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    modifiers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    taken: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unused: Mapping[str, Any] = field(default_factory=dict)
    widths: Mapping[str, Any] = field(default_factory=dict)
    uncompiled_by: str | None = None

    @property
    def is_ours(self) -> bool:
        """Return whether the run trains a loss of the plugin, or of the user's own through it."""
        has_bounds = any(f"clip_{side}" in self.parameters for side in ("low", "high"))
        return self.function is not None or has_bounds or self.method not in (None, OBSERVE)


@dataclass(frozen=True)
class Batch:
    """The sizes of a rollout batch and of its updates.

    Args:
        prompts: the number of prompts in a rollout batch.
        responses: the number of responses to each prompt.
        mini_batch: the number of prompts in an update.
        epochs: how often a rollout batch is trained on.
    """

    prompts: int | None = None
    responses: int | None = None
    mini_batch: int | None = None
    epochs: int | None = None


@dataclass(frozen=True)
class Length:
    """The numbers of steps and epochs over the data after which the run ends, and between checkpoints.

    Args:
        steps: the number of the last step.
        epochs: the number of epochs over the data.
        rows: the most rows of the training data that are used; below 0: all.
        save_every: the number of steps between checkpoints; 0 or less: none is kept.
        critic_warmup: the number of the first step that trains the policy. Earlier steps train only the critic.
    """

    steps: int | None = None
    epochs: int | None = None
    rows: int | None = None
    save_every: int | None = None
    critic_warmup: int | None = None


@dataclass(frozen=True)
class Seeds:
    """The seeds of the data's order, of verl's loader of mini-batches, and of the rollout engine."""

    data: int | None = None
    loader: int | None = None
    rollout: int | None = None


@dataclass(frozen=True)
class Optimizer:
    """The optimizer of the policy.

    Args:
        rate: the learning rate.
        schedule: verl's name for the schedule of the rate.
        warmup_steps: the number of steps over which the rate rises; 0 or below: `warmup_ratio` counts.
        warmup_ratio: the share of all steps over which the rate rises.
        weight_decay: the weight decay, which is multiplied by the rate.
        clip_gradient: the norm to which a larger gradient is scaled down.
    """

    rate: float | None = None
    schedule: str | None = None
    warmup_steps: int | None = None
    warmup_ratio: float | None = None
    weight_decay: float | None = None
    clip_gradient: float | None = None


@dataclass(frozen=True)
class Terms:
    """What verl adds to the policy loss and to the rewards.

    Args:
        entropy: the coefficient of the entropy bonus.
        kl_loss: whether a KL loss to the reference model is added.
        kl_loss_coefficient: the coefficient of the KL loss.
        kl_loss_kind: verl's name for the estimate of the KL.
        kl_in_reward: whether the KL to the reference model is subtracted from the rewards.
        kl_in_reward_coefficient: the coefficient of the KL in the rewards.
        distillation: whether a distillation loss is added.
        distillation_coefficient: the coefficient of the distillation loss.
        distillation_kind: verl's name for the distillation loss.
    """

    entropy: float | None = None
    kl_loss: bool | None = None
    kl_loss_coefficient: float | None = None
    kl_loss_kind: str | None = None
    kl_in_reward: bool | None = None
    kl_in_reward_coefficient: float | None = None
    distillation: bool | None = None
    distillation_coefficient: float | None = None
    distillation_kind: str | None = None


@dataclass(frozen=True)
class Limits:
    """The limits on what is sampled, in tokens.

    Args:
        prompt: the longest prompt.
        response: the longest response.
        generated: the longest response by the rollout engine's own setting. The smaller of this and `response` counts.
        context: the longest prompt and response together, by the rollout engine's context.
    """

    prompt: int | None = None
    response: int | None = None
    generated: int | None = None
    context: int | None = None


@dataclass(frozen=True)
class Engine:
    """An engine that computes: that of the rollout, or that of the training.

    Args:
        name: verl's name for it.
        precision: the dtype in which it computes.
        parallel: by each way in which ranks share a model or a sequence, such as tensor, the number of ranks that do.
    """

    name: str | None = None
    precision: str | None = None
    parallel: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Machines:
    """What the run trains on.

    Args:
        device: cuda, cpu or another kind of device that verl knows.
        nodes: the number of nodes.
        devices_a_node: the number of devices on each node.
        accelerators: the kinds of accelerators in the Ray cluster.
    """

    device: str | None = None
    nodes: int | None = None
    devices_a_node: int | None = None
    accelerators: tuple[str, ...] = ()


@dataclass(frozen=True)
class Content:
    """A model, data or a reward that a run reads.

    Args:
        paths: its paths in the order of the configuration.
        name: the name of a reward's function; None for a model or data.
        hash: a hash by which the content is told apart (`content.py`); None if the content could not be read, or the
            record is older than the hash.
        parameters: the number of a model's parameters; None for data or a reward, and if its weights were not in a
            folder of the driver's machine.
    """

    paths: tuple[str, ...] = ()
    name: str | None = None
    hash: str | None = None
    parameters: int | None = None


@dataclass(frozen=True)
class Resumption:
    """The checkpoint that verl is told to go on from when it starts.

    Args:
        mode: verl's resume_mode: disable for none, auto for the newest in the run's folder, if there is one, and
            resume_path for the one at `path`.
        path: the path of the checkpoint that the configuration names; None if it names none.
    """

    mode: str | None = None
    path: str | None = None

    @property
    def is_named(self) -> bool:
        """Return whether the run goes on from the checkpoint at `path`."""
        return self.mode == keys.NAMED_CHECKPOINT


@dataclass(frozen=True)
class ReceiptResult:
    """What the worker's receipt found in the first rollout batch.

    Args:
        difference: the largest difference between a gradient and the announced one, as a share of a token's gradient;
            None until the metrics of the first rollout batch are logged, and if nothing finite could be compared.
        tolerance: the largest difference that rounding in the engine's precision explains; None if that is unknown.
        failed: the number of checks that did not hold; None until those metrics are logged, or if the worker does not
            count them.
    """

    difference: float | None = None
    tolerance: float | None = None
    failed: int | None = None


@dataclass(frozen=True)
class RunRecord:
    """What a run is. None, or an empty mapping, stands for what is not known.

    Args:
        schema: the number of the form of the file.
        started: when the run started, as year-month-day hour:minute and time zone.
        commit: the commit of the checkout that the plugin ran from.
        versions: the versions of distributions by name.
        line: the line that the run printed of itself.
        loss, trainer, batch, schedule, length, seeds: see their classes.
        estimator: verl's name for the estimator of the advantages.
        aggregation: verl's loss_agg_mode.
        scale_factor: verl's loss_scale_factor, by which seq-mean-token-sum-norm divides.
        correction, optimizer, terms, sampling, limits: see their classes.
        rollout: the engine that samples.
        training: the engine that trains.
        machines: see its class.
        model, critic, data, validation, reward: what the run reads. If the model's tokenizer is elsewhere, it is the
            second path of `model`.
        resumption: see its class.
        start: the checkpoint that the run began from; without a path if it began from the model.
        files: by dotted key, a hash of the content of each other file or model that the configuration names; None if it
            could not be read.
        receipt: see its class.
        untested: the run's options that no test has passed.
        identity: the driver's hashes of the settings, of the plugin's files and of a loss of the user's own.
        configuration_hash: the hash of the whole configuration, in a record that has only parts of it.
        configuration: what is kept of the configuration's values, by dotted key (`kept_values.py`).
    """

    schema: int = SCHEMA
    started: str | None = None
    commit: str | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    line: str | None = None
    loss: Loss = field(default_factory=Loss)
    trainer: Trainer = field(default_factory=Trainer)
    batch: Batch = field(default_factory=Batch)
    schedule: Schedule = field(default_factory=Schedule)
    length: Length = field(default_factory=Length)
    seeds: Seeds = field(default_factory=Seeds)
    estimator: str | None = None
    aggregation: str | None = None
    scale_factor: float | None = None
    correction: Correction = field(default_factory=Correction)
    optimizer: Optimizer = field(default_factory=Optimizer)
    terms: Terms = field(default_factory=Terms)
    sampling: Sampling = field(default_factory=Sampling)
    limits: Limits = field(default_factory=Limits)
    rollout: Engine = field(default_factory=Engine)
    training: Engine = field(default_factory=Engine)
    machines: Machines = field(default_factory=Machines)
    model: Content = field(default_factory=Content)
    critic: Content = field(default_factory=Content)
    data: Content = field(default_factory=Content)
    validation: Content = field(default_factory=Content)
    reward: Content = field(default_factory=Content)
    resumption: Resumption = field(default_factory=Resumption)
    start: Content = field(default_factory=Content)
    files: Mapping[str, str | None] = field(default_factory=dict)
    receipt: ReceiptResult = field(default_factory=ReceiptResult)
    untested: tuple[str, ...] = ()
    identity: Mapping[str, str] = field(default_factory=dict)
    configuration_hash: str | None = None
    configuration: Mapping[str, Any] = field(default_factory=dict)

    def kept(self, key: str) -> Any:
        """Return what is kept of a key's value; None if the record lacks the key.

        This is for keys that are named in a text, such as the definition of a table. A key that the code itself reads
        has a field of the record.

        Args:
            key: the dotted key.
        """
        return self.configuration.get(key)

    @property
    def aggregation_mode(self) -> str:
        """Return verl's loss_agg_mode, or its default, token-mean, if the record lacks it."""
        return self.aggregation or "token-mean"


def record_of(configuration: Mapping[str, Any], header: Mapping[str, Any] = EMPTY) -> RunRecord:
    """Derive a run's record from its configuration.

    Args:
        configuration: the configuration as verl prints it, nested or by dotted key; it may lack any key.
        header: the other keys that a record without a number may have: `started`, `commit`, `versions`,
            `accelerators`, `reward_hash`, `config_hash`.
    """
    given = keys.flat(configuration)
    handed = handed_over(given)
    values = kept_configuration(given)
    record = fields_of(values)
    reward = dataclasses.replace(record.reward, hash=_text(header.get("reward_hash")))
    accelerators = tuple(map(str, _list(header.get("accelerators"))))
    return dataclasses.replace(
        record,
        started=_text(header.get("started")),
        commit=_text(header.get("commit")),
        versions=dict(header.get("versions") or {}),
        line=recorded_line(_text(handed.get("line")), given.get(f"{NODE}.trace.folder")),
        loss=resolved_loss(record.loss, handed),
        schedule=recorded_schedule(given),
        machines=dataclasses.replace(record.machines, accelerators=accelerators),
        reward=reward,
        untested=tuple(kept_option(str(option)) for option in _list(handed.get("untested"))),
        identity={name: str(digest) for name, digest in keys.below(handed, "identity").items()},
        configuration_hash=_text(header.get("config_hash")),
        configuration=values,
    )


def fields_of(values: Mapping[str, Any]) -> RunRecord:
    """Return a record with those fields that verl's keys and the clipx node say.

    Args:
        values: the leaves of a configuration, or what a record keeps of them, by dotted key; any key may be missing.
    """
    get = values.get
    training = training_of(values)
    return RunRecord(
        loss=loss_of(values),
        trainer=trainer_of(values),
        batch=Batch(
            prompts=get(keys.ROLLOUT_PROMPTS),
            responses=get(keys.RESPONSES),
            mini_batch=get(keys.MINI_BATCH),
            epochs=get(keys.EPOCHS),
        ),
        length=Length(
            steps=get(keys.TOTAL_STEPS),
            epochs=get(keys.TOTAL_EPOCHS),
            rows=get(keys.TRAINING_ROWS),
            save_every=get(keys.SAVE_EVERY),
            critic_warmup=get(keys.WARMUP),
        ),
        seeds=Seeds(data=get(keys.DATA_SEED), loader=get(keys.LOADER_SEED), rollout=get(keys.ROLLOUT_SEED)),
        estimator=get(keys.ESTIMATOR),
        aggregation=get(keys.LOSS_AGG_MODE),
        scale_factor=get(keys.LOSS_SCALE_FACTOR),
        correction=keys.correction_of(values),
        optimizer=Optimizer(
            rate=get(keys.LEARNING_RATE),
            schedule=get(keys.RATE_SCHEDULE),
            warmup_steps=get(keys.RATE_WARMUP),
            warmup_ratio=get(keys.RATE_WARMUP_RATIO),
            weight_decay=get(keys.WEIGHT_DECAY),
            clip_gradient=get(keys.CLIP_GRADIENT),
        ),
        terms=Terms(
            entropy=get(keys.ENTROPY_COEFFICIENT),
            kl_loss=get(keys.KL_LOSS),
            kl_loss_coefficient=get(keys.KL_LOSS_COEFFICIENT),
            kl_loss_kind=get(keys.KL_LOSS_TYPE),
            kl_in_reward=get(keys.KL_IN_REWARD),
            kl_in_reward_coefficient=get(keys.KL_REWARD_COEFFICIENT),
            distillation=get(keys.DISTILLATION),
            distillation_coefficient=get(keys.DISTILLATION_COEFFICIENT),
            distillation_kind=get(keys.DISTILLATION_LOSS),
        ),
        sampling=keys.sampling_of(values),
        limits=Limits(
            prompt=get(keys.LONGEST_PROMPT),
            response=get(keys.LONGEST_RESPONSE),
            generated=get(keys.RESPONSE_LENGTH),
            context=get(keys.CONTEXT),
        ),
        rollout=Engine(
            name=get(keys.ENGINE_NAME),
            precision=PRECISIONS.get(str(get(keys.ROLLOUT_PRECISION)), get(keys.ROLLOUT_PRECISION)),
            parallel=_values_that_are_set(values, {"tensor": keys.TENSOR_PARALLEL}),
        ),
        training=training,
        machines=Machines(
            device=get(keys.DEVICE),
            nodes=get(keys.NODES),
            devices_a_node=get(keys.DEVICES_A_NODE),
        ),
        model=Content(paths=tuple(dict.fromkeys(paths_of(get(keys.MODEL_PATH)) + paths_of(get(keys.TOKENIZER_PATH))))),
        critic=Content(paths=paths_of(get(keys.CRITIC_MODEL_PATH))),
        data=Content(paths=paths_of(get(keys.TRAINING_FILES))),
        validation=Content(paths=paths_of(get(keys.VALIDATION_FILES))),
        reward=find_reward_function(values),
        resumption=Resumption(mode=get(keys.RESUME_MODE), path=get(keys.RESUME_PATH)),
        receipt=ReceiptResult(tolerance=TOLERANCES.get(str(training.precision))),
    )


def recorded_line(line: str | None, folder: str | None) -> str | None:
    """Return the line of a run as the record keeps it: without the folder of its traces, a text of the user's.

    Args:
        line: the line that the run printed; None if there is none, and then None is returned.
        folder: the folder of the traces that the clipx node names; None if it names none.
    """
    if line is not None and folder:
        line = line.replace(str(folder), "…")
    return redact(line)


def handed_over(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the driver had resolved when the run started, by dotted key below the record.

    Args:
        configuration: the configuration's leaves by dotted key. If it lacks the plugin's node `keys.FACTS`, the result
            is empty.
    """
    node = keys.below(configuration, keys.FACTS)
    # Older versions had the record's fields in the node itself.
    return keys.below(node, "record") or node


def resolved_loss(loss: Loss, handed: Mapping[str, Any]) -> Loss:
    """Return a record's loss with those fields that only the start of the run could tell.

    Args:
        loss: the loss as the configuration's other keys say it.
        handed: what the driver had resolved, from `handed_over`.
    """
    # Older versions had these fields directly in the node.
    resolved = keys.below(handed, "loss") or handed
    group = resolved.get("group")
    return dataclasses.replace(
        loss,
        group=group if group is None or is_name(str(group)) else hash_of("group", group),
        taken=keys.nested(with_hashed_texts(keys.below(resolved, "taken"))),
        unused=with_hashed_texts(keys.below(resolved, "unused")),
    )


def loss_of(values: Mapping[str, Any]) -> Loss:
    """Return the loss that a configuration chooses, as far as verl's keys and the clipx node say it.

    Args:
        values: the leaves of a configuration, or what a record keeps of them, by dotted key.
    """
    node = keys.below(values, NODE)
    modifiers = {name: keys.below(node, name) for name in MODIFIERS}
    parameters = {
        key: value
        for key, value in node.items()
        if key.partition(".")[0] not in (*MODIFIERS, *CHOOSES_LOSS) and not key.endswith("_target_")
    }
    return Loss(
        mode=values.get(keys.LOSS_MODE),
        method=node.get("method"),
        function=node.get("function"),
        parameters=parameters,
        modifiers={name: chosen for name, chosen in modifiers.items() if chosen},
        widths=_values_that_are_set(values, {name: f"{keys.ACTOR}.{name}" for name in keys.CLIP_KEYS}),
        uncompiled_by=next((key for key in keys.TORCH_COMPILE if values.get(key) is False), None),
    )


def with_hashed_texts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with the hash of each text in its place, except the names of keys.

    Args:
        values: what a loss has taken over or does not use, by dotted key. The values are numbers but for a mistake of
            the user's.
    """
    kept: dict[str, Any] = {}
    for name, value in values.items():
        is_key = name.rpartition(".")[2] == "key"
        kept[name] = hash_of(name, value) if isinstance(value, str) and not is_key else value
    return kept


def kept_option(option: str) -> str:
    """Return an untested option as the record keeps it.

    Args:
        option: the option's name, or key=value, of which the value may become a hash.
    """
    key, separator, value = option.partition("=")
    return f"{key}={kept_value(key, value)}" if separator else option


def training_of(values: Mapping[str, Any]) -> Engine:
    """Return the engine that trains.

    Args:
        values: the leaves of a configuration by dotted key.
    """
    name = values.get(keys.STRATEGY)
    precision = values.get(keys.TRAINING_PRECISION.get(name, keys.MIXED_PRECISION))
    if precision is None and name in FSDP:
        precision = "bfloat16"
    parallel = {"sequence": keys.SEQUENCE_PARALLEL[0]}
    if name == "megatron":
        parallel = {
            "tensor": keys.MEGATRON_TENSOR_PARALLEL,
            "pipeline": keys.MEGATRON_PIPELINE_PARALLEL,
            "context": keys.MEGATRON_CONTEXT_PARALLEL,
        }
    return Engine(
        name=name, precision=PRECISIONS.get(str(precision), precision), parallel=_values_that_are_set(values, parallel)
    )


def find_reward_function(values: Mapping[str, Any]) -> Content:
    """Return the user's own reward function that a configuration names; without a path if it names none."""
    for node in keys.REWARD_FUNCTIONS:
        function = keys.below(values, node)
        if function.get("path"):
            return Content(paths=paths_of(function["path"]), name=function.get("name"))
    return Content()


def paths_of(value: Any) -> tuple[str, ...]:
    """Return the paths in the value of a key, which is a path or a list of paths; empty if the value is."""
    if not value:
        return ()
    if isinstance(value, list | tuple):
        return tuple(map(str, value))
    return (str(value),)


def as_json(record: RunRecord) -> dict[str, Any]:
    """Return a record as nested dictionaries of plain values, as its file has them."""
    return dataclasses.asdict(record)


def read_record(content: Mapping[str, Any], where: str) -> RunRecord:
    """Return the record in a file, of this form or of an older one.

    Args:
        content: the object in the file.
        where: the name of the file in an error.

    Raises:
        ValueError: the record is of a newer form, or a field has a value of another type.
    """
    schema = content.get("schema")
    if schema is None:
        return record_of(content.get("configuration") or {}, content)
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise ValueError(
            f"{where}: a record of form {schema!r:.20}, and this version of verl-clipx reads forms up to {SCHEMA}. "
            "Read it with the version that wrote it, or a newer one; or remove it to read the log without it."
        )
    record = _build(RunRecord, content, where)
    if schema == 1:
        return with_hashes(record)
    if schema == 2:
        return with_later_fields(record)
    return record


def with_later_fields(before: RunRecord) -> RunRecord:
    """Return a record of form 2 with the fields that form 3 adds, derived from what it keeps of its configuration."""
    derived = fields_of(before.configuration)
    return dataclasses.replace(
        before,
        schema=SCHEMA,
        length=derived.length,
        limits=derived.limits,
        resumption=derived.resumption,
    )


def with_hashes(before: RunRecord) -> RunRecord:
    """Return a record of form 1, whose configuration is whole, with the hashes and the fields of this form."""
    header = {
        "started": before.started,
        "commit": before.commit,
        "versions": before.versions,
        "accelerators": list(before.machines.accelerators),
        "config_hash": before.configuration_hash,
    }
    record = record_of(before.configuration, header)
    contents: dict[str, Content] = {}
    for name in ("model", "critic", "data", "validation", "reward"):
        content = getattr(before, name)
        paths = getattr(record, name)
        contents[name] = dataclasses.replace(paths, hash=content.hash, parameters=content.parameters)
    return dataclasses.replace(record, **contents, files=before.files, start=before.start, receipt=before.receipt)


def _build(kind: type, content: Any, where: str) -> Any:
    """Return an instance of a class of the record from plain values. Unknown fields are left out.

    Args:
        kind: the class, `RunRecord` or that of one of its fields.
        content: the values by field, nested.
        where: the name of the file in an error, with the field.

    Raises:
        ValueError: `content` is no mapping, or a field has a value of another type.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"{where}: not a record ({content!r:.40}); remove it to read the log without it.")
    given: dict[str, Any] = {}
    for record_field in dataclasses.fields(kind):
        name = record_field.name
        if name not in content:
            continue
        value = content[name]
        class_of_field = CLASS_BY_FIELD.get((kind, name))
        if class_of_field is not None and value is not None:
            value = _build(class_of_field, value, f"{where}: {name}")
        elif isinstance(value, list) and name != "configuration":
            value = tuple(value)
        given[name] = value
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}; remove it to read the log without it.") from None


# The class of each field that is a dataclass itself.
CLASS_BY_FIELD: dict[tuple[type, str], type] = {
    (RunRecord, record_field.name): record_field.default_factory
    for record_field in dataclasses.fields(RunRecord)
    if dataclasses.is_dataclass(record_field.default_factory)
}


def _values_that_are_set(values: Mapping[str, Any], key_by_name: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of keys by the keys' short names, without those that are missing or None."""
    return {name: values[key] for name, key in key_by_name.items() if values.get(key) is not None}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
