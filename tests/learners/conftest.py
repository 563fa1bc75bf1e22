"""The model that the learners' tests train."""

from __future__ import annotations

import pytest

from tests.learners.learner_cases import make_model


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("tiny"))
