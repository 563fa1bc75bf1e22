"""The tables that the fronts and the command line read in; docs/fields.md out."""

from __future__ import annotations

from rl_cluster.cli import llm_fit, llm_flags, llm_run
from rl_cluster.trainers.arguments import ARGUMENTS
from rl_cluster.trainers.fields import rows_of
from rl_cluster.trainers.fixed_data.settings import FIT as FIT_FIELDS
from rl_cluster.trainers.grpo.run_config import GRPO as GRPO_FIELDS
from rl_cluster.trainers.ppo.run_config import PPO as PPO_FIELDS
from rl_cluster.trainers.rloo.run_config import RLOO as RLOO_FIELDS


def fields_page() -> str:
    """docs/fields.md."""
    runs, fits = (
        {llm_flags.flag_name(name): rule for name, rule in table.items()}
        for table in (llm_run.RUN, llm_fit.FIT)
    )
    tables = {
        "RLOOConfig and GRPOConfig, from TrainingArguments": ARGUMENTS,
        "RLOOConfig": RLOO_FIELDS,
        "GRPOConfig": GRPO_FIELDS,
        "PPOConfig": PPO_FIELDS,
        "DPOConfig, ORPOConfig, KTOConfig, SFTConfig, RewardConfig": FIT_FIELDS,
        "rl-cluster llm, ppo, rloo and grpo": runs,
        "rl-cluster llm, sft, reward, dpo, orpo and kto": fits,
    }
    parts = [
        "# What each field sets\n",
        "The setting of a run (as in a recipe) that each field of a front becomes. Printed from the tables "
        "that the fronts read; docs/without_effect.md has the names that cannot matter.\n",
    ]
    for front, table in tables.items():
        rows = "".join(f"| `{name}` | {sets} |\n" for name, sets in rows_of(table))
        parts.append(f"## {front}\n\n| field | sets |\n|---|---|\n{rows}")
    return "\n".join(parts)
