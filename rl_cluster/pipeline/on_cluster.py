"""A model and a size of cluster in; a client whose model lives on learner ranks and vLLM engines out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from rl_cluster.assembly.given import Given
from rl_cluster.assembly.train import load_tokenizer
from rl_cluster.config.reading.load import parse_config, with_settings
from rl_cluster.config.run import RunConfig
from rl_cluster.data.load import load_prompts
from rl_cluster.errors import BadInputError
from rl_cluster.pipeline.client import AsyncTrainingClient
from rl_cluster.pipeline.learner_backend import LearnerBackend
from rl_cluster.run_folder.folder import preparing_run, run_dir_of
from rl_cluster.trainers.session import TrainerSession, save_prompts, save_start


@contextmanager
def cluster_client(
    model: Any,
    tokenizer: Any = None,
    *,
    learning_rate: float = 1e-6,
    num_ranks: int = 1,
    temperature: float = 1.0,
    output_dir: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Iterator[AsyncTrainingClient]:
    """Inside, the client's calls run on a Ray cluster (RAY_ADDRESS, or a local Ray that ends with the block).

    model: a causal language model of transformers (with its tokenizer), or a folder or hub name. num_ranks:
    of the learner (ZeRO-3). temperature: of `forward`. learning_rate: unless optim_step gets OptimParams.
    settings: further settings of a RunConfig by dotted name ({"rollout.max_new_tokens": 64}); what `sample`
    may draw is limited by data.max_prompt_tokens (512) and rollout.max_new_tokens (128).
    Raises BadInputError before anything starts. The model object itself is not changed.
    """
    if isinstance(model, nn.Module) and tokenizer is None:
        raise BadInputError("cluster_client.tokenizer: there is none. A model object needs its tokenizer.")
    values: dict[str, Any] = {
        "run": {"name": "pipeline", "dir": None if output_dir is None else str(output_dir)},
        "model": {"path": "." if isinstance(model, nn.Module) else str(model)},
        "data": {"train": {"source": "jsonl", "path": "."}, "held_out": 0},
        "rewards": {"scorers": [{"kind": "callable", "name": "none"}]},
        "batch": {"prompts_per_step": 1, "samples_per_prompt": 2},
        "rollout": {"temperature": float(temperature)},
        "optimizer": {"learning_rate": float(learning_rate)},
        "learner": {"num_ranks": num_ranks},
        "log": {"progress": "none", "tensorboard": False},
    }
    values = with_settings(values, settings or {}, "cluster_client.")
    config = parse_config(values, "cluster_client")
    with _session(config, model, tokenizer) as session:
        workers = session.run.cluster.workers
        client = AsyncTrainingClient(
            LearnerBackend(workers.learner, workers.pool.workers[0], workers.publisher),
            tokenizer=session.run.tokenizer,
        )
        try:
            yield client
        finally:
            client.shutdown()


def _session(config: RunConfig, model: Any, tokenizer: Any) -> TrainerSession:
    with preparing_run(config) as config:
        run_dir = run_dir_of(config)
        if isinstance(model, nn.Module):
            path = str(save_start(run_dir, model, tokenizer))
            config = config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
        assert config.model.path is not None
        tokenizer = tokenizer or load_tokenizer(config.model.path, config.model.trust_remote_code)
        # Published weights are proved on a prompt; any token will do, and every tokenizer has an end token.
        prompts = save_prompts(run_dir, [[tokenizer.eos_token_id] * 2], [{}])
        source = config.data.train.model_copy(update={"path": str(prompts)})
        config = config.model_copy(update={"data": config.data.model_copy(update={"train": source})})
        probe = load_prompts(config.data, tokenizer).train
        given = Given(scorers={"none": lambda prompts, responses, metadata: [0.0] * len(prompts)})
        return TrainerSession(config, tokenizer, probe, given)
