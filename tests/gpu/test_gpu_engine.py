"""One vLLM engine on a GPU: publication by CUDA IPC and NCCL, sleep and wake, the gap that bf16 leaves."""

import asyncio
import time

import numpy as np
import pytest
import pytest_asyncio
import torch

from rl_cluster.config.run import ScratchModel
from rl_cluster.modeling.scratch import save_scratch_model
from rl_cluster.trajectory import SamplingSpec
from rl_cluster.weights.channel import Channel
from rl_cluster.weights.wire import TensorMeta

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SCRATCH = ScratchModel(hidden_size=256, num_layers=4, num_heads=4, intermediate_size=1024, max_positions=512)
TOKENS = [3 + (7 * i) % 18 for i in range(64)]
GREEDY = SamplingSpec(temperature=0.0, max_new_tokens=16)
MEAN_GAP = 0.02
"""bf16 keeps 8 bits: a log-probability near -3 moves by about 0.01."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scratch")
    save_scratch_model(SCRATCH, folder, seed=3)
    return folder


@pytest.fixture
def policy(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["ipc", "nccl"])
async def engine(request, folder):
    if request.param == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL between learner and engine needs two GPUs: it refuses two ranks on one")
    from actors.engine import Engine
    from actors.engine_spec import EngineSpec

    spec = EngineSpec(
        model=str(folder), dtype="bfloat16", device="cuda", max_model_len=512, max_num_seqs=64,
        gpu_memory_fraction=0.2, enforce_eager=True, sleep_mode=True, sync_backend=request.param,
    )  # fmt: skip
    engine = await Engine.start(spec, name=request.param)
    yield engine
    engine.shutdown()


def _groups(model):
    yield [(name, parameter.data) for name, parameter in model.named_parameters()]


def _metadata(model):
    return [TensorMeta(n, "bfloat16", tuple(p.shape)) for n, p in model.named_parameters()]


def _changed(model, seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, device="cuda", dtype=torch.float32)
        parameter.data += (0.3 * parameter.data.float().std().nan_to_num() * noise).to(parameter.dtype)
    return model


@torch.no_grad()
def _logprobs(model):
    logits = model(torch.tensor([TOKENS], device="cuda")).logits[0, :-1].float()
    targets = torch.tensor(TOKENS[1:], device="cuda")[:, None]
    return torch.log_softmax(logits, -1).gather(1, targets)[:, 0].cpu().numpy()


async def _publish_ipc(engine, model, version):
    from learners.transfer_vllm import IpcSender

    await engine.join(Channel("ipc", "", 0, 0, 1, 4 << 20, 60), 1)
    sender = IpcSender(4 << 20)
    await engine.begin_update(version, 60)
    while chunk := sender.next_chunk(_groups(model)):
        await engine.apply_chunk(chunk, 60)
    await engine.finish_update(version, 60)


async def _publish_nccl(engine, model, version):
    from learners.transfer_vllm import NcclSender

    sender = NcclSender()
    channel = Channel("nccl", "127.0.0.1", *sender.rendezvous(), 2, 4 << 20, 60)
    await asyncio.gather(asyncio.to_thread(sender.open, channel), engine.join(channel, 1))
    receive = asyncio.ensure_future(engine.receive(version, _metadata(model), 60))
    await asyncio.to_thread(sender.send, _metadata(model), _groups(model), version, time.monotonic() + 60)
    await receive


PUBLISH = {"ipc": _publish_ipc, "nccl": _publish_nccl}


async def test_the_gap_between_engine_and_transformers_is_that_of_bf16(engine, policy):
    found = await engine.prompt_logprobs(TOKENS)
    assert np.abs(found - _logprobs(policy)).mean() < MEAN_GAP


async def test_published_weights_are_served(engine, policy):
    for version in (1, 2):
        old = _logprobs(policy)
        await PUBLISH[engine.name](engine, _changed(policy, version), version)
        new = _logprobs(policy)
        found = await engine.prompt_logprobs(TOKENS)
        assert np.abs(found - new).mean() < MEAN_GAP < np.abs(found - old).mean()
        sample = await engine.generate(TOKENS, 0, GREEDY)
        assert set(sample.versions.tolist()) == {version}


async def test_sleep_gives_memory_back_and_wake_restores_the_engine(engine):
    before = await engine.generate(TOKENS, 0, GREEDY)
    awake = torch.cuda.mem_get_info()[0]
    await engine.sleep()
    asleep = torch.cuda.mem_get_info()[0]
    assert asleep - awake > 0.5 * 0.2 * torch.cuda.mem_get_info()[1]
    await engine.wake()
    after = await engine.generate(TOKENS, 0, GREEDY)
    assert after.tokens.tolist() == before.tokens.tolist()
