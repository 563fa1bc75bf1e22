"""A chat model as judge: the question, the verdict in the answer, and an endpoint that misbehaves."""

import json

import httpx
import pytest

from rl_cluster.errors import BadInputError, ScorerError
from rl_cluster.judge import Endpoint, chat_judge, endpoint_chat, judged_win_rate, read_verdict


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("A is clearer.\nVerdict: A", 1.0),
        ("Verdict: B\n", 0.0),
        ("**Verdict: tie**", 0.5),
        ("verdict: **b**", 0.0),
        ("Verdict: A\nOn reflection:\nVerdict: B", 0.0),
        ("Response A is better", None),
        ("The verdict: A", None),
        ("Verdict: Absolutely", None),
        ("", None),
    ],
)
def test_the_verdict_is_read_from_its_line(answer, verdict):
    assert read_verdict(answer) == verdict


def test_the_question_shows_the_texts_as_they_are():
    asked = []

    def chat(message):
        asked.append(message)
        return "Verdict: A"

    template = "{prompt}|{first}|{second}|{other}"
    judge = chat_judge(chat, template=template, num_threads=1)
    assert judge(["use {second}"], ["{prompt} {}"], [r"\1 {first}"]) == [1.0]
    assert asked == [r"use {second}|{prompt} {}|\1 {first}|{other}"]
    chat_judge(chat)(["the request"], ["the first"], ["the second"])
    assert asked[1].index("the request") < asked[1].index("the first") < asked[1].index("the second")


def test_the_verdicts_keep_the_order_of_the_pairs_over_many_threads():
    judge = chat_judge(
        lambda message: f"Verdict: {message.split('|')[1]}", template="{prompt}|{first}|{second}"
    )
    answers = ["A", "B", "tie", "?"] * 10
    assert judge(["p"] * 40, answers, ["x"] * 40) == [1.0, 0.0, 0.5, None] * 10


def test_a_template_without_a_place_for_a_text_is_named():
    with pytest.raises(BadInputError, match=r"\{second\}"):
        chat_judge(str, template="{prompt} {first}")
    with pytest.raises(BadInputError, match="num_threads"):
        chat_judge(str, num_threads=0)


def endpoint(**settings):
    return Endpoint(
        "http://judge.test/v1/", "judge-model", **({"api_key_variable": "", "pause_seconds": 0.0} | settings)
    )


def completion(text):
    return httpx.Response(200, json={"choices": [{"message": {"role": "assistant", "content": text}}]})


def client_of(*answers):
    """A client whose server gives these answers in turn, and the requests that it got."""
    requests, left = [], list(answers)

    def handle(request):
        requests.append(request)
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return httpx.Client(transport=httpx.MockTransport(handle)), requests


def test_an_endpoint_is_asked_as_openai_wants_it(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    client, requests = client_of(completion("Verdict: B"))
    chat = endpoint_chat(endpoint(api_key_variable="JUDGE_KEY", temperature=0.25, max_tokens=9), client)
    assert chat("Who wins?") == "Verdict: B"
    assert str(requests[0].url) == "http://judge.test/v1/chat/completions"
    assert requests[0].headers["authorization"] == "Bearer s3cret"
    assert json.loads(requests[0].content) == {
        "model": "judge-model",
        "messages": [{"role": "user", "content": "Who wins?"}],
        "temperature": 0.25,
        "max_tokens": 9,
    }
    client, requests = client_of(completion(None))
    assert endpoint_chat(endpoint(), client)("?") == ""
    assert "authorization" not in requests[0].headers


def test_passing_troubles_are_tried_again():
    client, requests = client_of(
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        httpx.Response(429),
        httpx.Response(503),
        completion("Verdict: A"),
    )
    assert endpoint_chat(endpoint(), client)("?") == "Verdict: A"
    assert len(requests) == 5


def test_pauses_double_between_attempts(monkeypatch):
    pauses = []
    monkeypatch.setattr("rl_cluster.judge.chat.time.sleep", pauses.append)
    client, _ = client_of(*[httpx.Response(500)] * 4)
    with pytest.raises(ScorerError, match="did not answer after 4 attempts: status 500"):
        endpoint_chat(endpoint(num_retries=3, pause_seconds=0.5), client)("?")
    assert pauses == [0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(401, text="bad key"), "refused with status 401: bad key"),
        (httpx.Response(404, text="no model"), "refused with status 404"),
        (httpx.Response(200, text="<html>"), "answered no chat completion: <html>"),
        (httpx.Response(200, json={"choices": []}), "answered no chat completion"),
        (httpx.Response(200, json=[1]), "answered no chat completion"),
    ],
)
def test_lasting_troubles_are_named_at_once(answer, message):
    client, requests = client_of(answer)
    with pytest.raises(ScorerError, match=message):
        endpoint_chat(endpoint(), client)("?")
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_url": "judge.test/v1"}, "base_url"),
        ({"model": ""}, "model"),
        ({"seconds": 0.0}, "seconds"),
        ({"num_retries": -1}, "num_retries"),
        ({"temperature": -1.0}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"pause_seconds": -1.0}, "pause_seconds"),
    ],
)
def test_an_endpoint_that_cannot_work_is_named(settings, message):
    with pytest.raises(BadInputError, match=f"Endpoint.{message}"):
        Endpoint(**({"base_url": "http://x", "model": "m"} | settings))


def test_a_missing_key_is_named_before_anything_is_asked(monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(BadInputError, match="JUDGE_KEY"):
        endpoint_chat(endpoint(api_key_variable="JUDGE_KEY"))


def test_a_win_rate_by_an_endpoint_from_end_to_end():
    def handle(request):
        message = json.loads(request.content)["messages"][0]["content"]
        first = message.split("Response A:\n")[1].split("\n")[0]
        second = message.split("Response B:\n")[1].split("\n")[0]
        return completion(f"Verdict: {'A' if len(first) > len(second) else 'B'}")

    client = httpx.Client(transport=httpx.MockTransport(handle))
    judge = chat_judge(endpoint_chat(endpoint(), client))
    rate = judged_win_rate(judge, ["p", "q", "r"], ["long one", "x", "longer"], ["x", "long one", "y"])
    assert (rate.wins, rate.losses, rate.agreement) == (2, 1, 1.0)
