"""transformers callbacks of a front on fixed data in, Hooks of its fit out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from transformers.training_args import TrainingArguments

from rl_cluster.config.fit import FitConfig
from rl_cluster.trainers.callbacks import CallbackHooks


def callback_hooks(
    callbacks: Sequence[Any], config: FitConfig, num_rows: int, model: Any, tokenizer: Any
) -> CallbackHooks:
    """Every step is logged; the best metric is the held-out loss, the lower the better."""
    arguments = TrainingArguments(
        output_dir=config.run.dir,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=config.eval.every or None,
        save_steps=config.checkpoint.every or 1,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        report_to=[],
        use_cpu=config.cluster.device == "cpu",
    )
    return CallbackHooks(
        arguments,
        callbacks,
        steps_per_epoch=math.ceil(num_rows / config.batch.rows_per_step),
        model=model,
        processing_class=tokenizer,
    )
