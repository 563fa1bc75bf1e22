"""A learner with a model of transformers in this process, by the verbs of protocols.Learner."""

import asyncio

import numpy as np
import torch

from rl_cluster.algorithms.inputs import LossInputs
from rl_cluster.algorithms.table import compute_loss
from rl_cluster.protocols import ForwardOutput, OptimResult


class Box:
    """A Ref that is not the object itself, as on Ray."""

    def __init__(self, value):
        self.value = value


class TorchLearner:
    """A learner with a model of transformers: plain sums of weights times loss, any number before a step."""

    def __init__(self, model, learning_rate):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        self.calls = []
        self.step = 0
        self.fail = None

    async def ask(self, function, *args):
        return function(*[arg.value if isinstance(arg, Box) else arg for arg in args])

    def put(self, value):
        return Box(value)

    def _outputs(self, batch):
        """Log-probabilities and entropies [T], 0 at the first token of a row."""
        logprobs, entropy = [], []
        for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
            ids = torch.from_numpy(batch.tokens[start:end].astype(np.int64))[None]
            table = self.model(ids).logits[0].log_softmax(-1)[:-1]
            zero = table.new_zeros(1)
            targets = ids[0] if batch.target_ids is None else torch.from_numpy(batch.target_ids[start:end])
            logprobs.append(torch.cat([zero, table.gather(-1, targets[1:, None].long())[:, 0]]))
            entropy.append(torch.cat([zero, -(table.exp() * table).sum(-1)]))
        return torch.cat(logprobs), torch.cat(entropy)

    async def forward(self, batch, layout, *, reference=False):
        assert isinstance(batch, Box)
        self.calls.append("forward")
        await asyncio.sleep(0)
        with torch.no_grad():
            logprobs, entropy = self._outputs(batch.value)
        action = batch.value.action_mask
        return Box(ForwardOutput(np.where(action, logprobs, 0.0), np.where(action, entropy, 0.0)))

    async def forward_backward(self, batch, layout, rows, loss):
        assert list(rows) == list(range(layout.num_rows))
        self.calls.append("forward_backward")
        if self.fail == "forward_backward":
            raise RuntimeError("rank 1 is out of memory")
        batch = batch.value
        mask = torch.from_numpy(batch.action_mask)
        columns = {
            name: torch.from_numpy(getattr(batch, name)[batch.action_mask])
            for name in ("proximal_logprobs", "advantages", "weights")
            if getattr(batch, name) is not None
        }
        logprobs, entropy = self._outputs(batch)
        row = torch.from_numpy(batch.row_of_token[batch.action_mask])
        result = compute_loss(
            loss, LossInputs(row, batch.num_rows, logprobs[mask], entropy=entropy[mask], **columns)
        )
        result.loss.backward()
        return result.metrics, Box(np.where(batch.action_mask, logprobs.detach(), 0.0).astype(np.float32))

    async def forget_gradient(self):
        self.calls.append("forget_gradient")
        self.optimizer.zero_grad()

    async def optim_step(self, params=None):
        self.calls.append("optim_step")
        if self.fail == "optim_step":
            raise RuntimeError("rank 1 is out of memory")
        for parameter in self.model.parameters():
            parameter.grad.mul_(params.gradient_scale)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), params.max_grad_norm))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return OptimResult(self.step, self.optimizer.param_groups[0]["lr"], norm)

    async def save(self, folder):
        folder.mkdir(parents=True)
        torch.save(self.model.state_dict(), folder / "weights.pt")

    async def load(self, folder):
        self.model.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
        self.optimizer.zero_grad()

    async def export(self, folder):
        raise NotImplementedError
