"""The pipeline on the real stack: two ZeRO-3 ranks and a vLLM engine do what one module here does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_cluster.config.run import ScratchModel
from rl_cluster.errors import BadInputError
from rl_cluster.modeling.scratch import build_model, build_tokenizer
from rl_cluster.pipeline import AsyncTrainingClient
from rl_cluster.pipeline.on_cluster import cluster_client
from rl_cluster.protocols import OptimParams

SMALL = ScratchModel(
    alphabet="0123=", hidden_size=64, num_layers=1, num_heads=2, intermediate_size=64, max_positions=32
)
RATE = 1e-2


def model_and_tokenizer() -> tuple[Any, Any]:
    tokenizer = build_tokenizer(SMALL.alphabet, 32)
    return build_model(SMALL, len(tokenizer), 0), tokenizer


def batches() -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 5, (3, 6), generator=random) for _ in range(4)]
    return [{"input_ids": rows, "attention_mask": torch.ones_like(rows), "labels": rows} for rows in ids]


@pytest.mark.stack
@pytest.mark.usefixtures("ray_session")
def test_queued_calls_on_a_cluster_equal_those_in_process_and_the_engine_serves_the_result(
    tmp_path: Path,
) -> None:
    model, tokenizer = model_and_tokenizer()
    own = copy.deepcopy(model)
    local = AsyncTrainingClient(own, device="cpu", tokenizer=tokenizer)
    optimizer = torch.optim.AdamW(own.parameters(), lr=RATE, weight_decay=0.0)
    expected = [local.forward_backward(batch).result().loss for batch in batches()[:1]]
    local.optim_step(optimizer).result()
    expected += [local.forward_backward(batch).result().loss for batch in batches()[1:]]
    local.optim_step(optimizer).result()
    with cluster_client(
        model,
        tokenizer,
        learning_rate=RATE,
        num_ranks=2,
        output_dir=tmp_path / "run",
        settings={"rollout.kv_cache_gib": 0.1, "data.max_prompt_tokens": 16, "rollout.max_new_tokens": 8},
    ) as client:
        futures = [client.forward_backward(batches()[0])]
        futures.append(client.optim_step(OptimParams()))
        futures += [client.forward_backward(batch) for batch in batches()[1:]]
        futures.append(client.optim_step(OptimParams()))
        results = [future.result(120) for future in futures]
        losses = [float(result.loss) for result in results if hasattr(result, "loss")]
        assert losses == pytest.approx([float(loss) for loss in expected], abs=1e-4)
        prompt = tokenizer("12=")["input_ids"]
        drawn = client.sample(prompt, max_tokens=4, temperature=0.0)
    with torch.no_grad():
        ids = list(prompt)
        for token in drawn["tokens"]:
            assert own(torch.tensor([ids])).logits[0, -1].argmax().item() == token
            ids.append(token)
    local.shutdown()


def test_a_model_object_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    model, _ = model_and_tokenizer()
    with pytest.raises(BadInputError, match="tokenizer"), cluster_client(model, output_dir=tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()
