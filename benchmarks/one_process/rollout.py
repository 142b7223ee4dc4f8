"""Rollouts in this process, with the CPU rollout's generator and the seeds of `+clipx/rollout=seeded`."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig

from verl_clipx.training.cpu.rollout.generator import Generator, Request
from verl_clipx.training.cpu.rollout.parameters import read_sampling_parameters
from verl_clipx.training.cpu.rollout.sampling import derive_seed
from verl_clipx.training.cpu.rollout.server import PRECISIONS, build_model, end_token_ids
from verl_clipx.training.seeded.agent_loop import plain, sampling_seed
from verl_clipx.training.seeded.sampler import row_order

from .queue import LocalQueue

FRESH_REWARD = "clipx_rollout/fresh_reward"
"""Where the weights that sample are not those that train: the mean reward of samples from those that train."""


class LocalRollout:
    """Stands in for verl's replay buffer and everything that fills it.

    Args:
        versions_old: how many versions the sampling weights lag behind the training weights, at least 0; fewer as long
            as the run has fewer versions.
        noise: standard deviation of the relative error that each sampling weight gets in each batch, as if the sampler
            rounded it; 0: none.
    """

    def __init__(self, config: Any, queue: LocalQueue, *, versions_old: int, noise: float = 0.0):
        self.config, self.queue, self.reward = config.actor_rollout_ref.rollout, queue, get_custom_reward_fn(config)
        # A fault may exchange the reward of the training.
        self.of_task, self.prompts = self.reward, list[dict[str, Any]]()
        model: HFModelConfig = omega_conf_to_dataclass(config.actor_rollout_ref.model)
        self.tokenizer, self.end_token_ids = model.tokenizer, end_token_ids(model)
        self.model = build_model(model, PRECISIONS[self.config.dtype], load_weights=False)
        # Versions with their weights, the oldest first.
        self.kept: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=versions_old + 1)
        self.noise, self.errors = noise, torch.Generator().manual_seed(self.config.seed)

    def keep(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Stores a version's weights; the oldest stored version is used for sampling."""
        self.kept.append((version, {name: weight.detach().clone() for name, weight in weights}))

    def submit(self, prompts: TensorDict) -> None:
        """Takes the prompts of the next batch, as verl's data loader returns them."""
        self.prompts = [
            {
                name: values.data if isinstance(values, NonTensorData) else getattr(values[row], "data", values[row])
                for name, values in prompts.items()
            }
            for row in range(len(prompts))
        ]

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, float]]:
        """Return a batch of samples as verl's replay buffer does, in the order of `+clipx/rollout=seeded`."""
        version, weights = self.kept[0]
        requests = self._answer(self._with_noise(weights) if self.noise else weights, range(self.config.n))
        rows = {
            f"{self.prompts[index]['uid']}_{session}_0": self._row(self.prompts[index], session, request, version)
            for (index, session), request in requests.items()
        }
        keys = list(rows)
        keys = [keys[place] for place in row_order(keys, [row["extra_fields"] for row in rows.values()])]
        self.queue.rows, self.queue.tags = rows, {key: _tag(row) for key, row in rows.items()}
        measured = {FRESH_REWARD: self._fresh_reward()} if self.noise or len(self.kept) > 1 else {}
        return KVBatchMeta(keys=keys, tags=[self.queue.tags[key] for key in keys], partition_id=partition_id), measured

    def _answer(self, weights: Mapping[str, torch.Tensor], sessions: range) -> dict[tuple[int, int], Request]:
        """Samples from weights; by prompt and session the finished requests."""
        self.model.load_state_dict(weights)
        requests = {
            (index, session): self._request(prompt, session)
            for index, prompt in enumerate(self.prompts)
            for session in sessions
        }
        self._generate(list(requests.values()))
        return requests

    def _with_noise(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: weight * (1 + self.noise * torch.randn(weight.shape, generator=self.errors))
            for name, weight in weights.items()
        }

    def _fresh_reward(self) -> float:
        """The mean reward of other samples for the batch's prompts, from the weights that train, for the log alone."""
        requests = self._answer(self.kept[-1][1], range(self.config.n, 2 * self.config.n))
        scores = [self._score(self.prompts[index], request)["score"] for (index, _), request in requests.items()]
        return sum(scores) / len(scores)

    def validate(self, prompts: TensorDict) -> list[float]:
        """Return the score of one answer to each prompt, from the weights that train, by the task's own reward."""
        self.submit(prompts)
        requests = self._answer(self.kept[-1][1], range(self.config.n, self.config.n + 1))
        scored = (self._score(self.prompts[index], request, self.of_task) for (index, _), request in requests.items())
        return [score["score"] for score in scored]

    def _score(self, prompt: Mapping[str, Any], request: Request, reward: Any = None) -> dict[str, float]:
        text = self.tokenizer.decode(request.token_ids, skip_special_tokens=True)
        reward = reward or self.reward
        return reward(prompt["data_source"], text, prompt["reward_model"]["ground_truth"], prompt["extra_info"])

    def _request(self, prompt: Mapping[str, Any], session: int) -> Request:
        prompt_ids = self.tokenizer.apply_chat_template(
            prompt["raw_prompt"], add_generation_prompt=True, return_dict=False
        )
        # As the seeded agent loop and verl's own loop send them, and as the CPU rollout's server reads them.
        seed = self._seed(prompt, session)
        sampling = {key: self.config[key] for key in ("temperature", "top_p", "top_k")}
        parameters = read_sampling_parameters(
            {**sampling, "seed": seed},
            default_max_tokens=self.config.response_length,
            room_in_context=self.config.prompt_length + self.config.response_length - len(prompt_ids),
            end_token_ids=self.end_token_ids,
            ignore_eos=self.config.ignore_eos,
        )
        return Request(f"{prompt['uid']}_{session}", prompt_ids, parameters, derive_seed("request", seed))

    def _seed(self, prompt: Mapping[str, Any], session: int) -> int:
        step, index = int(prompt["global_steps"]), plain(prompt["index"])
        return sampling_seed(self.config.seed, step, index, session, prompt["raw_prompt"])

    def _generate(self, requests: list[Request]) -> None:
        generator = Generator(
            self.model,
            vocabulary_size=len(self.tokenizer),
            max_rows=self.config.max_num_seqs,
            max_prefill_tokens=self.config.max_num_batched_tokens,
            log_prob_mode=self.config.logprobs_mode,
        )
        for request in requests:
            generator.submit(request)
        while generator.pending:
            generator.step()

    def _row(self, prompt: Mapping[str, Any], session: int, request: Request, version: int) -> dict[str, Any]:
        scores = self._score(prompt, request)
        output = AgentLoopOutput(
            prompt_ids=request.prompt_ids,
            response_ids=request.token_ids,
            response_mask=[1] * len(request.token_ids),
            response_logprobs=request.log_probs,
            reward_score=scores["score"],
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={
                "min_global_steps": version,
                "max_global_steps": version,
                "prompt_index": plain(prompt["index"]),
                "sampling_seed": self._seed(prompt, session),
                "reward_extra_info": scores,
            },
        )
        row = {**output.as_dict(), **prompt, "session_id": session}
        row["loss_mask"], row["input_ids"] = row["response_mask"], torch.cat([row["prompts"], row["responses"]])
        row["position_ids"] = torch.arange(len(row["input_ids"]))
        return row


def _tag(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the notes that verl's agent loop keeps about a sample."""
    prompt, response = len(row["prompts"]), len(row["responses"])
    versions = {key: row["extra_fields"][key] for key in ("min_global_steps", "max_global_steps")}
    lengths = {"prompt_len": prompt, "response_len": response, "seq_len": prompt + response}
    return {"status": "success", "global_steps": int(row["global_steps"]), **lengths, **versions}
