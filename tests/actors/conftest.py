"""One scratch model and one vLLM engine for all tests of the actors; the tests leave the engine usable."""

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from rl_cluster.config.run import ScratchModel
from rl_cluster.modeling.scratch import save_scratch_model
from tests.actors.publishing import Publishing

SCRATCH = ScratchModel(hidden_size=64, num_layers=2, num_heads=2, intermediate_size=128, max_positions=512)


@pytest.fixture(scope="session")
def scratch_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scratch")
    save_scratch_model(SCRATCH, folder, seed=3)
    return folder


@pytest.fixture
def policy(scratch_folder):
    """The transformers model that the engine was started from, fresh for each test."""
    return AutoModelForCausalLM.from_pretrained(scratch_folder, dtype=torch.float32).eval()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(scratch_folder):
    from actors.engine import Engine
    from actors.engine_spec import EngineSpec

    spec = EngineSpec(
        model=str(scratch_folder), max_model_len=512, max_num_seqs=64, kv_cache_gib=0.25, num_threads=1
    )
    engine = await Engine.start(spec, name="engine-under-test")
    yield engine
    engine.shutdown()


@pytest_asyncio.fixture(loop_scope="session")
async def publishing(engine):
    publishing = Publishing(engine)
    await publishing.connect()
    yield publishing
    publishing.sender.close()
