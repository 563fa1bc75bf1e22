"""Bad input is refused at once, by an error that names the argument, the value and the remedy."""

import pytest
import torch

from rl_cluster.errors import BadInputError
from rl_cluster.forward_backward import AsyncTrainingClient, ForwardBackwardPipeline

IDS = [[3, 4, 5], [6, 7, 8]]
OLD = [[0.0, -1.0, -1.0], [0.0, -1.0, -1.0]]
POLICY = {"old_logprobs": OLD, "advantages": OLD}


def policy(**changes):
    return {key: value for key, value in (POLICY | changes).items() if value is not None}


FORWARD_BACKWARD = [
    ({"input_ids": [[1, 2], [3]]}, "input_ids: list cannot become a tensor.*rows of equal length"),
    ({"input_ids": [1, 2]}, r"input_ids: shape \(2,\).*\[batch, length\]"),
    ({"input_ids": torch.zeros(0, 3, dtype=torch.long)}, "input_ids: shape"),
    ({"input_ids": "text"}, "input_ids: str cannot become a tensor"),
    ({"input_ids": [[1.0, 2.0]]}, "input_ids: dtype torch.float32.*integers"),
    ({"input_ids": [[1, 23]]}, "input_ids: 23 is no token id.*0 to 22"),
    ({"input_ids": [[1, -1]]}, "input_ids: -1 is no token id"),
    ({"input_ids": [[1]]}, "input_ids: .*no token to predict.*at least two tokens"),
    ({"input_ids": [[1] * 65]}, "input_ids: 65 tokens in a row.*64 positions"),
    ({"attention_mask": [[1, 1], [1, 1]]}, r"attention_mask: shape \(2, 2\) does not fit input_ids \(2, 3\)"),
    ({"attention_mask": [[1, 1, 2], [1, 1, 1]]}, "attention_mask: it holds 2"),
    ({"attention_mask": [[1, 1, 1], [0, 0, 0]]}, "attention_mask: row 1 has no token"),
    ({"labels": [[1, 2, 3]]}, "labels: shape"),
    ({"labels": [[-100] * 3] * 2}, "labels: all ignored"),
    ({"labels": [[3, -100, -100]] * 2}, "labels: all ignored.*not to be shifted"),
    ({"labels": [[1, 2, 99]] * 2}, "labels: 99 is no token id.*-100 to ignore"),
    ({"labels": [[1, 2, -1]] * 2}, "labels: -1 is no token id"),
    ({"labels": [[1.0, 2.0, 3.0]] * 2}, "labels: dtype"),
    ({"loss_fn": "cross_entrop"}, "loss_fn: 'cross_entrop' is unknown .did you mean 'cross_entropy'"),
    ({"loss_fn": None}, "loss_fn: None is neither a name nor callable"),
    ({"loss_fn_kwargs": {"weights": 1}}, "loss_fn_kwargs: cross_entropy takes no 'weights'"),
    ({"loss_fn_kwargs": [1]}, "loss_fn_kwargs: list"),
]
PPO = [
    (policy(old_logprobs=None), "old_logprobs: missing"),
    (policy(old_log_probs=OLD), "old_logprobs: given twice"),
    (policy(advantages=None), "advantages: missing"),
    (policy(advantages=[1.0, 2.0, 3.0]), r"advantages: shape \(3,\) does not fit"),
    (policy(old_logprobs=torch.zeros(2, 3, 23)), "old_logprobs: .*whole vocabulary"),
    (policy(advantages=[float("nan"), 1.0]), r"advantages: nan at \[0, 1\]"),
    (policy(old_logprobs=[[0.0, float("nan"), 0.0], [0.0] * 3]), r"old_logprobs: nan at \[0, 1\]"),
    (policy(clip_param=0), "clip_param: 0 must be above 0; the default is 0.2"),
    (policy(clip_param="0.2"), "clip_param: '0.2' is not a finite number"),
    (policy(entropy_coef=-0.1), "entropy_coef: -0.1 must be at least 0"),
    (policy(value_clip=-1.0, returns=OLD, old_values=OLD, values=OLD), "value_clip: -1.0 must be above 0"),
    (policy(value_clip=0.2, returns=OLD, values=OLD), "old_values: missing"),
    (policy(values=OLD), "returns: missing, while values are given"),
    (policy(returns=OLD, values=torch.zeros(2, 3, requires_grad=True)), "values: the tensor requires grad"),
    (policy(mask=[[1, 1]]), "mask: shape"),
    (policy(mask=[[1, 0, 0]] * 2), "mask: it hides every token"),
    (policy(temperature=0.0), "temperature: 0.0 must be above 0"),
    (policy(clip_ratio=0.2), "ppo takes no 'clip_ratio'.*did you mean 'clip_param'"),
]
SAMPLE = [
    ({"prompt": []}, "prompt: shape"),
    ({"prompt": "hello"}, "prompt: 'hello' is text"),
    ({"prompt": [[1, 2], [3, 4]]}, "prompt: .*one prompt"),
    ({"prompt": [1, 400]}, "prompt: 400 is no token id"),
    ({"max_tokens": 0}, "max_tokens: 0 must be a whole number of at least 1"),
    ({"prompt": [2] * 64}, "prompt: 64 tokens leave no room in the model's 64 positions"),
    ({"temperature": -1}, "temperature: -1"),
    ({"temperature": float("nan")}, "temperature: nan"),
    ({"top_k": -2}, "top_k: -2"),
    ({"top_k": 1.5}, "top_k: 1.5"),
    ({"top_p": 0.0}, "top_p: 0.0"),
    ({"top_p": 1.2}, "top_p: 1.2"),
    ({"stop": ["end"]}, "stop: 'end' is a string and the pipeline has no tokenizer"),
    ({"stop": [""]}, "stop: "),
    ({"stop": 1.5}, "stop: 1.5"),
    ({"seed": "one"}, "seed: 'one'"),
]


