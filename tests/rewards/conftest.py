"""The tokenizer of the groups that the reward tests score."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def tokenizer(char_tokenizer: Any) -> Any:
    return char_tokenizer
