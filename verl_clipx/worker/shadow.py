"""Methods in the shadow: what each of them would have done to the update that another method has just made.

They are computed from the log-probabilities of the training pass, after an update's last micro-batch. Their statistics
are therefore those of the whole mini-batch, without a further pass through the model.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from verl_clipx.base.method import Method, declared
from verl_clipx.base.metric import ANY_NAME
from verl_clipx.base.shared_metrics import COSINE, NORM_RATIO
from verl_clipx.base.tokens import OPTIONAL, Inputs
from verl_clipx.driver.config import Settings, compiled_on
from verl_clipx.loss.compiled import TokenFunctions, token_functions
from verl_clipx.loss.metrics import SUMMED, TOKENS, named_sums, to_host, token_metrics, with_ratios_of_sums
from verl_clipx.loss.rollout_metrics import with_updates
from verl_clipx.worker.step import Kept, OptimizerStep, RolloutBatch

# Sums over tokens: of the product of the shadow method's F * A and the run's, and of the squares of each.
PRODUCTS = ("both", "shadow", "run")


class ShadowLosses:
    """The methods in the shadow of one training worker.

    Args:
        settings: the clipx node, with a shadow. The run's shaping, rollout correction and entropy selection apply to
            each method in the shadow too.
        device: where the tokens are.
        all_reduce: sums a float64 vector over the data-parallel ranks. It is called once per rollout batch and, if a
            method's bounds adapt, once per update.
    """

    def __init__(self, settings: Settings, device: torch.device | str, all_reduce: Callable[[Tensor], Tensor]):
        self._device, self._all_reduce, self._detailed = device, all_reduce, settings.detailed
        compiled = compiled_on(device, settings.compile)
        self._functions: dict[str, TokenFunctions] = {
            name: token_functions(method, settings.shaping, detailed=settings.detailed, compiled=compiled)
            for name, method in settings.shadow.methods.items()
        }
        for functions in self._functions.values():
            functions.prepare(device, counted=settings.update is not None)
        # For each update so far: this rank's sums of all methods in one vector, and what each method decided.
        self._sums: list[Tensor] = []
        self._decided: list[dict[str, dict[str, Tensor]]] = []

    def begin_update(self, step: OptimizerStep, batch: RolloutBatch) -> None:
        """Has the step keep the inputs of each micro-batch's loss."""
        step.kept = []

    def end_update(self, step: OptimizerStep) -> None:
        """Computes the methods' losses of an update after its last micro-batch. Every rank must call this."""
        kept = step.kept
        sizes = [functions.method.statistics_size for functions in self._functions.values()]
        statistics = torch.zeros(sum(sizes), dtype=torch.float64, device=self._device)
        if sum(sizes):
            for one in kept:
                statistics += torch.cat([f.statistics(asked_for(f.method, one)) for f in self._functions.values()])
            statistics = self._all_reduce(statistics)
        sums, decided = [], {}
        for (name, functions), own in zip(self._functions.items(), statistics.split(sizes), strict=True):
            decision = functions.method.decide(own)
            decided[name] = self._of_decision(functions.method, own, decision)
            found = torch.zeros(len(SUMMED[self._detailed]) + len(PRODUCTS), dtype=torch.float64, device=self._device)
            for one in kept:
                found += self._sums_of(functions, one, decision)
            sums.append(found)
        self._sums.append(torch.cat(sums))
        self._decided.append(decided)

    def end_rollout_batch(self, batch: RolloutBatch) -> dict[str, list[float]]:
        """The metrics by key, with one value for each update. Every rank must call this."""
        sums, decided = self._sums, self._decided
        self._sums, self._decided = [], []
        if not sums:
            return {}
        totals = self._all_reduce(torch.cat(sums)).view(len(sums), len(self._functions), -1)
        result: dict[str, list[float]] = {}
        for index, (name, functions) in enumerate(self._functions.items()):
            updates = [self._of_update(functions.method, total[index]) for total in totals]
            updates = [own | of[name] for own, of in zip(updates, decided, strict=True)]
            by_key = {key: [float(update[key]) for update in updates] for key in updates[0]}
            found = with_updates(with_ratios_of_sums(by_key), functions.method, each=False)
            found = self._with_products(found)
            result |= {f"clipx/shadow/{name}/{key.removeprefix('clipx/')}": values for key, values in found.items()}
        return result

    def _sums_of(self, functions: TokenFunctions, kept: Kept, decision: Tensor) -> Tensor:
        loss = functions.loss(asked_for(functions.method, kept), decision)
        mine = loss.weighted if kept.factor is None else loss.weighted * kept.factor
        mine, run = mine.to(torch.float64), kept.weighted.to(torch.float64)
        return torch.cat([loss.sums, torch.stack([(mine * run).sum(), mine.square().sum(), run.square().sum()])])

    def _of_decision(self, method: Method, statistics: Tensor, decision: Tensor) -> dict[str, Tensor]:
        values = declared(method, method.metrics(statistics, decision))
        shown = [members for metric, members in values if self._detailed or not metric.detailed]
        return {f"clipx/{name}": value for members in shown for name, value in members.items()}

    def _of_update(self, method: Method, totals: Tensor) -> dict[str, float]:
        """A method's means over an update's tokens, and its sums of products, each over all ranks."""
        sums, products = totals.split([len(SUMMED[self._detailed]), len(PRODUCTS)])
        dual_clipped = getattr(method, "dual_clip", None) is not None
        of_tokens, of_products = to_host(
            named_sums(sums, detailed=self._detailed), dict(zip(PRODUCTS, products.unbind(), strict=True))
        )
        found = token_metrics(of_tokens.values(), dual_clipped=dual_clipped, detailed=self._detailed)
        count = max(found.pop(TOKENS), 1.0)
        # verl's own keys describe the run, not the methods in the shadow.
        return {key: value / count for key, value in found.items() if key.startswith("clipx/")} | of_products

    @staticmethod
    def _with_products(metrics: dict[str, list[float]]) -> dict[str, list[float]]:
        """Replaces the sums of products by the cosine and the norm ratio."""
        rest = {key: values for key, values in metrics.items() if key not in PRODUCTS}
        products = list(zip(*(metrics[name] for name in PRODUCTS), strict=True))
        cosine = [both / (mine * run) ** 0.5 if mine * run > 0 else 0.0 for both, mine, run in products]
        norm = [(mine / run) ** 0.5 if run > 0 else 0.0 for _, mine, run in products]
        return rest | {suffix(COSINE.name): cosine, suffix(NORM_RATIO.name): norm}


def suffix(name: str) -> str:
    """The part of a metric's name that follows the name of the method in the shadow."""
    return name.partition(f"{ANY_NAME}/")[2]


def asked_for(method: Method, kept: Kept) -> Inputs:
    """The inputs for a method's compiled loss, with exactly the optional fields that the method asks for.

    Raises:
        ValueError: the batch lacks one of these fields.
    """
    optional = {name: getattr(kept.inputs, name) if name in method.asks_for else None for name in OPTIONAL}
    for name in method.asks_for:
        if optional[name] is None:
            raise ValueError(f"clipx.shadow: {method.name} needs {name}, which this batch does not have.")
    return kept.inputs._replace(**optional)