@pytest.fixture
def pipeline(qwen, pipelines):
    return pipelines(qwen)


def untouched(pipeline):
    assert all(p.grad is None for p in pipeline.model.parameters())


@pytest.mark.parametrize(("changes", "message"), FORWARD_BACKWARD)
def test_forward_backward_refuses(pipeline, changes, message):
    with pytest.raises(BadInputError, match=message):
        pipeline.forward_backward(**({"input_ids": IDS} | changes))
    untouched(pipeline)


@pytest.mark.parametrize(("arguments", "message"), PPO)
def test_ppo_refuses(pipeline, arguments, message):
    with pytest.raises(ValueError, match=message):
        pipeline.forward_backward(IDS, loss_fn="ppo", loss_fn_kwargs=arguments)
    untouched(pipeline)


@pytest.mark.parametrize(("changes", "message"), SAMPLE)
def test_sample_refuses_and_draws_nothing(pipeline, changes, message):
    before = torch.get_rng_state()
    with pytest.raises(BadInputError, match=message):
        pipeline.sample(**({"prompt": [3, 4]} | changes))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "gpt2"}, "model: 'gpt2' is a name.*from_pretrained"),
        ({"model": None}, "model: None"),
        ({"model": 3}, "model: int is no learner"),
        ({"device": "cuda:99"}, "device: 'cuda:99' cannot be used here"),
        ({"device": "nonsense"}, "device: 'nonsense'"),
        ({"max_workers": 0}, "max_workers: 0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: 0"),
        ({"gradient_accumulation_steps": 2.5}, "gradient_accumulation_steps: 2.5"),
    ],
)
def test_the_constructor_refuses(qwen, arguments, message):
    with pytest.raises(BadInputError, match=message):
        ForwardBackwardPipeline(**({"model": qwen} | arguments))


def test_optim_step_refuses_what_cannot_step_this_model(pipeline, make_qwen):
    own = torch.optim.SGD(pipeline.model.parameters(), lr=0.1)
    other = torch.optim.SGD(make_qwen().parameters(), lr=0.1)
    cases = [
        ((None,), "optimizer: NoneType"),
        ((other,), "optimizer: it holds none of the model's parameters"),
        ((own, 3), r"scheduler: int has no step\(\)"),
        ((own, torch.optim.lr_scheduler.ConstantLR(other)), "scheduler: it belongs to another optimizer"),
        ((own, None, -1.0), "max_grad_norm: -1.0"),
        ((own, None, float("nan")), "max_grad_norm: nan"),
        ((own, None, "1"), "max_grad_norm: '1'"),
    ]
    for arguments, message in cases:
        with pytest.raises(BadInputError, match=message):
            pipeline.optim_step(*arguments)


@pytest.mark.parametrize("name", ["", "  ", ".", "../out", 7, None])
def test_save_state_refuses_names_that_are_none(pipeline, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInputError, match="name: "):
        pipeline.save_state(name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, i, o: o.logits, r"scalar tensor, not Tensor of shape \(2, 3, 23\)"),
        (lambda m, i, o: 1.0, "scalar tensor, not float"),
        (lambda m, i, o: None, "scalar tensor, not NoneType"),
        (lambda m, i, o: torch.tensor(1.0), "has no gradient"),
    ],
)
def test_a_custom_loss_must_return_a_scalar_with_gradient(pipeline, function, message):
    with pytest.raises(ValueError, match=message):
        pipeline.forward_backward_custom(torch.tensor(IDS), function).result()
    untouched(pipeline)


def test_a_custom_loss_must_be_callable(pipeline):
    with pytest.raises(BadInputError, match=r"custom_loss_fn: 'ppo' is not callable"):
        pipeline.forward_backward_custom(torch.tensor(IDS), "ppo")


def test_left_padding_is_refused_for_a_model_that_would_read_it_as_text(models, pipelines):
    with pytest.raises(BadInputError, match=r"attention_mask: .*pad on the right"):
        pipelines(models.Table()).forward_backward([[0, 1, 2]], [[0, 1, 1]])


def test_a_label_beyond_the_logits_of_a_plain_module_is_named(models, pipelines):
    with pytest.raises(BadInputError, match="labels: 7 is no token id of this model; its logits end at 4"):
        pipelines(models.Table()).forward_backward([[1, 2]], labels=[[1, 7]]).result()


def test_a_model_without_logits_is_named(pipelines):
    model = torch.nn.Embedding(5, 3)
    model.forward = lambda input_ids: {"scores": input_ids}
    with pytest.raises(BadInputError, match=r"model: it returned dict.*no logits"):
        pipelines(model).forward_backward([[1, 2]]).result()


def test_returns_without_values_need_a_model_with_a_value_head(pipeline):
    future = pipeline.forward_backward(IDS, loss_fn="ppo", loss_fn_kwargs=policy(returns=OLD))
    with pytest.raises(BadInputError, match="values: missing, and the model returns none"):
        future.result()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (IDS, "batch: list"),
        ({"labels": IDS}, "batch: it has labels, but no input_ids"),
        ({"input_ids": IDS, "token_types": IDS}, "batch: 'token_types' is not used"),
    ],
)
def test_the_client_refuses_batches(qwen, batch, message):
    with AsyncTrainingClient(qwen) as client:
        for call in (client.forward_backward, client.forward):
            with pytest.raises(BadInputError, match=message):
                call(batch)


def test_the_client_refuses_a_reference_that_is_no_module(qwen):
    with pytest.raises(BadInputError, match="reference_model: str"):
        AsyncTrainingClient(qwen, reference_model="gpt2")
