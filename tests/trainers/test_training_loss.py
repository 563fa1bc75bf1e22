"""What TrainOutput says of a run's loss."""

from rl_cluster.trainers.online_trainer import train_output


def test_the_training_loss_is_the_whole_loss_and_not_the_policys_term() -> None:
    rows = [
        {"loss/policy_avg": 1.0, "loss/total_avg": 1.5, "loss/kl_avg": 5.0},
        {"loss/policy_avg": None, "loss/total_avg": None},
        {"loss/policy_avg": 2.0, "loss/total_avg": 2.25, "loss/kl_avg": None},
    ]
    output = train_output(rows, 3, {"eval_reward": 0.5, "eval_accuracy": None})
    assert output.training_loss == (1.5 + 2.25) / 2
    assert output.global_step == 3
    assert output.metrics == {"loss/policy_avg": 2.0, "loss/total_avg": 2.25, "eval_reward": 0.5}
    assert train_output([], 0, {}).training_loss == 0.0
