"""One way or more to get each formula wrong, and the test that must notice (run by bench/mutation.py)."""

ADVANTAGES = "tests/algorithms/test_advantages.py::"
GRID = "tests/algorithms/test_grid.py::"
KL = "tests/algorithms/test_kl.py::"
LOSSES = "tests/algorithms/test_losses.py::"
OBJECTIVES = "tests/algorithms/test_objectives.py::"
RULES = "tests/algorithms/test_rules.py::"
SAMPLING = "tests/algorithms/test_sampling.py::"
TABLE = "tests/algorithms/test_table.py::"
WEIGHTS = "tests/algorithms/test_weights.py::"

PENCIL = ADVANTAGES + "test_gae_of_three_tokens_is_what_a_pencil_gives"
RAGGED = ADVANTAGES + "test_gae_of_ragged_rows_equals_the_forward_sum_of_each_row"
DONES = ADVANTAGES + "test_gae_does_not_look_past_an_episode_that_ends_inside_a_row"
TRL_PAGE = ADVANTAGES + "test_leave_one_out_gives_the_worked_example_of_trls_rloo_page"
GROUP_STD = ADVANTAGES + "test_group_normalised_divides_by_the_unbiased_deviation_of_the_group"
BATCH_STD = ADVANTAGES + "test_group_normalised_by_the_batch_uses_the_deviation_of_all_scores"
WHITEN = ADVANTAGES + "test_whiten_by_hand_leaves_out_what_the_mask_leaves_out"
KL_HAND = KL + "test_estimators_by_hand"
KL_EXACT = KL + "test_the_exact_divergence_is_that_of_the_distributions"
TOKEN_CLIP = LOSSES + "test_the_token_ratio_clips_only_the_side_that_would_gain"
ROW_RATIO = LOSSES + "test_a_row_ratio_gives_exactly_the_loss_and_gradient_of_the_row_formula"
CISPO = LOSSES + "test_cispo_keeps_a_gradient_at_every_token_with_the_clipped_ratio_as_weight"
SAPO = LOSSES + "test_sapo_is_a_sigmoid_of_the_ratio_with_a_temperature_by_the_sign_of_the_advantage"
DECOUPLED = LOSSES + "test_the_decoupled_objective_weighs_the_clipped_loss_by_proximal_over_behaviour"
VALUE = LOSSES + "test_the_clipped_value_loss_takes_the_worse_of_two_squared_errors_per_token"
TERMS = OBJECTIVES + "test_the_loss_is_the_sum_of_its_terms"
METRICS = OBJECTIVES + "test_metrics_are_plain_sums_over_the_tokens_that_train"
FINITE = OBJECTIVES + "test_every_pair_of_extreme_log_probabilities_gives_a_finite_loss_and_gradient"
PPO = RULES + "test_ppo_runs_gae_on_the_score_at_the_last_token_and_the_penalty_where_it_belongs"
RLOO = RULES + "test_rloo_takes_the_penalised_score_minus_that_of_the_other_sample"
RLOO_TOKEN = RULES + "test_rloo_with_token_level_kl_charges_each_token_for_what_comes_from_it_on"
RLOO_SCALE = RULES + "test_rloo_whitens_rewards_over_rows_and_normalises_advantages_after_leave_one_out"
MEANS = WEIGHTS + "test_the_weights_of_a_mean_add_up_to_1_over_the_tokens"
LEFT_OUT = WEIGHTS + "test_rows_that_do_not_train_weigh_nothing_and_count_nowhere"

