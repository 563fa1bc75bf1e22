"""Ways to get the RLOO and GRPO fronts wrong; see bench/mutation.py. Each must make the named test fail."""

RLOO = "tests/trainers/test_rloo_config.py::"
GRPO = "tests/trainers/test_grpo_config.py::"
ROWS = "tests/trainers/test_rloo_datasets.py::"
CALLBACKS = "tests/trainers/test_callbacks.py::"
RLOO_ACTS = RLOO + "test_fields_act"
GRPO_ACTS = GRPO + "test_fields_act"

MUTATIONS = {
    "rl_cluster.trainers.rloo_run_config": [
        (
            '"reward_token" if config.token_level_kl else "reward_sequence"',
            '"reward_sequence"',
            RLOO_ACTS,
        ),
        ('"clip": config.reward_clip_range if config.normalize_reward else None', '"clip": None', RLOO_ACTS),
        ('"missing_eos_penalty": config.missing_eos_penalty', '"missing_eos_penalty": None', RLOO_ACTS),
        ("batches.batch_size // config.rloo_k", "batches.batch_size", RLOO_ACTS),
        (
            "config.gradient_accumulation_steps * config.num_mini_batches\n",
            "config.gradient_accumulation_steps\n",
            RLOO_ACTS,
        ),
        ("math.ceil(episodes / batch)", "episodes // batch", RLOO_ACTS),
        (
            "int(config.warmup_steps) * counts.updates_per_step",
            "int(config.warmup_steps)",
            RLOO_ACTS,
        ),
        ("batch % config.rloo_k", "False", RLOO + "test_what_cannot_be_is_refused_by_name"),
        (
            "(None, value, before.get(name))",
            "(None, value)",
            RLOO + "test_derived_sizes_are_filled_in_and_a_contradiction_is_refused",
        ),
    ],
    "rl_cluster.trainers.grpo_run_config": [
        ("return 1.0, high - 1.0", "return config.epsilon, high", GRPO_ACTS),
        ("return config.epsilon, high\n\n", "return config.epsilon, config.epsilon\n\n", GRPO_ACTS),
        ("max(steps // accumulation, 1)", "1", GRPO_ACTS),
        ("size = micro * max(steps, accumulation)", "size = micro * steps", GRPO_ACTS),
        ("config.num_iterations * generation.mini_batches", "generation.mini_batches", GRPO_ACTS),
        ('"sequence": "sequence_mean"', '"sequence": "sequence"', GRPO_ACTS),
        ('"sapo": ("sapo", "sequence_mean")', '"sapo": ("sapo", "token_mean")', GRPO_ACTS),
        (
            "config.num_generations_eval or config.num_generations",
            "config.num_generations",
            GRPO_ACTS,
        ),
    ],
    "rl_cluster.trainers.arguments": [
        ("math.ceil(asked * updates) if 0 < asked < 1", "math.ceil(asked) if 0 < asked < 1", GRPO_ACTS),
        ("math.ceil(updates / counts.updates_per_step)", "math.ceil(updates)", GRPO_ACTS),
        ("args.max_grad_norm or NO_CLIPPING", "args.max_grad_norm or 1.0", RLOO_ACTS),
    ],
    "rl_cluster.trainers.datasets": [
        (
            "ids[mask != 0]",
            "ids",
            ROWS + "test_texts_and_token_ids_give_the_same_prompt_and_other_columns_are_metadata",
        ),
        ("len(tokens) > max_tokens", "False", ROWS + "test_bad_rows_are_refused_by_place_and_reason"),
    ],
    "rl_cluster.trainers.callbacks": [
        (
            'named["eval_reward"] = named["eval_score_mean"]',
            "pass",
            CALLBACKS + "test_evaluations_have_the_names_of_both_worlds",
        ),
    ],
}
