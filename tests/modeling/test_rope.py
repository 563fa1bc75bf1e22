"""Models whose rotary positions change with a sequence's length: up to there right, beyond it refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_cluster.config.planning.model_shape import shape_of_folder
from rl_cluster.config.planning.rope import positions, rope_switch
from rl_cluster.errors import BadInputError
from rl_cluster.modeling.generate import Drawing, Generation, Request
from rl_cluster.modeling.load import load_policy
from rl_cluster.modeling.packed import PackedLayout
from rl_cluster.pipeline import ForwardBackwardPipeline
from rl_cluster.rewards.reward_model import plan_batches
from rl_cluster.trainers.given import max_positions
from tests.modeling.architectures import GPT, Case, config_of, save_tiny

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0, 5.0, 7.0, 9.0],
    "original_max_position_embeddings": 16,
}
PHI = Case(
    "phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16, "sliding_window": None}
)
DYNAMIC = Case(
    "llama",
    {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}}
    | {"max_position_embeddings": 16},
)


@pytest.mark.parametrize("case", [PHI, DYNAMIC], ids=["longrope", "dynamic"])
def test_up_to_the_switch_such_a_model_gives_plain_transformers_numbers(case: Case, tmp_path: Path) -> None:
    save_tiny(case, tmp_path)
    policy = load_policy(str(tmp_path))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    rows = [torch.arange(3, 3 + n) for n in (16, 5)]
    tokens = torch.cat(rows)
    targets = torch.tensor([*range(1, 16), *range(17, 21)])
    with torch.no_grad():
        found = policy(tokens, PackedLayout.of([16, 5]), targets, 1.0)[0]
        logits = [plain(input_ids=row[None]).logits[0, :-1].log_softmax(-1) for row in rows]
    expected = [table.gather(-1, row[1:, None])[:, 0] for table, row in zip(logits, rows, strict=True)]
    assert (found - torch.cat(expected)).abs().max() < 1e-5


@pytest.mark.parametrize("case", [PHI, DYNAMIC], ids=["longrope", "dynamic"])
def test_a_longer_sequence_is_refused_by_learner_and_sampler(case: Case, tmp_path: Path) -> None:
    save_tiny(case, tmp_path)
    policy = load_policy(str(tmp_path))
    with pytest.raises(BadInputError, match=r"17 tokens.*change for those of more than 16"):
        policy(torch.arange(3, 25), PackedLayout.of([5, 17]), torch.tensor([1]), 1.0)
    with pytest.raises(BadInputError, match=r"17 tokens.*change for those of more than 16"):
        Generation(policy, [Request([3, 4], 0, 3), Request([3] * 10, 0, 7)], Drawing(1.0))


def test_the_plan_knows_the_switch_as_the_models_positions(tmp_path: Path) -> None:
    case = Case("phi3", PHI.settings | {"num_key_value_heads": 4})
    save_tiny(case, tmp_path)
    shape = shape_of_folder(tmp_path, "here")
    assert shape is not None and shape.named_positions.startswith("16 positions: beyond them its rope")


def test_a_model_handed_over_as_an_object_has_the_same_positions(tmp_path: Path) -> None:
    save_tiny(PHI, tmp_path)
    assert max_positions(AutoModelForCausalLM.from_pretrained(tmp_path)) == 16
    torch.manual_seed(0)
    assert max_positions(AutoModelForCausalLM.from_config(config_of(Case("gpt2", GPT)))) == 128


def test_old_and_new_spellings_of_a_rope_are_read() -> None:
    old = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    assert positions(old | {"rope_scaling": {"type": "longrope"}}) == 4096
    assert positions(old | {"rope_scaling": {"type": "su"}}) == 4096
    assert positions(old | {"rope_scaling": {"type": "yarn", "factor": 2.0}}) == 131072
    assert positions(old | {"rope_scaling": None}) == 131072
    assert positions({}) is None
    kinds = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"}}
    assert rope_switch({"max_position_embeddings": 64, "rope_parameters": kinds}) == 16
    assert rope_switch({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "dynamic"}}) == 64
    assert rope_switch({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "llama3"}}) is None


def test_the_pipeline_takes_long_rows_alone_and_no_mixture() -> None:
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config_of(PHI), attn_implementation="eager")
    pipeline = ForwardBackwardPipeline(lm)
    ids = torch.arange(3, 23)[None].repeat(2, 1)
    mask = torch.ones_like(ids)
    both = pipeline.forward(ids, mask).result()
    assert both["logprobs"].shape == (2, 20)
    mask[1, 9:] = 0
    with pytest.raises(BadInputError, match="rows of 9 and 20 tokens together"):
        pipeline.forward(ids, mask).result()
    pipeline.shutdown()


def test_the_pipeline_samples_across_the_switch_as_whole_sequences_say() -> None:
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config_of(PHI), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    with ForwardBackwardPipeline(lm) as pipeline:
        prompt = list(range(3, 15))
        drawn = pipeline.sample(prompt, max_tokens=8, seed=1, stop=[])
    for count, (token, logprob) in enumerate(zip(drawn["tokens"], drawn["logprobs"], strict=True)):
        with torch.no_grad():
            logits = lm(input_ids=torch.tensor([prompt + drawn["tokens"][:count]]), use_cache=False).logits
        assert float(logits[0, -1].log_softmax(-1)[token]) == pytest.approx(logprob, abs=1e-4)


def test_a_scorer_never_batches_rows_of_both_sides() -> None:
    lengths = [3, 20, 16, 17, 9]
    assert plan_batches(lengths, 1000, switch=16) == [[0, 4, 2], [3, 1]]
    assert plan_batches(lengths, 1000) == [[0, 4, 2, 3, 1]]
    rows = np.concatenate(plan_batches(lengths, 30, switch=16))
    assert sorted(rows.tolist()) == [0, 1, 2, 3, 4]
