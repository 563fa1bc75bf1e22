"""The plan: derived counts, placement and memory, against numbers worked out by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rl_cluster.config.checks.run import check_config
from rl_cluster.config.planning.machine import GIB, Machine, find_machine
from rl_cluster.config.planning.memory import LOGITS_IN_CHUNK, LearnerSizes, activation_bytes, learner_memory
from rl_cluster.config.planning.model_shape import ModelShape, find_shape
from rl_cluster.config.planning.plan import make_plan
from rl_cluster.config.planning.published_shapes import PUBLISHED
from rl_cluster.config.reading.load import apply_override, load_config, parse_config
from rl_cluster.config.run import ClusterConfig, ModelConfig, ScratchModel
from tests.common.settings import BASE

LAPTOP = Machine(cores=2, memory=24 * GIB, gpus=0, gpu_memory=0)
SERVER = Machine(cores=32, memory=256 * GIB, gpus=0, gpu_memory=0)
EIGHT_GPUS = Machine(cores=96, memory=1024 * GIB, gpus=8, gpu_memory=80 * GIB)
CONFIGS = Path(__file__).parents[2] / "configs"
SHAPE = ModelShape(
    num_parameters=1000,
    num_layers=3,
    hidden_size=8,
    intermediate_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    vocab_size=50,
    max_positions=64,
    source="test",
)


def plan_of(machine, *overrides):
    data = BASE
    for override in overrides:
        data = apply_override(data, override)
    config = parse_config(data)
    check_config(config, machine)
    return make_plan(config, machine)


def test_derived_counts_follow_from_the_three_knobs():
    plan = plan_of(
        LAPTOP,
        "batch={prompts_per_step: 12, samples_per_prompt: 4, tokens_per_micro_batch: 64}",
        "algorithm={name: ppo, num_epochs: 3, num_mini_batches: 2}",
        "rollout.max_new_tokens=10",
        "learner.num_ranks=2",
        "run.steps=5",
    )
    d = plan.derived
    # 12 × 4 = 48 sequences; 3 epochs × 2 mini-batches = 6 updates of 24; "99+99=" is 6 tokens, 6 + 10 = 16;
    # 12 sequences a rank, 64 // 16 = 4 a micro-batch, so 3 micro-batches.
    assert (d.groups_per_step, d.sequences_per_step) == (12, 48)
    assert (d.updates_per_step, d.sequences_per_update) == (6, 24)
    assert (d.total_updates, d.total_sequences) == (30, 240)
    assert (d.max_prompt_tokens, d.max_sequence_tokens) == (6, 16)
    assert (d.max_generated_tokens_per_step, d.max_tokens_per_step) == (480, 768)
    assert (d.micro_batch_tokens, d.max_micro_batches_per_update) == (64, 3)
    assert plan.critic == "shared"
    assert plan.reference == "worker"


LARGE = "model.scratch.hidden_size=1024"
"""More parameters than ONE_THREAD_LIMIT."""


def test_the_matrices_of_a_small_model_are_not_shared_out_among_threads():
    small = plan_of(
        SERVER, "rollout.num_workers=4", "model.scratch={hidden_size: 64, num_heads: 2, num_layers: 1}"
    )
    assert {w.threads for w in small.workers} == {1}
    assert {w.threads for w in plan_of(SERVER, LARGE).of("learner")} == {32}


def test_roles_that_take_turns_may_each_use_all_cores():
    plan = plan_of(SERVER, LARGE, "rollout.num_workers=4", "learner.num_ranks=2", "algorithm={name: rloo}")
    threads = {role: [w.threads for w in plan.of(role)] for role in ("rollout", "learner", "reference")}
    assert threads == {"rollout": [8] * 4, "learner": [16] * 2, "reference": [16]}
    assert sum(w.num_cpus for w in plan.workers) <= 32


def test_asynchronous_roles_share_the_cores():
    plan = plan_of(SERVER, LARGE, "rollout.num_workers=4", "learner.num_ranks=2", "async.max_policy_lag=1")
    assert [w.threads for w in plan.of("rollout")] == [4] * 4
    assert [w.threads for w in plan.of("learner")] == [8] * 2
    assert not plan.synchronous
    assert plan.advice == ()


def test_claims_always_fit_the_machine():
    plan = plan_of(LAPTOP, "rollout.num_workers=2", "learner.num_ranks=2", "algorithm={name: ppo}")
    assert [w.name for w in plan.workers] == [
        "learner-0",
        "learner-1",
        "rollout-0",
        "rollout-1",
        "reference-0",
    ]
    assert sum(w.num_cpus for w in plan.workers) <= 2


def test_cpus_per_worker_is_obeyed():
    plan = plan_of(SERVER, "cluster.cpus_per_worker=3")
    assert {w.threads for w in plan.workers} == {3}


def test_too_many_busy_threads_are_advised_against():
    plan = plan_of(LAPTOP, "rollout.num_workers=2", "async.max_policy_lag=1")
    assert "3 threads of engines and learner" in plan.advice[0]


def test_without_kl_there_is_no_reference_and_under_lora_no_copy_of_it():
    assert plan_of(LAPTOP).reference == "none"
    assert plan_of(LAPTOP).of("reference") == ()
    lora = plan_of(LAPTOP, "model.lora={}", "algorithm={name: grpo, kl: {coef: 0.1}}")
    assert lora.reference == "adapter_off"
    assert lora.of("reference") == ()
    assert lora.adapters_only


def test_the_exact_divergence_keeps_a_frozen_copy_beside_the_policy():
    penalty = "algorithm={name: ppo, kl: {coef: 0.1, place: reward_token, estimator: exact}}"
    plan, usual = plan_of(LAPTOP, penalty), plan_of(LAPTOP, penalty.replace("exact", "k1"))
    assert (plan.reference, usual.reference) == ("beside_policy", "worker")
    assert plan.of("reference") == ()
    (learner,), (other,) = plan.of("learner"), usual.of("learner")
    copy = dict(learner.memory.parts)["reference"]
    assert copy == dict(learner.memory.parts)["weights"] and learner.memory.total == other.memory.total + copy


def test_roles_get_gpus_of_their_own():
    plan = plan_of(
        EIGHT_GPUS,
        "learner.num_ranks=3",
        "rollout={num_workers: 2, tensor_parallel_size: 2}",
        "algorithm={name: ppo, critic: {separate: true}}",
    )
    gpus = {w.name: w.gpus for w in plan.workers}
    assert gpus == {
        "learner-0": (0,),
        "learner-1": (1,),
        "learner-2": (2,),
        "rollout-0": (3, 4),
        "rollout-1": (5, 6),
        "reference-0": (7,),
        "critic-0": (0,),
        "critic-1": (1,),
        "critic-2": (2,),
    }
    claims = {w.name: w.num_gpus for w in plan.workers}
    assert claims["learner-0"] == claims["critic-0"] == 0.5
    assert claims["rollout-0"] == 2
    assert plan.sync_backend == "nccl"
    assert plan.critic == "separate"


def test_an_engine_does_not_cross_machines():
    two = Machine(cores=32, memory=256 * GIB, gpus=4, gpu_memory=80 * GIB, num_nodes=2)
    plan = plan_of(two, "learner.num_ranks=3", "rollout={num_workers: 2, tensor_parallel_size: 2}")
    assert [(w.node, w.gpus) for w in plan.of("rollout")] == [(1, (0, 1)), (1, (2, 3))]


def test_colocated_engines_lie_over_the_learner():
    plan = plan_of(
        EIGHT_GPUS,
        "cluster.colocate=true",
        "learner.num_ranks=4",
        "rollout={num_workers: 2, tensor_parallel_size: 2}",
    )
    assert [w.gpus for w in plan.of("learner")] == [(0,), (1,), (2,), (3,)]
    assert [w.gpus for w in plan.of("rollout")] == [(0, 1), (2, 3)]
    assert [w.num_gpus for w in plan.of("learner")] == [0.5] * 4
    assert plan.sync_backend == "ipc"


def test_adapters_on_a_shared_gpu_travel_by_gloo():
    plan = plan_of(EIGHT_GPUS, "cluster.colocate=true", "model.lora={}")
    assert plan.sync_backend == "gloo"


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    [(0, 2000, 2000, 12000), (1, 2000, 2000, 3000), (2, 2000, 500, 3000), (3, 500, 500, 3000)],
)
def test_learner_memory_is_that_of_the_zero_paper(stage, weights, gradients, optimizer):
    sizes = LearnerSizes(
        trained=1000,
        dtype="bfloat16",
        zero_stage=stage,
        num_ranks=4,
        micro_batch_tokens=10,
        gradient_checkpointing=False,
        offload_optimizer=False,
    )
    parts = dict(learner_memory(SHAPE, sizes, on_gpu=True).parts)
    # 17 × 2 bytes × 10 tokens × 8 × 3 layers, and 3 × 4 bytes × 10 × 50 logits.
    activations = 8160 + 6000
    assert parts == {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": activations,
    }


def test_checkpointing_keeps_one_layer_and_the_borders_of_the_others():
    assert activation_bytes(SHAPE, 10, 2, checkpointing=True) == 2 * 10 * 8 * 3 + 17 * 2 * 10 * 8


def test_the_chunk_of_logits_is_the_one_that_the_learner_uses():
    from rl_cluster.modeling.token_logprobs import CHUNK_ELEMENTS

    assert LOGITS_IN_CHUNK == CHUNK_ELEMENTS


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_as_transformers_counts_them(tmp_path, tied):
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        expected = sum(p.numel() for p in Qwen2ForCausalLM(config).parameters())
    shape = find_shape(ModelConfig(path=str(tmp_path)))
    assert shape is not None
    assert shape.num_parameters == expected
    assert shape.kv_values_per_token == 2 * 3 * 2 * 8


def test_stored_weights_are_counted_from_their_headers(tmp_path):
    values = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 10}
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file({"a": np.zeros((3, 5), np.float16), "b": np.zeros(7, np.float32)}, tmp_path / "m.safetensors")
    shape = find_shape(ModelConfig(path=str(tmp_path)))
    assert shape is not None
    assert shape.num_parameters == 22


def test_lora_parameters_are_counted_as_peft_counts_them():
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    scratch = ScratchModel(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4)
    shape = find_shape(ModelConfig(scratch=scratch))
    config = Qwen2Config(
        vocab_size=20,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = get_peft_model(Qwen2ForCausalLM(config), LoraConfig(r=5, target_modules="all-linear"))
    assert shape is not None
    assert shape.lora_parameters(5) == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_a_hub_name_that_is_not_here_has_its_published_shape_else_the_nearest_ones():
    known = find_shape(ModelConfig(path="Qwen/Qwen2.5-7B-Instruct"))
    assert known is not None and known.is_its_own and "not on this machine" in known.source
    assert (known.num_layers, known.hidden_size, known.num_heads, known.num_kv_heads) == (28, 3584, 28, 4)
    other = find_shape(ModelConfig(path="owner/Model-7B-Instruct"))
    assert other is not None and not other.is_its_own and "not on this machine" in other.source
    assert (other.num_parameters, other.num_layers) == (7_000_000_000, 32), "Mistral-7B's layers"
    assert find_shape(ModelConfig(path="owner/mystery")) is None


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row.name)
def test_published_parameters_are_those_that_transformers_counts(row):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {
        "vocab_size": row.vocab_size,
        "hidden_size": row.hidden_size,
        "intermediate_size": row.intermediate_size,
        "num_hidden_layers": row.num_layers,
        "num_attention_heads": row.num_heads,
        "tie_word_embeddings": row.tied,
    }
    if row.model_type != "gpt_neox":
        values |= {"num_key_value_heads": row.num_kv_heads, "head_dim": row.head_dim}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(row.model_type, **values))
    assert sum(weight.numel() for weight in model.parameters()) == row.num_parameters


@pytest.mark.parametrize(
    ("model_type", "values", "expected"),
    [
        (
            "gpt2",
            {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 90, "n_positions": 64},
            (3, 32, 4, 64),
        ),
        (
            "qwen3_moe",
            {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_experts": 4,
                "vocab_size": 90,
            },
            (2, 32, 4, 32768),
        ),
    ],
)
def test_architectures_with_other_names_are_read_as_transformers_reads_them(
    tmp_path, model_type, values, expected
):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **values)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    shape = find_shape(ModelConfig(path=str(tmp_path)))
    assert shape is not None and shape.num_parameters == count
    assert (shape.num_layers, shape.hidden_size, shape.num_heads, shape.max_positions) == expected


def test_code_that_comes_with_a_model_is_not_run_to_plan(tmp_path):
    values = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}, "architectures": ["Mine"]}
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10}
    (tmp_path / "config.json").write_text(json.dumps(values | sizes))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    shape = find_shape(ModelConfig(path=str(tmp_path), trust_remote_code=True))
    assert shape is not None and (shape.num_layers, shape.hidden_size) == (2, 8)
    assert not (tmp_path / "ran").exists()


def test_shards_are_counted_once_though_a_second_copy_lies_beside_them(tmp_path):
    values = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 10}
    (tmp_path / "config.json").write_text(json.dumps(values))
    for name, size in (
        ("model-1.safetensors", 15),
        ("model-2.safetensors", 7),
        ("consolidated.safetensors", 22),
    ):
        save_file({name: np.zeros(size, np.float16)}, tmp_path / name)
    weights = {"model-1.safetensors": "model-1.safetensors", "model-2.safetensors": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    shape = find_shape(ModelConfig(path=str(tmp_path)))
    assert shape is not None and shape.num_parameters == 22


def test_the_machine_of_the_configuration_replaces_the_one_here():
    machine = find_machine(
        ClusterConfig(num_nodes=3, num_gpus_per_node=4, num_cpus_per_node=64, gpu_memory_gib=141.0)
    )
    assert (machine.total_gpus, machine.total_cores, machine.gpu_memory) == (12, 192, 141 * GIB)
    assert find_machine(ClusterConfig(device="cpu", num_gpus_per_node=4)).gpus == 0


@pytest.mark.parametrize(
    ("recipe", "gpus", "nodes", "expected"),
    [
        ("gpu_1_colocated", 1, 1, {"learner": 1, "rollout": 1, "reference": 0}),
        ("gpu_8_disaggregated", 8, 1, {"learner": 4, "rollout": 3, "reference": 1}),
        ("gpu_2x8_7b", 8, 2, {"learner": 8, "rollout": 8, "reference": 0}),
    ],
)
def test_gpu_recipes_fit_the_machines_they_are_for(recipe, gpus, nodes, expected):
    config = load_config(
        CONFIGS / f"{recipe}.yaml", [f"cluster.num_gpus_per_node={gpus}", "cluster.num_cpus_per_node=64"]
    )
    machine = find_machine(config.cluster)
    assert machine.num_nodes == nodes
    check_config(config, machine)
    plan = make_plan(config, machine)
    assert {role: len(plan.of(role)) for role in expected} == expected
    assert plan.device == "cuda"
    assert plan.advice == ()
