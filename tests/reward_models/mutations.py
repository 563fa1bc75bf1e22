"""Ways to get the reward models wrong, and the test that must notice each (run by bench/mutation.py)."""

FORWARD = "tests/reward_models/test_reward_model_forward.py::"
TRAINER = "tests/reward_models/test_reward_model_trainer.py::"
DATASET = "tests/reward_models/test_preference_dataset.py::"

POOLING = FORWARD + "test_pooling_reads_the_real_tokens_on_either_padding_side"
PADDING = FORWARD + "test_neither_side_nor_amount_of_padding_changes_a_reward"
PLACES = FORWARD + "test_the_states_stand_where_the_tokens_were_given"
TEMPERATURE = FORWARD + "test_the_temperature_divides_every_reward_and_the_logits_of_pairs"
MARGIN = FORWARD + "test_the_preference_loss_is_minus_log_sigmoid_of_the_difference_less_the_margin"
PAIR = FORWARD + "test_a_pair_is_scored_by_both_heads_at_the_temperature"
ORDER = FORWARD + "test_a_pair_in_the_other_order_has_the_opposite_score"
LABELS = FORWARD + "test_the_bradley_terry_loss_turns_with_the_label"
COMBINED = FORWARD + "test_objectives_are_combined_by_the_weights_as_given"
COMPARED = FORWARD + "test_pairs_of_several_objectives_are_compared_by_the_combined_reward"
SQUARES = FORWARD + "test_the_multi_objective_loss_is_the_mean_square_over_what_the_mask_keeps"
MODES = FORWARD + "test_predicting_gives_a_list_per_text_in_order_and_restores_the_training_mode"
SCORES = FORWARD + "test_the_reward_function_scores_prompt_and_response_together"
LARGE_BATCH = TRAINER + "test_accumulated_batches_give_the_update_of_one_large_batch"
UPDATES = TRAINER + "test_accumulation_counts_updates_and_an_epoch_ends_with_one"
ENTRIES = TRAINER + "test_accumulated_targets_are_weighed_by_the_entries_that_their_masks_keep"
WARM_UP = TRAINER + "test_the_learning_rate_rises_over_the_warm_up_and_then_stays"
ADAMW = TRAINER + "test_updates_are_those_of_adamw_on_the_mean_loss_with_clipping"
SEED = TRAINER + "test_each_epoch_and_seed_has_its_own_dropout"
DROPOUT = TRAINER + "test_dropout_acts_in_training_and_not_in_evaluation"
LORA = TRAINER + "test_with_lora_only_adapters_and_heads_train_on_every_linear_layer"
EVALUATE = TRAINER + "test_training_leaves_the_training_mode_and_evaluating_restores_it"
ITEM = DATASET + "test_an_item_holds_prompt_and_response_with_its_end_and_no_pad_in_either"
CUT = DATASET + "test_a_long_prompt_keeps_its_end_and_a_response_that_does_not_fit_has_no_end"
ENDED = DATASET + "test_an_end_token_that_is_there_is_not_doubled_and_an_empty_response_is_its_end"

MUTATIONS = {
    "rl_cluster.reward_models.pooling": [
        ("mask.sum(dim=1) - 1]", "mask.sum(dim=1) - 2]", POOLING),
        ("hidden[rows, mask.sum(dim=1) - 1]", "hidden[rows, -1]", POOLING),
        ("kept.sum(dim=1) / mask.sum(dim=1, keepdim=True)", "wide.mean(dim=1)", POOLING),
        ("return hidden[:, 0]", "return hidden[:, -1]", POOLING),
        (
            "if bool((mask[:, 1:] <= mask[:, :-1]).all()):",
            "if True:",
            PADDING,
        ),
        ("self.order.argsort(dim=1)", "self.order", PLACES),
    ],
    "rl_cluster.reward_models.reward_model": [
        ("/ self.config.temperature", "* self.config.temperature", TEMPERATURE),
        ("return first - self(second", "return first + self(second", MARGIN),
        ("torch.zeros_like(logits), margin)", "torch.zeros_like(logits), 0.0)", MARGIN),
        ("nn.Dropout(config.dropout_prob)", "nn.Dropout(0.0)", DROPOUT),
        ("module.training = training", "module.training = True", MODES),
        ("prompt + response for", "response for", SCORES),
        ("min(max_length, positions)", "positions", MODES),
    ],
    "rl_cluster.reward_models.pairwise": [
        ("self._comparison(a, b) / self.config.temperature", "self._comparison(a, b)", PAIR),
        ("- self.comparison_head(torch.cat([b, a], dim=1))", "", ORDER),
        ("self.rewards_of(a) - self.rewards_of(b) +", "", PAIR),
        ("torch.where(given == 1, logits, -logits)", "torch.where(given == 1, -logits, logits)", LABELS),
    ],
    "rl_cluster.reward_models.multi_objective": [
        ("(rewards * weights).sum(", "rewards.sum(", COMBINED),
        ("self.combined(first) - self.combined(second)", "first - second", COMPARED),
        ("return sums.sum() / counts.sum(), per", "return sums.sum() / rewards.numel(), per", SQUARES),
        ("sums / counts.clamp(min=1)", "sums / len(rewards)", SQUARES),
        ("[1.0 / num_objectives] * num_objectives", "[1.0] * num_objectives", COMBINED),
    ],
    "rl_cluster.reward_models.trainer": [
        ("(loss * (weight / total)).backward()", "loss.backward()", LARGE_BATCH),
        ("(done + 1) / max(1, steps)", "1.0", WARM_UP),
        ("self.config.max_grad_norm or float", "float", ADAMW),
        (
            "range(0, len(batches), per_update)",
            "range(0, len(batches) - per_update + 1, per_update)",
            UPDATES,
        ),
        ("self.optimizer.zero_grad(set_to_none=True)\n", "pass\n", ADAMW),
        ("with seeded(self.config.seed + self.num_epochs_done):", "with seeded(0):", SEED),
    ],
    "rl_cluster.reward_models.training_data": [
        ("return float(self._mask[list(rows)].sum())", "return float(len(rows))", ENTRIES),
        ("(known > 0).double() + 0.5", "(known < 0).double() + 0.5", EVALUATE),
    ],
    "rl_cluster.reward_models.base": [
        ("r=config.lora_rank", "r=8", LORA),
        ("and UNUSED not in name.split", "and name not in name.split", LORA),
    ],
    "rl_cluster.trainers.preference_dataset": [
        ("[-self.max_prompt_length :]", "[: self.max_prompt_length]", CUT),
        ("return ids if ends else [*ids, self._special.eos]", "return ids", ITEM),
        ("ends = bool(ids) and ids[-1] == self._special.eos", "ends = False", ENDED),
        ("[1] * len(ids) + [0] * padding", "[1] * width", ITEM),
        ('item["prompt_length"] = len(row.prompt)', 'item["prompt_length"] = self._prompt_width', ITEM),
    ],
}
