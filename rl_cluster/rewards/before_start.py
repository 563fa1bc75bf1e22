"""The functions that a recipe names as scorers in; BadInputError for one that the run could not use, out."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from rl_cluster.config.reward import FunctionScorer, ScorerConfig, scorer_name
from rl_cluster.rewards.function_process import FunctionProcess
from rl_cluster.trajectory import Prompt


def check_functions(configs: Sequence[ScorerConfig], prompts: Sequence[Prompt]) -> None:
    """Import, bind and call each once, with the first prompt and an empty response, in a process of its own.

    There, because importing a file may end its process, too. What the call raises otherwise is a warning.
    """
    for config in configs:
        if isinstance(config, FunctionScorer):
            process = FunctionProcess(scorer_name(config), config, prompts[0] if prompts else None)
            process.close()
            if process.started.warned:
                warnings.warn(process.started.warned, stacklevel=2)
