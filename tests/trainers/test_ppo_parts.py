"""PPO's parts by themselves, against numbers: value head, model, buffer, KL coefficient, early stop."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from rl_cluster.config import RunConfig
from rl_cluster.config.algorithm import PPO, KLConfig
from rl_cluster.errors import BadInputError
from rl_cluster.loop.buffer import ReadyGroup, StageTimes
from rl_cluster.loop.step import TrainStep
from rl_cluster.modeling import policy
from rl_cluster.trainers.ppo.buffer import AdaptiveKLController, PPOBuffer
from rl_cluster.trainers.ppo.history import PPOHistory, step_stats
from rl_cluster.trainers.ppo.model import PPOModel, ValueHead
from rl_cluster.trajectory import Scores
from tests.fakes import FakeLearner


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=11, num_key_value_heads=2, **size)).eval()


def test_the_value_head_is_linear_relu_linear() -> None:
    head = ValueHead(2)
    with torch.no_grad():
        head.hidden.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
        head.hidden.bias.copy_(torch.tensor([0.5, 0.0]))
        head.scalar.weight.copy_(torch.tensor([[2.0, 3.0]]))
        head.scalar.bias.copy_(torch.tensor([-1.0]))
    states = torch.tensor([[[1.0, 1.0], [-1.0, -2.0], [-1.0, 4.0]]])  # [1, 3, 2]
    # relu([1.5, -1]), relu([-0.5, 2]), relu([-0.5, -4])
    assert head(states).tolist() == [[2 * 1.5 - 1, 3 * 2.0 - 1, -1.0]]


def test_an_untrained_value_head_says_zero_and_has_the_learners_weights() -> None:
    head = ValueHead(4)
    assert head(torch.randn(2, 3, 4)).abs().max() == 0
    policy.ValueHead(4, torch.float32).load_state_dict(head.state_dict())


def test_the_ppo_model_gives_logits_and_a_value_per_token(model: Qwen2ForCausalLM) -> None:
    ppo = PPOModel(model).eval()
    nn.init.normal_(ppo.value_head.scalar.weight)
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    with torch.no_grad():
        logits, values = ppo(ids, mask, return_value=True)
        assert torch.equal(ppo(ids, mask), logits)
        assert torch.equal(model(ids, attention_mask=mask).logits, logits)
        short = ppo(ids[1:, :2], return_value=True)[1]
    assert values.shape == (2, 4) and len(set(values.flatten().tolist())) == 8
    torch.testing.assert_close(values[1, :2], short[0])  # what follows has no influence
    with pytest.raises(BadInputError, match=r"PPOModel\.base_model"):
        PPOModel(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("current", "n_steps", "expected"),
    [
        (6.0, 100, 0.2),  # on target
        (6.6, 100, 0.2 * (1 + 0.1 * 100 / 10_000)),
        (60.0, 100, 0.2 * (1 + 0.2 * 100 / 10_000)),  # clipped to + 0.2
        (0.0, 500, 0.2 * (1 - 0.2 * 500 / 10_000)),  # clipped to − 0.2
    ],
)
def test_the_kl_coefficient_follows_the_formula(current: float, n_steps: int, expected: float) -> None:
    controller = AdaptiveKLController(init_kl_coef=0.2, target=6, horizon=10_000)
    assert controller.update(current, n_steps) == pytest.approx(expected, rel=1e-12)
    assert controller.value == controller.kl_coef == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("arguments", [(-0.1, 6, 100), (0.2, 0, 100), (0.2, 6, 0), (float("nan"), 6, 100)])
def test_a_controller_that_cannot_work_is_refused(arguments: tuple[float, float, float]) -> None:
    with pytest.raises(BadInputError, match="AdaptiveKLController"):
        AdaptiveKLController(*arguments)


def test_the_buffer_gives_everything_back_once_whole_or_in_parts() -> None:
    buffer = PPOBuffer()
    buffer.add([[1], [2, 3]], [torch.tensor([4]), torch.tensor([5])], [0.5, 1.5])
    buffer.add([[6]], [[7, 8]], torch.tensor([2.5]))
    whole = buffer.get()
    assert len(buffer) == 3
    assert [row.tolist() for row in whole["queries"]] == [[1], [2, 3], [6]]
    assert [row.tolist() for row in whole["responses"]] == [[4], [5], [7, 8]]
    assert whole["rewards"].tolist() == [0.5, 1.5, 2.5]
    parts = list(buffer.mini_batches(2, seed=1))
    assert [len(part["rewards"]) for part in parts] == [2, 1]
    pairs = {
        (q.tolist()[0], r) for p in parts for q, r in zip(p["queries"], p["rewards"].tolist(), strict=True)
    }
    assert pairs == {(1, 0.5), (2, 1.5), (6, 2.5)}
    buffer.clear()
    assert len(buffer) == 0


def test_a_buffer_refuses_ragged_lists_and_nan() -> None:
    with pytest.raises(BadInputError, match="2 queries, 1 responses"):
        PPOBuffer().add([[1], [2]], [[1]], [0.0])
    with pytest.raises(BadInputError, match=r"rewards\[0\]=nan"):
        PPOBuffer().add([[1]], [[1]], [float("nan")])


class DriftingLearner(FakeLearner):
    """Its i-th update finds the policy `drifts[i]` nats (½ log² ratio) away."""

    def __init__(self, drifts: Sequence[float]) -> None:
        super().__init__()
        self._drifts = list(drifts)

    async def forward_backward(self, *arguments: Any) -> tuple[dict[str, float], Any]:
        sums, logprobs = await super().forward_backward(*arguments)
        moved = {"weight_total": 0.5, "approxkl_weighted": 0.5 * self._drifts.pop(0)}
        return {**sums, **moved}, logprobs


@pytest.mark.parametrize(
    ("limit", "updates"), [(None, 6), (0.5, 6), (0.25, 4), (0.15, 3)], ids=["off", "never", "4th", "3rd"]
)
def test_a_policy_that_has_moved_too_far_is_left_alone(
    limit: float | None, updates: int, make_group: Any
) -> None:
    algorithm = PPO(num_epochs=3, num_mini_batches=2, stop_at_approx_kl=limit, kl=KLConfig())
    config = RunConfig.model_validate(
        {
            "model": {"path": "unused"},
            "data": {"train": {"source": "addition"}},
            "rewards": {"scorers": [{"kind": "exact_match"}]},
            "batch": {"prompts_per_step": 2, "samples_per_prompt": 1},
        },
        strict=False,
    ).model_copy(update={"algorithm": algorithm})
    learner = DriftingLearner([0.0, 0.1, 0.2, 0.3, 0.3, 0.3])
    groups = []
    for i in range(2):
        group = make_group("1+1=", ["2"], group_id=i)
        scores = (Scores("given", np.array([float(i)])),)
        groups.append(ReadyGroup(group.summary("test", 0.0), group, None, scores, StageTimes(0, 0, 0, 0)))
    step = TrainStep(config, learner, None, False)
    result = asyncio.run(step.run(groups, np.array([0.0, 1.0]), 0.0, 1))
    assert len(result.optim) == learner.calls.count("optim_step") == updates


def test_the_columns_of_a_history_are_the_documented_ones() -> None:
    rows = [
        {"loss/policy_avg": 1.0, "loss/value_avg": 2.0, "objective/kl": 3.0, "objective/kl_coef": 0.1},
        {"loss/policy_avg": 4.0, "policy/entropy_avg": 5.0, "objective/scores": 6.0},
    ]
    history = PPOHistory(rows, lambda: "the model")
    assert history == {
        "policy_loss": [1.0, 4.0],
        "value_loss": [2.0, None],
        "kl_divergence": [3.0, None],
        "entropy": [None, 5.0],
        "rewards": [None, 6.0],
        "kl_coef": [0.1, None],
    }
    assert history.model == "the model"
    assert pickle.loads(pickle.dumps(history)) == history


def test_stats_have_trls_names_beside_our_own() -> None:
    stats = step_stats({"loss/policy_avg": 1.0, "loss/value_avg": 4.0, "objective/scores": 0.5}, 0.25)
    assert stats["ppo/loss/policy"] == stats["loss/policy_avg"] == 1.0
    assert (stats["ppo/loss/value"], stats["ppo/mean_scores"]) == (4.0, 0.5)
    assert stats["ppo/loss/total"] == 1.0 + 0.25 * 4.0
    assert step_stats({"loss/policy_avg": 1.0}, 0.25)["ppo/loss/total"] is None
