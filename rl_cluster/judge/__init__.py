"""Win rates by a judge: a model, an endpoint, a reward model or a function; position swap and intervals."""

from rl_cluster.judge.chat import Endpoint, chat_judge, endpoint_chat, read_verdict
from rl_cluster.judge.scores import score_judge
from rl_cluster.judge.verdicts import Judge, PairVerdict, judge_pairs
from rl_cluster.judge.win_rate import (
    Interval,
    WinRate,
    bootstrap_mean,
    count_verdicts,
    judged_win_rate,
    paired_rise,
)

__all__ = [
    "Judge",
    "PairVerdict",
    "judge_pairs",
    "judged_win_rate",
    "count_verdicts",
    "paired_rise",
    "WinRate",
    "Interval",
    "bootstrap_mean",
    "score_judge",
    "chat_judge",
    "endpoint_chat",
    "Endpoint",
    "read_verdict",
]
