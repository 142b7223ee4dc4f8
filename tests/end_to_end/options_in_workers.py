"""For VERL_USE_EXTERNAL_MODULES: the first rank of the actor prints once which of the engine's options are in force."""

import functools
import json
from typing import Any

from wrapt import when_imported

from .training_ranks import options_in_force

LINE = "options in force: "


def options_of(output: str) -> dict[str, Any]:
    """What a run has printed of its options."""
    (line,) = {line.partition(LINE)[2] for line in output.splitlines() if LINE in line}
    return json.loads(line[: line.rindex("}") + 1])


def _install(module: Any) -> None:
    original = module.TrainingWorker.train_mini_batch

    @functools.wraps(original)
    def train_mini_batch(self, data):
        if self.rank != 0 or getattr(self, "_options_said", False):
            return original(self, data)
        self._options_said = True
        engine, rows, sent = self.engine, [], []
        hook = engine.module.register_forward_pre_hook(
            lambda module, arguments, keywords: rows.append(len(keywords["input_ids"])), with_kwargs=True
        )
        move = engine.to
        engine.to = lambda device, *args, **kwargs: (sent.append(str(device)), move(device, *args, **kwargs))[1]
        try:
            output = original(self, data)
        finally:
            hook.remove()
            del engine.to
        found = options_in_force(engine) | {"rows of inputs": rows, "sent to": sent}
        print(LINE + json.dumps(found), flush=True)
        return output

    module.TrainingWorker.train_mini_batch = train_mini_batch


when_imported("verl.workers.engine_workers")(_install)