MUTATIONS = {
    "rl_cluster.algorithms.advantages": [
        ("- values_NL[:, t]\n        next_advantage", "+ values_NL[:, t]\n        next_advantage", PENCIL),
        ("gamma * going_on[:, t] * next_value", "going_on[:, t] * next_value", PENCIL),
        ("gamma * lam * going_on[:, t] * next_advantage", "gamma * going_on[:, t] * next_advantage", PENCIL),
        ("reversed(range(num_columns))", "range(num_columns)", RAGGED),
        ("gamma * going_on[:, t] * next_value", "gamma * next_value", DONES),
        ("gamma * lam * going_on[:, t] * next_advantage", "gamma * lam * next_advantage", DONES),
        ("return advantages, advantages + values_NL", "return advantages, advantages", PENCIL),
        (
            "rewards_NL[:, t] + gamma * ahead",
            "rewards_NL[:, t] + ahead",
            ADVANTAGES + "test_discounted_returns_by_hand",
        ),
        ("* sizes / (sizes - 1)", "", TRL_PAGE),
        (
            "(scores - group_mean(scores, group_ids)) * sizes",
            "(group_mean(scores, group_ids) - scores) * sizes",
            TRL_PAGE,
        ),
        (
            "return scores - group_mean",
            "return scores + group_mean",
            ADVANTAGES + "test_group_centred_by_hand",
        ),
        ("group_std(whole, group_ids) + epsilon", "group_std(whole, group_ids)", GROUP_STD),
        ("whole.std(ddof=1) + epsilon", "whole.std(ddof=0) + epsilon", BATCH_STD),
        ("whole.std(ddof=1) + epsilon", "centred.std(ddof=1) + epsilon", BATCH_STD),
        ("chosen.var(ddof=1)", "chosen.var(ddof=0)", WHITEN),
        ("chosen = values[mask]", "chosen = values.ravel()", WHITEN),
        ("whitened if shift_mean else whitened + mean", "whitened", WHITEN),
        ("np.where(mask, whitened", "np.where(True, whitened", WHITEN),
    ],
    "rl_cluster.algorithms.groups": [
        ("* sizes / (sizes - 1))", ")", GROUP_STD),
        (
            "(sums / _column(sizes, scores))",
            "(sums / sizes.max())",
            ADVANTAGES + "test_leave_one_out_takes_groups_of_any_size_in_any_order",
        ),
        (
            "sizes.min() < 2",
            "sizes.max() < 2",
            ADVANTAGES + "test_a_group_of_one_is_refused_by_name_with_a_remedy",
        ),
    ],
    "rl_cluster.algorithms.grid": [
        (
            "self.counts[rows] - 1",
            "0",
            GRID + "test_a_score_lands_on_the_last_action_and_nowhere_in_a_row_without_one",
        ),
        (
            "rows = np.flatnonzero(self.counts)",
            "rows = np.arange(len(self.counts))",
            GRID + "test_a_score_lands_on_the_last_action_and_nowhere_in_a_row_without_one",
        ),
        (
            "< self.counts[:, None]",
            "<= self.counts[:, None]",
            GRID + "test_the_grid_holds_the_actions_of_each_row_side_by_side",
        ),
    ],
    "rl_cluster.algorithms.kl": [
        ("safe_logprobs(logprobs).exp() * log_ratio", "safe_logprobs(logprobs) * log_ratio", KL_EXACT),
        (
            "(safe_logprobs(logprobs).exp() * log_ratio(logprobs, reference_logprobs)).sum(-1)",
            "(safe_logprobs(reference_logprobs).exp() * log_ratio(logprobs, reference_logprobs)).sum(-1)",
            KL_EXACT,
        ),
        ("return 0.5 * d.square()", "return d.square()", KL_HAND),
        ("torch.expm1(-d) + d", "torch.expm1(-d) - d", KL_HAND),
        ("torch.expm1(-d) + d", "torch.expm1(d) - d", KL_HAND),
        ("return d.abs()", "return d", KL_HAND),
        (
            "safe_logprobs(logprobs) - safe_logprobs(other)",
            "safe_logprobs(other) - safe_logprobs(logprobs)",
            KL_HAND,
        ),
        (
            "safe_logprobs(logprobs) - safe_logprobs(other)",
            "logprobs - other",
            KL + "test_no_pair_of_extremes_gives_a_nan_or_an_infinity",
        ),
        (
            "d = d.clamp(min=-MAX_EXPONENT)",
            "d = d.clamp(-MAX_EXPONENT, MAX_EXPONENT)",
            KL + "test_far_above_the_reference_k3_still_pulls_back",
        ),
        ("exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()", "exponent.exp()", FINITE),
    ],
    "rl_cluster.algorithms.kl_control": [
        (
            "current / self.target - 1.0",
            "current - self.target",
            KL + "test_the_adaptive_controller_moves_in_proportion_to_the_error",
        ),
        (
            "error * num_sequences / self.horizon",
            "error / self.horizon",
            KL + "test_the_adaptive_controller_moves_in_proportion_to_the_error",
        ),
        ("-0.2), 0.2)", "-0.2), 2.0)", KL + "test_the_adaptive_controllers_error_is_clipped_on_both_sides"),
        ("-0.2), 0.2)", "-2.0), 0.2)", KL + "test_the_adaptive_controllers_error_is_clipped_on_both_sides"),
    ],
    "rl_cluster.algorithms.losses": [
        (
            "torch.maximum(free, held), held > free)\n\n\ndef cispo",
            "torch.minimum(free, held), held > free)\n\n\ndef cispo",
            TOKEN_CLIP,
        ),
        (
            "torch.maximum(free, held), held > free)\n\n\ndef cispo",
            "held, held > free)\n\n\ndef cispo",
            LOSSES + "test_the_token_ratio_does_not_clip_the_side_that_would_lose",
        ),
        (
            "held = -advantages * ratio.clamp(1.0 - low, 1.0 + high)",
            "held = -advantages * ratio.clamp(1.0 - high, 1.0 + low)",
            LOSSES + "test_clip_higher_widens_only_the_upper_bound",
        ),
        ("free = -advantages * ratio", "free = advantages * ratio", TOKEN_CLIP),
        (
            "torch.bincount(row, minlength=num_rows)[row].to(torch.float32)",
            "torch.ones_like(row).to(torch.float32)",
            ROW_RATIO,
        ),
        (
            "return row_sum(d, row, num_rows), row_size(row, num_rows)",
            "return row_sum(d, row, num_rows), torch.ones_like(d)",
            ROW_RATIO,
        ),
        ("row_sum(d, row, num_rows) / row_size(row, num_rows)", "row_sum(d, row, num_rows)", ROW_RATIO),
        ("(1.0 + share * (log_prob - log_prob.detach()))", "(1.0 + log_prob - log_prob.detach())", ROW_RATIO),
        ("ratio = ratio.detach()\n    held = ratio.clamp", "held = ratio.clamp", CISPO),
        ("held = ratio.clamp(1.0 - low, 1.0 + high)", "held = ratio", CISPO),
        ("torch.where(advantages > 0, temp", "torch.where(advantages < 0, temp", SAPO),
        ("4.0 / temperature * torch", "4.0 * torch", SAPO),
        ("temperature * (ratio - 1.0)", "(ratio - 1.0)", SAPO),
        ("-advantages * gate", "advantages * gate", SAPO),
        (
            "Surrogate(-advantages * log_prob",
            "Surrogate(advantages * log_prob",
            LOSSES + "test_a_positive_advantage_raises_the_log_probability_and_a_negative_one_lowers_it",
        ),
        ("log_ratio(proximal, behaviour)", "log_ratio(behaviour, proximal)", DECOUPLED),
        (".clamp(max=cap).detach()", ".detach()", DECOUPLED),
        (
            ".clamp(max=cap).detach()",
            ".clamp(max=cap)",
            LOSSES + "test_importance_weights_are_truncated_and_carry_no_gradient",
        ),
        ("0.5 * torch.maximum(free, held)", "torch.maximum(free, held)", VALUE),
        ("0.5 * torch.maximum(free, held)", "0.5 * torch.minimum(free, held)", VALUE),
        ("old_values + (values - old_values)", "returns + (values - old_values)", VALUE),
        (
            "return -safe_logprobs(logprobs)",
            "return safe_logprobs(logprobs)",
            LOSSES + "test_cross_entropy_is_the_weighted_sum_of_surprise",
        ),
    ],
    "rl_cluster.algorithms.objectives": [
        ("inputs.weights * per_token", "per_token", OBJECTIVES + "test_the_loss_is_the_sum_of_its_terms"),
        (
            "inputs.weights * per_token, 0.0).sum()",
            "inputs.weights * per_token, 0.0).mean()",
            OBJECTIVES
            + "test_loss_gradients_and_metrics_do_not_depend_on_how_rows_are_spread_over_micro_batches",
        ),
        ("return -step.loss.entropy_coef", "return step.loss.entropy_coef", TERMS),
        ("return step.kl_coef * kl", "return kl", TERMS),
        ("step.value_coef * _value_terms", "_value_terms", TERMS),
        ("loss = loss * correction", "pass", DECOUPLED),
        (
            "share * log_prob, inputs.advantages",
            "log_prob, inputs.advantages",
            LOSSES + "test_on_policy_all_kinds_have_the_same_gradient",
        ),
        ("0.5 * level.square()", "level.square()", METRICS),
        ("torch.where(live, column.detach().double(), 0.0).sum()", "column.detach().double().sum()", METRICS),
        ("rows[inputs.row[live]] = True", "rows[inputs.row] = True", METRICS),
        (
            "if step.train_policy:",
            "if True:",
            OBJECTIVES + "test_during_value_warm_up_only_the_values_have_a_gradient",
        ),
        (
            "return inputs.logprobs.detach() if inputs.proximal_logprobs is None",
            "return inputs.behaviour_logprobs if inputs.proximal_logprobs is None",
            OBJECTIVES
            + "test_without_proximal_log_probabilities_every_ratio_is_1_and_the_gap_is_to_the_current_policy",
        ),
        ("log_prob = safe_logprobs(inputs.logprobs)", "log_prob = inputs.logprobs", FINITE),
    ],
    "rl_cluster.algorithms.rules": [
        (
            'kl.estimator == "exact"',
            'kl.estimator == "k9"',
            RULES + "test_the_exact_divergence_takes_the_place_of_the_estimate",
        ),
        ("-inputs.kl_coef * kl_NL, -inputs.kl_coef * kl", "inputs.kl_coef * kl_NL, inputs.kl_coef * kl", PPO),
        (
            '"reward_token": (penalty_NL, np.zeros_like(penalty))',
            '"reward_token": (penalty_NL, penalty)',
            PPO,
        ),
        ('"loss": (np.zeros_like(penalty_NL)', '"loss": (penalty_NL', PPO),
        (
            "grid.pad(inputs.batch.values), config.gamma, config.lam",
            "grid.pad(inputs.batch.values), config.lam, config.gamma",
            PPO,
        ),
        (
            "whiten(token_rewards, grid.mask, shift_mean=False)",
            "whiten(token_rewards, grid.mask)",
            RULES + "test_ppo_whitens_rewards_in_scale_and_keeps_their_mean",
        ),
        ("scores + of_row", "scores", RLOO),
        ("leave_one_out(to_go", "group_centred(to_go", RLOO),
        (
            "return row + discounted_returns(rewards.token_grid, 1.0)",
            "return row + rewards.token_grid",
            RLOO_TOKEN,
        ),
        ("rewards.whole.var(ddof=1)", "rewards.whole.var(ddof=0)", RLOO_SCALE),
        ("if config.normalize_advantage:", "if not config.normalize_advantage:", RLOO_SCALE),
        (
            "inputs.batch.group_ids, config.scale",
            "inputs.batch.group_ids",
            RULES + "test_grpo_with_a_sequence_penalty_normalises_the_penalised_score",
        ),
        (
            "BASELINES[config.baseline]",
            'BASELINES["none"]',
            RULES + "test_reinforce_discounts_token_rewards_and_whitens_them_over_the_batch",
        ),
        (
            "discounted_returns(token_rewards, config.gamma)",
            "discounted_returns(token_rewards, 1.0)",
            RULES + "test_reinforce_discounts_token_rewards_and_whitens_them_over_the_batch",
        ),
        (
            "kl_per_token(pair[0], pair[1]",
            "kl_per_token(pair[1], pair[0]",
            RULES + "test_rloo_reports_kl_and_non_score_reward_with_the_signs_of_the_code",
        ),
        ("token_NL.sum(axis=1) + of_row)", "of_row)", RLOO_TOKEN),
        (
            "if batch.proximal_logprobs is None else batch.proximal_logprobs",
            "",
            RULES + "test_ppo_runs_gae_on_the_score_at_the_last_token_and_the_penalty_where_it_belongs",
        ),
    ],
    "rl_cluster.algorithms.sampling": [
        (
            "1.0 - k / np.arange(num_wrong + 1",
            "1.0 - k / np.arange(num_wrong",
            SAMPLING + "test_pass_at_k_equals_the_share_of_subsets_with_a_correct_sample",
        ),
        (
            "if num_wrong < k:",
            "if num_wrong <= k:",
            SAMPLING + "test_pass_at_k_equals_the_share_of_subsets_with_a_correct_sample",
        ),
        ("tolerance * scale", "0.0", SAMPLING + "test_rounding_in_a_weighted_sum_is_not_a_signal"),
        (
            "np.ptp(scores) >",
            "scores.max() >",
            SAMPLING + "test_a_group_has_a_signal_only_if_some_score_differs",
        ),
    ],
    "rl_cluster.algorithms.weights": [
        ("1.0 / max(float(counts[trains].sum()), 1.0)", "1.0 / len(counts)", MEANS),
        ("1.0 / (num_rows * safe_counts)", "1.0 / safe_counts", MEANS),
        (
            "1.0 / (num_rows * max_new_tokens)",
            "1.0 / (num_rows * counts.max())",
            WEIGHTS + "test_constant_divides_by_the_longest_possible_response",
        ),
        ("max(int(trains.sum()), 1)", "len(counts)", LEFT_OUT),
        ("np.where(trains, weight, 0.0)", "weight", LEFT_OUT),
    ],
    "rl_cluster.algorithms.table": [
        (
            'if config.kl.place == "loss" else 0.0',
            'if config.kl.place != "loss" else 0.0',
            TABLE + "test_beta_enters_the_loss_only_where_the_configuration_places_it_there",
        ),
        (
            "not critic.separate",
            "critic.separate",
            TABLE + "test_a_shared_critic_adds_its_loss_and_a_separate_one_does_not",
        ),
    ],
}
