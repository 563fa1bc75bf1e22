"""Ways to get episodes in environments wrong, and the test that must notice (run by bench/mutation.py)."""

EPISODES = "tests/actors/test_episode_environment.py::"
TURNS = EPISODES + "test_an_environments_answer_is_observed_and_the_next_turn_goes_on_from_it"
TOKENS = EPISODES + "test_token_by_token_gives_the_same_episode_as_whole_responses"
TAKEN = EPISODES + "test_tokens_after_the_end_of_an_episode_are_not_part_of_it"
LIMITS = EPISODES + "test_limits_end_an_episode_and_the_environment_pays_what_is_due"
SILENT = EPISODES + "test_an_episode_ends_when_policy_and_environment_have_nothing_more_to_say"
STOPS = EPISODES + "test_stop_strings_are_found_across_the_tokens_of_a_token_level_episode"
OTHERS = EPISODES + "test_what_an_environment_says_is_not_taken_for_a_stop_string"
PREFIX = EPISODES + "test_a_broken_prefix_names_the_turn_and_the_place"
ALIKE = EPISODES + "test_samples_of_a_group_start_alike_and_draw_with_their_own_seeds"
GREETING = EPISODES + "test_what_the_first_observation_adds_to_the_prompt_is_observed"

MUTATIONS = {
    "actors.environment_episode": [
        ("self.reward += facts.reward", "self.reward = facts.reward", TURNS),
        ("self.components |= facts.metrics", "self.components = dict(facts.metrics)", TURNS),
        ("turn_seed(seed, step)", "turn_seed(seed, 0)", TURNS),
        ("largest = 1 if", "largest = 2 if", TOKENS),
        ("min(largest, room)", "largest", LIMITS),
        ("transcript.act(drawn, facts.taken)", "transcript.act(drawn)", TAKEN),
        ("turn == limits.max_turns", "turn > limits.max_turns", LIMITS),
        (">= room - len(drawn.tokens)", "> room - len(drawn.tokens)", LIMITS),
        ("len(added) >= room - len(drawn.tokens)", "len(added) >= room", LIMITS),
        ("if not added and (drawn", "if (drawn", TURNS),
        ('finish = "stop"\n', 'finish = "length"\n', SILENT),
        ("response_begins = turn + 1, len(transcript.tokens)", "response_begins = turn + 1, 0", OTHERS),
        ("_has_stop(decoder, response, sampling.stop)", "False", STOPS),
        ("return list(shown[len(tokens) :])", "return list(shown[len(tokens) + 1 :])", GREETING),
        ("if list(shown[: len(tokens)]) == list(tokens):", "if True:", PREFIX),
    ],
    "actors.transcript": [
        ("self.actions.extend([False] * len(tokens))", "self.actions.extend([True] * len(tokens))", TURNS),
        ("self.versions.extend([-1] * len(tokens))", "self.versions.extend([0] * len(tokens))", TURNS),
        ("self.tokens[prompt_length:]", "self.tokens", TURNS),
    ],
    "actors.episode": [
        ("turn_seed(task.seeds[0], START)", "turn_seed(seed, START)", ALIKE),
        ("min(longest, max_sequence_tokens or longest)", "longest", LIMITS),
    ],
}
