"""Ways to get the losses of fixed data wrong, and the test that must notice (run by bench/mutation.py)."""

T = "tests/algorithms/test_preference.py::"
SIGMOID = T + "test_sigmoid_loss_is_dpo_and_its_smoothing_mixes_in_the_wrong_label"
HAND = T + "test_losses_by_hand"
KTO_HAND = T + "test_kto_weighs_desirable_and_undesirable_rows_against_the_baseline"
DPO = T + "test_dpo_step_equals_numpy_on_summed_log_ratios"
FREE = T + "test_reference_free_dpo_ignores_the_reference"
ORPO = T + "test_orpo_step_equals_numpy_on_length_averaged_likelihoods"
KTO = T + "test_kto_step_takes_its_labels_from_the_batch"
KTO_SIDE = T + "test_a_kto_row_is_right_where_its_reward_is_on_its_side_of_the_baseline"
REWARD = T + "test_reward_step_takes_margins_and_centres_the_scores"
ZERO = T + "test_pairs_of_weight_zero_count_nowhere"
FINITE = T + "test_log_odds_and_its_gradient_are_finite_everywhere"

MUTATIONS = {
    "rl_cluster.algorithms.preference": [
        ("-(1.0 - label_smoothing) * right", "-(1.0 + label_smoothing) * right", SIGMOID),
        ("- label_smoothing * wrong", "+ label_smoothing * wrong", SIGMOID),
        ("logsigmoid(-beta * delta)", "logsigmoid(beta * delta)", SIGMOID),
        ("1.0 / (2.0 * beta)", "1.0 / beta", HAND),
        ("torch.relu(1.0 - beta * delta)", "torch.relu(1.0 + beta * delta)", HAND),
        ("logprobs - torch.log(-torch", "logprobs + torch.log(-torch", HAND),
        ("mean_logprobs.clamp(max=MAX_MEAN_LOGPROB)", "mean_logprobs", FINITE),
        (
            "log_odds(chosen_mean) - log_odds(rejected_mean)",
            "log_odds(rejected_mean) - log_odds(chosen_mean)",
            HAND,
        ),
        ("beta * (log_ratios - z0)", "beta * log_ratios", KTO_HAND),
        ("1.0 - torch.sigmoid(-away)", "1.0 - torch.sigmoid(away)", KTO_HAND),
        ("desirable_weight * good, undesirable_weight * bad", "desirable_weight * good, bad", KTO_HAND),
        ("chosen_scores - rejected_scores - margin", "chosen_scores - rejected_scores + margin", HAND),
    ],
    "rl_cluster.algorithms.preference_objectives": [
        ("ratios = ratios / row_lengths(inputs.row, inputs.num_rows)", "pass", DPO),
        (
            "chosen - rejected, step.beta, step.label_smoothing",
            "rejected - chosen, step.beta, step.label_smoothing",
            DPO,
        ),
        ("step.beta, step.label_smoothing)", "step.beta, 0.0)", DPO),
        ("_row_log_ratios(inputs, step.reference_free)", "_row_log_ratios(inputs, False)", FREE),
        (
            "_row_logprobs(inputs) - row_totals(inputs.reference",
            "_row_logprobs(inputs) + row_totals(inputs.reference",
            DPO,
        ),
        ("-chosen + step.coef * ratio_losses", "-chosen - step.coef * ratio_losses", ORPO),
        ("_pairs(logprobs / row_lengths(inputs.row, inputs.num_rows))", "_pairs(logprobs)", ORPO),
        ("inputs.num_rows) > 0", "inputs.num_rows) < 0", KTO),
        ("rewards > step.beta * step.z0", "rewards > step.z0", KTO_SIDE),
        ("torch.where(undesirable, rewards, 0.0)", "torch.where(desirable, rewards, 0.0)", KTO),
        ("margin = margin + _pairs", "margin = _pairs", REWARD),
        ("inputs.row, inputs.num_rows))[0]", "inputs.row, inputs.num_rows))[1]", REWARD),
        ("step.centre * (chosen + rejected)", "step.centre * (chosen - rejected)", REWARD),
        ("values_R[0::2], values_R[1::2]", "values_R[1::2], values_R[0::2]", DPO),
        ("return chosen + rejected", "return chosen", DPO),
        ('"accuracy_sum": chosen > rejected', '"accuracy_sum": chosen < rejected', DPO),
        ("torch.where(live, column.detach().double(), 0.0)", "column.detach().double()", ZERO),
    ],
}
