"""A language model behind a chat function or an OpenAI-compatible endpoint in, a judge of pairs out."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rl_cluster.checks import check_number
from rl_cluster.errors import BadInputError, ScorerError
from rl_cluster.judge.verdicts import Judge

Chat = Callable[[str], str]
"""f(message of the user) -> answer of the model."""

TEMPLATE = """\
Which of two responses to the same request is better? Judge what they say, not their length or their order.

Request:
{prompt}

Response A:
{first}

Response B:
{second}

Compare them in one sentence. Then write, on a line of its own, exactly one of
Verdict: A
Verdict: B
Verdict: tie
"""

_VERDICT = re.compile(r"^\W*verdict\W*\b(a|b|tie)\b", re.IGNORECASE | re.MULTILINE)
VALUES = {"a": 1.0, "b": 0.0, "tie": 0.5}


def chat_judge(chat: Chat, *, template: str = TEMPLATE, num_threads: int = 8) -> Judge:
    """Asks `chat` once per pair; an answer without a readable verdict is None.

    template: a text with {prompt}, {first} and {second}, whose answer ends in a line "Verdict: A", "B" or
    "tie". num_threads: how many questions are under way at once.
    """
    missing = [name for name in ("{prompt}", "{first}", "{second}") if name not in template]
    if missing:
        raise BadInputError(f"chat_judge.template: has no {missing[0]}.")
    check_number("chat_judge.num_threads", num_threads, at_least=1)

    def judge(prompts: Sequence[str], first: Sequence[str], second: Sequence[str]) -> list[float | None]:
        messages = [fill(template, *texts) for texts in zip(prompts, first, second, strict=True)]
        with ThreadPoolExecutor(num_threads) as pool:
            return [read_verdict(answer) for answer in pool.map(chat, messages)]

    return judge


def fill(template: str, prompt: str, first: str, second: str) -> str:
    """The template with the texts in their places; braces in the texts stay what they are."""
    texts = {"{prompt}": prompt, "{first}": first, "{second}": second}
    return re.sub(r"\{prompt\}|\{first\}|\{second\}", lambda match: texts[match.group()], template)


def read_verdict(answer: str) -> float | None:
    """1, 0 or 0.5 from the last "Verdict: …" line of an answer; None where there is none."""
    found = _VERDICT.findall(answer)
    return VALUES[found[-1].lower()] if found else None


@dataclass(frozen=True)
class Endpoint:
    """Where a chat model answers, in the form of OpenAI's chat completions.

    base_url: for example "http://127.0.0.1:8000/v1". api_key_variable: the environment variable with the
    key, "" for none; the key is sent and never logged. seconds: deadline of one request.
    num_retries: after a lost connection, time-out, status 429 or 5xx, pausing pause_seconds, doubling.
    """

    base_url: str
    model: str
    api_key_variable: str = "OPENAI_API_KEY"
    temperature: float = 0.0
    max_tokens: int = 256
    seconds: float = 60.0
    num_retries: int = 4
    pause_seconds: float = 1.0

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise BadInputError(f"Endpoint.base_url={self.base_url!r}: must begin with http:// or https://.")
        if not self.model:
            raise BadInputError("Endpoint.model='': name the model that is to judge.")
        check_number("Endpoint.temperature", self.temperature, at_least=0.0)
        check_number("Endpoint.max_tokens", self.max_tokens, at_least=1)
        check_number("Endpoint.seconds", self.seconds, above=0.0)
        check_number("Endpoint.num_retries", self.num_retries, at_least=0)
        check_number("Endpoint.pause_seconds", self.pause_seconds, at_least=0.0)


def endpoint_chat(endpoint: Endpoint, client: Any = None) -> Chat:
    """A Chat that asks the endpoint. client: an httpx.Client of your own (a proxy, a test's transport).

    The Chat raises ScorerError when the endpoint refuses (4xx), answers something else than a completion, or
    still fails after the retries. BadInputError now if the key's variable is named and not set.
    """
    import httpx
    import tenacity

    headers = _authorization(endpoint.api_key_variable)
    http = httpx.Client() if client is None else client

    def chat(message: str) -> str:
        body = {
            "model": endpoint.model,
            "messages": [{"role": "user", "content": message}],
            "temperature": endpoint.temperature,
            "max_tokens": endpoint.max_tokens,
        }
        url = endpoint.base_url.rstrip("/") + "/chat/completions"
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((httpx.TransportError, _BusyError)),
            stop=tenacity.stop_after_attempt(endpoint.num_retries + 1),
            wait=tenacity.wait_exponential(multiplier=endpoint.pause_seconds),
            sleep=time.sleep,
            reraise=True,
        )
        try:
            response = retrying(_ask, http, url, body, headers, endpoint.seconds)
        except (httpx.TransportError, _BusyError) as error:
            tried = f"{endpoint.num_retries + 1} attempts"
            problem = str(error) if isinstance(error, _BusyError) else f"{type(error).__name__}: {error}"
            raise ScorerError(
                "judge", f"{endpoint.base_url} did not answer after {tried}: {problem}"
            ) from error
        return _read_completion(endpoint, response)

    return chat


class _BusyError(Exception):
    """Status 429 or 5xx: worth another attempt."""


def _ask(http: Any, url: str, body: dict[str, Any], headers: dict[str, str], seconds: float) -> Any:
    response = http.post(url, json=body, headers=headers, timeout=seconds)
    if response.status_code == 429 or response.status_code >= 500:
        raise _BusyError(f"status {response.status_code}")
    return response


def _authorization(variable: str) -> dict[str, str]:
    if not variable:
        return {}
    key = os.environ.get(variable)
    if not key:
        raise BadInputError(
            f"Endpoint.api_key_variable={variable!r}: this variable is not set. Set it to the key, "
            'or give api_key_variable="" for an endpoint without one.'
        )
    return {"Authorization": f"Bearer {key}"}


def _read_completion(endpoint: Endpoint, response: Any) -> str:
    if response.status_code >= 400:
        raise ScorerError(
            "judge", f"{endpoint.base_url} refused with status {response.status_code}: {response.text:.200}"
        )
    try:
        content = response.json()["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ScorerError(
            "judge", f"{endpoint.base_url} answered no chat completion: {response.text:.200}"
        ) from error
    return content if isinstance(content, str) else ""
