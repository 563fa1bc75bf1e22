"""Environments that a policy plays in: free text, several objectives, preferences, mathematics, code."""

from rl_cluster.environments.playing.batch_rewards import create_env_aware_reward_fn, environment_scorer
from rl_cluster.environments.playing.case_environment import (
    Case,
    CaseEnvironment,
    CaseSettings,
    case_reward_function,
    check_case_environment,
    environment_tools,
    load_case_environment,
    read_cases,
)
from rl_cluster.environments.playing.episode import Observation, RLEnvironment, StepResult, Trajectory
from rl_cluster.environments.playing.for_runs import CaseRun, case_run, environment_factory, prompts_of
from rl_cluster.environments.playing.from_config import create_rl_environment
from rl_cluster.environments.playing.play import model_player, play_episode
from rl_cluster.environments.ready.code_env import create_code_generation_env
from rl_cluster.environments.ready.code_problems import CodeProblem, CodeTest
from rl_cluster.environments.ready.code_runner import CodeLimits
from rl_cluster.environments.ready.math_env import create_math_problem_env
from rl_cluster.environments.ready.math_problems import MathProblem, make_math_problems
from rl_cluster.environments.ready.multi_objective import MultiObjectiveRewardEnv
from rl_cluster.environments.ready.preference import PreferenceComparisonEnv
from rl_cluster.environments.ready.text_generation import TextGenerationEnv

__all__ = [
    "Observation",
    "StepResult",
    "Trajectory",
    "RLEnvironment",
    "TextGenerationEnv",
    "MultiObjectiveRewardEnv",
    "PreferenceComparisonEnv",
    "create_math_problem_env",
    "make_math_problems",
    "MathProblem",
    "create_code_generation_env",
    "CodeProblem",
    "CodeTest",
    "CodeLimits",
    "create_rl_environment",
    "create_env_aware_reward_fn",
    "environment_scorer",
    "play_episode",
    "model_player",
    "CaseEnvironment",
    "CaseSettings",
    "Case",
    "check_case_environment",
    "load_case_environment",
    "read_cases",
    "environment_tools",
    "case_reward_function",
    "CaseRun",
    "case_run",
    "environment_factory",
    "prompts_of",
]
