"""Ways to get the PPO front wrong; see bench/mutation.py. Each must make the named test fail."""

CONFIG = "tests/trainers/test_ppo_config.py::"
PARTS = "tests/trainers/test_ppo_parts.py::"
REWARDS = "tests/trainers/test_reward_signatures.py::"

MUTATIONS = {
    "rl_cluster.trainers.ppo_checks": [
        (
            "config.mini_batch_size * config.gradient_accumulation_steps, sequences",
            "config.mini_batch_size, sequences",
            CONFIG + "test_mini_batches_and_accumulation_make_the_updates_of_a_pass",
        ),
        (
            "own if _changed(config, own) or not in_trl else trl",
            "trl if in_trl else own",
            CONFIG + "test_both_families_of_kl_names_are_understood",
        ),
        (
            "config.adap_kl_ctrl is not False and coef > 0",
            "coef > 0",
            CONFIG + "test_both_families_of_kl_names_are_understood",
        ),
        ('"mse": "k2"', '"mse": "k1"', CONFIG + "test_trls_kl_penalties_are_estimators"),
        (
            'place="reward_token"',
            'place="loss"',
            CONFIG + "test_the_defaults_make_the_documented_algorithm",
        ),
        (
            "max_positions - config.max_new_tokens",
            "max_positions",
            CONFIG + "test_prompts_get_the_room_that_responses_leave",
        ),
    ],
    "rl_cluster.trainers.ppo_run_config": [
        (
            "clip_value=config.value_clip",
            "clip_value=config.clip_ratio",
            CONFIG + "test_every_field_changes_the_run",
        ),
        (
            "EARLY_STOPPING_FACTOR * config.target_kl",
            "config.target_kl",
            CONFIG + "test_early_stopping_stops_at_trls_limit",
        ),
        (
            "place.temperature or config.temperature",
            "config.temperature",
            CONFIG + "test_an_environments_temperature_and_stops_become_the_runs",
        ),
    ],
    "rl_cluster.trainers.ppo_model": [
        (
            "torch.relu(self.hidden(hidden))",
            "self.hidden(hidden)",
            PARTS + "test_the_value_head_is_linear_relu_linear",
        ),
    ],
    "rl_cluster.trainers.ppo_buffer": [
        (
            "self._controller.update(float(current), n_steps)",
            "self._controller.update(float(current), 1)",
            PARTS + "test_the_kl_coefficient_follows_the_formula",
        ),
        (
            "AdaptiveKL(init_kl_coef, target, horizon)",
            "AdaptiveKL(init_kl_coef, horizon, target)",
            PARTS + "test_the_kl_coefficient_follows_the_formula",
        ),
        (
            "self._responses[row] for row in rows",
            "self._responses[0] for row in rows",
            PARTS + "test_the_buffer_gives_everything_back_once_whole_or_in_parts",
        ),
    ],
    "rl_cluster.trainers.ppo_history": [
        (
            "policy + value_coef * value",
            "policy + value",
            PARTS + "test_stats_have_trls_names_beside_our_own",
        ),
        (
            '"rewards": "objective/scores"',
            '"rewards": "objective/rlhf_reward"',
            PARTS + "test_the_columns_of_a_history_are_the_documented_ones",
        ),
    ],
    "rl_cluster.trainers.reward_signatures": [
        ("[p + r for p, r in zip", "[r for p, r in zip", REWARDS + "test_every_form_gets_its_arguments"),
        (
            "values = (prompt, generated, prompt + generated)",
            "values = (prompt, generated, generated)",
            REWARDS + "test_every_form_gets_its_arguments",
        ),
        (
            "start += len(item.prompts)",
            "start += 0",
            REWARDS + "test_what_is_scored_at_the_same_time_is_one_call",
        ),
        (
            "if len(answer) != expected:",
            "if False:",
            REWARDS + "test_an_answer_of_the_wrong_length_or_kind_is_an_error",
        ),
    ],
}
